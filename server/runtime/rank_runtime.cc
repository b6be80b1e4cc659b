#include "server/runtime/rank_runtime.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/cli/exit_code.h"
#include "base/cli/units.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/runtime/plan_check.h"
#include "server/runtime/router_runtime.h"
#include "server/runtime/worker_runtime.h"

namespace kvasir::cli {
namespace {

// If the last step has not ended after this time, the destructor assumes that
// it hangs, and ends the process.
constexpr absl::Duration kHangs = absl::Seconds(2);
// Drain waits this much longer than its deadline, because the leader may first
// use the whole deadline and then abort running requests.
constexpr absl::Duration kLeaderEnds = absl::Seconds(10);
constexpr absl::Duration kPoll = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<RankRuntime>> RankRuntime::Create(
    RankRuntimeOptions options) {
  auto runtime = std::unique_ptr<RankRuntime>(new RankRuntime());
  const absl::Time start = absl::Now();
  KVASIR_RETURN_IF_ERROR(CheckStepFlags(options.engine, options.model));
  runtime->leader_ = options.group.flags.leader;
  runtime->on_fatal_ = options.group.on_fatal;
  runtime->group_ = std::make_unique<FollowerGroup>(
      std::move(options.group), std::move(options.join), options.children);
  FollowerGroup& group = *runtime->group_;
  LoadRequest request = LoadRequestOf(options.model, options.engine);
  request.group = &group;
  std::shared_ptr<const model::Tokenizer> tokenizer;
  const bool needs_text =
      options.engine.plan_check != "off" || !options.model.no_key_means;
  if (needs_text && !options.model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(tokenizer, LoadTokenizer(options.model.model));
  }
  KVASIR_ASSIGN_OR_RETURN(
      runtime->model_,
      LoadWithPlanCheck(tokenizer.get(), options.engine.plan_check,
                        std::move(request)));
  LoadedModel& model = *runtime->model_;
  const kernels::Device& device = model.rank().device();
  runtime->device_metrics_ = std::make_shared<DeviceMetrics>(
      &device,
      device.has_own_memory() ? options.engine.gpu_memory_utilization : 1);
  runtime->rank_metrics_ = std::make_shared<RankMetrics>(
      RankConstantsOf(model, group.shard(), group.collective_name()),
      &group.collective());
  base::LogInfo(
      "rank ready",
      {{"model", model.source().name},
       {"weights", HumanBytes(static_cast<double>(model.weight_bytes()))},
       {"kv_pool", HumanBytes(static_cast<double>(model.kv_pool_bytes()))},
       {"device", device.name()},
       {"threads", model.num_threads()},
       {"seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  runtime->steps_ = std::thread(
      [owner = runtime.get(), on_drained = std::move(options.on_drained)] {
        const absl::Status status =
            owner->group_->Run(&owner->model_->rank().executor());
        {
          base::MutexLock lock(&owner->mutex_);
          owner->ended_ = true;
          owner->result_ = status;
          owner->changed_.SignalAll();
        }
        // A group that has failed has already called on_fatal.
        if (status.ok() && on_drained) on_drained();
      });
  return runtime;
}

RankRuntime::~RankRuntime() {
  if (steps_.joinable()) {
    group_->Abort(absl::CancelledError("the rank ends"));
    if (!WaitEnded(kHangs)) std::_Exit(kExitFailed);
    steps_.join();
  }
  if (rank_metrics_ != nullptr) rank_metrics_->Stop();
  if (device_metrics_ != nullptr) device_metrics_->Stop();
}

Node::MetricsSources RankRuntime::Metrics() const {
  return {std::make_shared<OfRank>(group_->shard().rank, device_metrics_),
          rank_metrics_};
}

bool RankRuntime::WaitEnded(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  base::MutexLock lock(&mutex_);
  while (!ended_) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitWithTimeout(&mutex_, left);
  }
  return true;
}

DrainOutcome RankRuntime::Drain(absl::Duration deadline) {
  if (const absl::Status ended = DrainGroup(deadline); !ended.ok()) {
    on_fatal_(ended.ToString());
  }
  return {};
}

absl::Status RankRuntime::DrainGroup(absl::Duration deadline) {
  group_->AskDrain();
  const absl::Time end = absl::Now() + deadline + kLeaderEnds;
  while (!WaitEnded(kPoll)) {
    // If the group has failed, return at once, because a step may hang in the
    // failed collective.
    KVASIR_RETURN_IF_ERROR(group_->status());
    if (absl::Now() > end) {
      return absl::DeadlineExceededError(
          absl::StrCat("the leader has not drained the group of ranks within ",
                       absl::FormatDuration(deadline + kLeaderEnds)));
    }
  }
  base::MutexLock lock(&mutex_);
  return result_;
}

}  // namespace kvasir::cli
