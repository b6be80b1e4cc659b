// Test support for rank groups: an event to wait for, a fake executor, and
// messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "proto/kvasir/v1/rank.pb.h"
#include "worker/executor/executor.h"
#include "worker/ranks/group/rank_group_state.h"
#include "worker/ranks/group/rank_identity.h"

namespace kvasir::worker {

// A timeout much longer than any wait of these tests should take.
inline constexpr absl::Duration kLong = absl::Seconds(30);

class Event {
 public:
  void Set() {
    base::MutexLock lock(&mutex_);
    set_ = true;
    changed_.SignalAll();
  }
  bool Wait(absl::Duration timeout = kLong) {
    base::MutexLock lock(&mutex_);
    while (!set_) {
      if (changed_.WaitWithTimeout(&mutex_, timeout)) return set_;
    }
    return true;
  }

 private:
  base::Mutex mutex_;
  base::CondVar changed_;
  bool set_ ABSL_GUARDED_BY(mutex_) = false;
};

// A fake executor: each step samples the token 100 + step id. The hook may
// change the result or fail.
class FakeRank final : public Executor {
 public:
  using Hook = std::function<absl::Status(const kvasir::v1::StepPlan&,
                                          kvasir::v1::StepResult*)>;
  explicit FakeRank(Hook hook = {}) : hook_(std::move(hook)) {}

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override {
    plan_ = plan;
    return absl::OkStatus();
  }
  absl::StatusOr<kvasir::v1::StepResult> Await() override {
    kvasir::v1::StepResult result;
    result.set_step_id(plan_.step_id());
    auto* sequence = result.add_sequences();
    sequence->set_sequence_id(1);
    sequence->set_token_id(static_cast<int32_t>(100 + plan_.step_id()));
    if (hook_) {
      if (absl::Status status = hook_(plan_, &result); !status.ok()) {
        return status;
      }
    }
    ++steps_;
    return result;
  }
  bool is_asynchronous() const override { return true; }
  int steps() const { return steps_.load(); }

 private:
  const Hook hook_;
  kvasir::v1::StepPlan plan_;
  std::atomic<int> steps_{0};
};

inline kvasir::v1::RankIdentity TestIdentity(uint32_t size,
                                             absl::Duration heartbeat) {
  kvasir::v1::RankIdentity identity;
  identity.set_api_version(kRankApiVersion);
  identity.set_tp_size(size);
  identity.set_heartbeat_timeout_ms(
      static_cast<uint32_t>(absl::ToInt64Milliseconds(heartbeat)));
  return identity;
}

inline kvasir::v1::RankReady TestReady(int64_t pages,
                                       const std::string& tiles = "tiles") {
  kvasir::v1::RankReady ready;
  ready.set_weight_tiles(tiles);
  ready.add_pages(pages);
  return ready;
}

// Combines the tiles "a" of rank 0, "b" of rank 1 and so on into the weights_id
// "weights a|b".
inline absl::StatusOr<CombinedIds> TestCombine(
    absl::Span<const std::string> tiles) {
  return CombinedIds{
      .weights_id = absl::StrCat("weights ", absl::StrJoin(tiles, "|")),
      .cache_id = "cache"};
}

inline kvasir::v1::StepPlan TestPlan(uint64_t step) {
  kvasir::v1::StepPlan plan;
  plan.set_step_id(step);
  return plan;
}

}  // namespace kvasir::worker
