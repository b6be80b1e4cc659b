#include "worker/engine/engine.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "cache/kv_cache.h"
#include "worker/engine/admission.h"
#include "worker/engine/plan_dump.h"
#include "worker/engine/scheduler.h"

namespace kvasir::worker {
namespace {

using base::AbslView;
using base::MutexLock;
using kvasir::v1::StepPlan;

// How long the engine's thread sleeps if there is work but no step can be
// planned. Then it checks deadlines and plans again. The watchdog does not
// count this sleep as progress.
constexpr absl::Duration kNothingPlanned = absl::Milliseconds(10);

// The sink of the warm-up requests, which ignores all events.
class NullSink final : public EngineSink {
 public:
  void OnAccepted(uint32_t) override {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens&) override {}
  void OnFinished(const kvasir::v1::GenerateEvent::Finish&, bool) override {}
  void OnFailed(const Refusal&) override {}
};

// A step hangs if it takes this many times as long as the longest one so far.
// The warm-up runs the largest batch; longer contexts take a few times longer.
constexpr int kStepLimitFactor = 10;
constexpr absl::Duration kLeastStepLimit = absl::Seconds(10);

// Implements Engine with its own threads. mutex_ is the only lock; no callback
// runs while it is held.
class ThreadedEngine final : public Engine, private EngineObserver {
 public:
  ThreadedEngine(EngineOptions options, cache::KvCache* cache,
                 Executor* executor)
      : options_(std::move(options)), cache_(cache), executor_(executor) {}
  ~ThreadedEngine() override { Stop(); }

  absl::Status Init();
  absl::Status Start() override ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() override ABSL_LOCKS_EXCLUDED(mutex_);
  Refusal Submit(Request request, std::shared_ptr<EngineSink> sink) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  int Abort(std::string_view request_id,
            std::optional<uint32_t> attempt) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void RefuseAll(const Refusal& why) override ABSL_LOCKS_EXCLUDED(mutex_);
  void BeginDrain() override ABSL_LOCKS_EXCLUDED(mutex_);
  bool WaitIdle(absl::Time deadline) override ABSL_LOCKS_EXCLUDED(mutex_);
  LoadSnapshot Load() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void SubscribeLoad(std::weak_ptr<LoadListener> listener) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  EngineTotals Totals() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  enum class State { kNew, kWarmingUp, kRunning, kStopping, kStopped, kFailed };

  // A method call by another thread, passed to the engine's thread.
  struct Command {
    enum class Kind { kSubmit, kAbort, kRefuseAll };
    Kind kind = Kind::kSubmit;
    Request request;
    std::shared_ptr<EngineSink> sink;
    std::string request_id;
    std::optional<uint32_t> attempt;
    Refusal why;
  };

  // Implements EngineObserver: the scheduler calls it on the engine's thread.
  void OnRequestEnd(const RequestSummary& summary) override;

  Refusal Admit(Request* request, std::shared_ptr<EngineSink>* sink)
      ABSL_LOCKS_EXCLUDED(mutex_);
  Serving serving() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a new request that needs `seats` seats can join the next step. It
  // can if that many seats are free and no other sequence waits.
  bool StartsAtOnce(uint32_t seats) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The methods from Run to EndAll run on the engine's thread.
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status WarmUp();
  // Waits up to `wait` for a command, then moves the inbox to commands_.
  // Returns false if the engine must stop.
  bool TakeCommands(absl::Duration wait) ABSL_LOCKS_EXCLUDED(mutex_);
  void RunCommands();
  // Runs one step and applies its result. If the executor is asynchronous,
  // plans and enqueues the next step before the result is applied. `planned` is
  // set to false if no step could be planned.
  absl::Status Step(bool* planned);
  // Enqueues a plan and records it for the watchdog.
  absl::Status Enqueue(const StepPlan& plan) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<kvasir::v1::StepResult> Await() ABSL_LOCKS_EXCLUDED(mutex_);
  void Observe(absl::Duration schedule, absl::Duration execute)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Updates live_ and load_ for other threads, and passes a changed load to
  // listeners.
  void Publish() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Duration StepLimit() const;  // LoadSnapshot.step_limit_ms
  void ForgetEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // The function of the watchdog's thread.
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);

  // Constant after Init.
  EngineOptions options_;
  std::optional<Admission> admission_;
  cache::KvCache* const cache_;
  Executor* const executor_;

  // Used only in Start and Stop, by the owner's thread.
  std::thread thread_;
  std::thread watchdog_;

  struct Ended {
    std::string request_id;
    uint32_t attempt = 0;
    bool failed = false;
    bool aborted = false;
  };

  // Only the engine's thread uses the members from scheduler_ to planning_.
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<Ended> ended_;  // requests that ended since the last Publish
  std::vector<Command> commands_;
  bool warming_up_ = false;
  // The step that was enqueued and not yet awaited (null: none), when it was
  // enqueued, and how long its planning took.
  const StepPlan* in_flight_ = nullptr;
  absl::Time enqueued_at_;
  absl::Duration planning_;
  absl::Duration longest_step_;

  mutable base::Mutex mutex_;
  base::CondVar wake_;  // wakes the engine's thread for commands and Stop
  // Wakes Start, WaitIdle and the watchdog: state_ changed or live_ is empty.
  base::CondVar changed_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kNew;
  absl::Status warm_up_status_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Command> inbox_ ABSL_GUARDED_BY(mutex_);
  // The live attempts of each request, by request id.
  absl::flat_hash_map<std::string, std::vector<uint32_t>> live_
      ABSL_GUARDED_BY(mutex_);
  uint64_t num_live_ ABSL_GUARDED_BY(mutex_) = 0;
  // The numbers of requests that wait for their first step, in the inbox and in
  // the scheduler.
  uint32_t inbox_submits_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t scheduler_queued_ ABSL_GUARDED_BY(mutex_) = 0;
  LoadSnapshot load_ ABSL_GUARDED_BY(mutex_);
  // Makes the next Publish pass the load to listeners even if it is unchanged.
  bool load_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<LoadListener>> listeners_ ABSL_GUARDED_BY(mutex_);
  EngineTotals totals_ ABSL_GUARDED_BY(mutex_);
  // The plan that is being executed, for the watchdog's report. It does not
  // change while this pointer is set.
  const StepPlan* executing_ ABSL_GUARDED_BY(mutex_) = nullptr;
  // Read by the watchdog: whether there is work, and when the engine last made
  // progress.
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time progress_at_ ABSL_GUARDED_BY(mutex_);
};

absl::Status ThreadedEngine::Init() {
  RequestLimits& limits = options_.limits;
  limits.vocab_size = options_.scheduler.vocab_size;
  limits.max_model_len = options_.scheduler.max_model_len;
  limits.token_masks = options_.token_masks != nullptr;
  limits.eviction = options_.scheduler.eviction;
  std::vector<EvictionLimits::Group>& groups = limits.eviction.groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    const cache::PageGroupId group(static_cast<int32_t>(g));
    groups[g].pages = cache_->sequence_pages(group);
    groups[g].num_pages = cache_->num_pages(group);
  }
  limits.max_n = std::min(limits.max_n, options_.scheduler.max_num_seqs);
  admission_.emplace(limits, options_.scheduler.max_queue);
  // Submit enforces max_queue. The scheduler's own limit is set higher, so that
  // a full batch of warm-up requests fits.
  SchedulerOptions scheduler = options_.scheduler;
  scheduler.max_queue = std::max(scheduler.max_queue, scheduler.max_num_seqs);
  KVASIR_ASSIGN_OR_RETURN(
      scheduler_,
      Scheduler::Create(scheduler, {.cache = cache_,
                                    .clock = options_.clock,
                                    .observer = this,
                                    .token_masks = options_.token_masks}));
  MutexLock lock(&mutex_);
  load_ = scheduler_->Load();
  return absl::OkStatus();
}

absl::Status ThreadedEngine::Start() {
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kNew) {
      return absl::FailedPreconditionError(
          "the engine was already started or stopped");
    }
    state_ = State::kWarmingUp;
    progress_at_ = options_.clock->Now();
  }
  thread_ = std::thread([this] { Run(); });
  if (options_.watchdog > absl::ZeroDuration()) {
    watchdog_ = std::thread([this] { Watch(); });
  }
  MutexLock lock(&mutex_);
  while (state_ == State::kWarmingUp) changed_.Wait(&mutex_);
  return warm_up_status_;
}

void ThreadedEngine::Stop() {
  {
    MutexLock lock(&mutex_);
    if (state_ == State::kNew) state_ = State::kStopped;
    if (state_ == State::kRunning) state_ = State::kStopping;
    wake_.SignalAll();
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  {
    MutexLock lock(&mutex_);
    if (state_ != State::kFailed) state_ = State::kStopped;
    changed_.SignalAll();
  }
  if (watchdog_.joinable()) watchdog_.join();
}

// ---------------------------------------------------------------------------
// Methods that any thread may call
// ---------------------------------------------------------------------------

Refusal ThreadedEngine::Submit(Request request,
                               std::shared_ptr<EngineSink> sink) {
  Refusal refusal = Admit(&request, &sink);
  if (!refusal.ok() && options_.observer != nullptr) {
    options_.observer->OnRefused(refusal);
  }
  return refusal;
}

Refusal ThreadedEngine::Admit(Request* request,
                              std::shared_ptr<EngineSink>* sink) {
  // Checking the tokens of a long prompt takes time, so it is done before the
  // lock is taken.
  if (Refusal refusal = admission_->CheckRequest(*request); !refusal.ok()) {
    return refusal;
  }
  const absl::Time now = options_.clock->Now();
  request->arrival = now;

  MutexLock lock(&mutex_);
  if (Refusal refusal = Admission::CheckState(serving()); !refusal.ok()) {
    return refusal;
  }
  const auto found = live_.find(request->request_id);
  if (Refusal refusal = admission_->CheckPlace(
          *request,
          {.num_queued = inbox_submits_ + scheduler_queued_,
           .is_live = found != live_.end() &&
                      std::find(found->second.begin(), found->second.end(),
                                request->attempt) != found->second.end(),
           .starts_at_once = StartsAtOnce(request->sampling.n())});
      !refusal.ok()) {
    return refusal;
  }
  live_[request->request_id].push_back(request->attempt);
  ++num_live_;
  ++inbox_submits_;
  if (!busy_) {
    busy_ = true;
    progress_at_ = now;
  }
  Command command;
  command.kind = Command::Kind::kSubmit;
  command.request = std::move(*request);
  command.sink = std::move(*sink);
  inbox_.push_back(std::move(command));
  wake_.Signal();
  return {};
}

Serving ThreadedEngine::serving() const {
  switch (state_) {
    case State::kNew:
    case State::kWarmingUp:
      return Serving::kStarting;
    case State::kRunning:
      break;
    case State::kStopping:
    case State::kStopped:
      return Serving::kStopped;
    case State::kFailed:
      return Serving::kFailed;
  }
  return draining_ ? Serving::kDraining : Serving::kRunning;
}

bool ThreadedEngine::StartsAtOnce(uint32_t seats) const {
  const uint64_t taken =
      uint64_t{load_.running} + inbox_submits_ + scheduler_queued_;
  return load_.waiting == 0 && taken + seats <= options_.scheduler.max_num_seqs;
}

int ThreadedEngine::Abort(std::string_view request_id,
                          std::optional<uint32_t> attempt) {
  MutexLock lock(&mutex_);
  const auto found = live_.find(AbslView(request_id));
  if (found == live_.end()) return 0;
  const std::vector<uint32_t>& attempts = found->second;
  const auto matches = static_cast<int>(
      attempt.has_value()
          ? std::count(attempts.begin(), attempts.end(), *attempt)
          : static_cast<std::ptrdiff_t>(attempts.size()));
  if (matches == 0) return 0;
  Command command;
  command.kind = Command::Kind::kAbort;
  command.request_id = std::string(request_id);
  command.attempt = attempt;
  inbox_.push_back(std::move(command));
  wake_.Signal();
  return matches;
}

void ThreadedEngine::RefuseAll(const Refusal& why) {
  MutexLock lock(&mutex_);
  if (num_live_ == 0) return;
  Command command;
  command.kind = Command::Kind::kRefuseAll;
  command.why = why;
  inbox_.push_back(std::move(command));
  wake_.Signal();
}

void ThreadedEngine::BeginDrain() {
  MutexLock lock(&mutex_);
  draining_ = true;
  load_wanted_ = true;
  wake_.Signal();
}

bool ThreadedEngine::WaitIdle(absl::Time deadline) {
  MutexLock lock(&mutex_);
  while (num_live_ > 0) {
    const absl::Duration left = deadline - options_.clock->Now();
    if (left <= absl::ZeroDuration()) return false;
    if (left == absl::InfiniteDuration()) {
      changed_.Wait(&mutex_);
    } else {
      changed_.WaitWithTimeout(&mutex_, left);
    }
  }
  return true;
}

LoadSnapshot ThreadedEngine::Load() const {
  MutexLock lock(&mutex_);
  LoadSnapshot load = load_;
  load.draining = draining_;
  return load;
}

void ThreadedEngine::SubscribeLoad(std::weak_ptr<LoadListener> listener) {
  MutexLock lock(&mutex_);
  listeners_.push_back(std::move(listener));
  load_wanted_ = true;
  wake_.Signal();
}

EngineTotals ThreadedEngine::Totals() const {
  MutexLock lock(&mutex_);
  return totals_;
}

// ---------------------------------------------------------------------------
// The engine's thread
// ---------------------------------------------------------------------------

void ThreadedEngine::Run() {
  absl::Status status = options_.warm_up ? WarmUp() : absl::OkStatus();
  {
    MutexLock lock(&mutex_);
    warm_up_status_ = status;
    state_ = status.ok() ? State::kRunning : State::kFailed;
    changed_.SignalAll();
    if (!status.ok()) return;
  }
  bool planned = true;
  while (true) {
    const bool idle = !scheduler_->has_work() && in_flight_ == nullptr;
    if (!TakeCommands(idle      ? absl::InfiniteDuration()
                      : planned ? absl::ZeroDuration()
                                : kNothingPlanned)) {
      EndAll();
      return;
    }
    RunCommands();
    if (status = Step(&planned); !status.ok()) {
      Fail(status);
      return;
    }
    Publish();
  }
}

// Prefills max_batched_tokens tokens in max_num_seqs sequences and decodes one
// token of each, as far as pages allow. This allocates the memory for the
// largest batch, and finds errors before the first request.
absl::Status ThreadedEngine::WarmUp() {
  warming_up_ = true;
  const SchedulerOptions& o = options_.scheduler;
  const uint32_t prompt = std::clamp<uint32_t>(
      o.max_batched_tokens / o.max_num_seqs, 1, o.max_model_len - 1);
  const auto sink = std::make_shared<NullSink>();
  for (uint32_t i = 0; i < o.max_num_seqs; ++i) {
    Request request;
    request.request_id = absl::StrCat("warm-up-", i);
    request.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(prompt));
    request.sampling.set_temperature(0.0f);
    request.sampling.set_max_tokens(2);
    request.sampling.set_ignore_eos(true);
    request.queue_timeout = absl::InfiniteDuration();
    request.use_prefix_cache = false;
    if (const Refusal refusal = scheduler_->Add(std::move(request), sink);
        !refusal.ok()) {
      return refusal.status;
    }
  }
  bool planned = true;
  while (scheduler_->has_work() || in_flight_ != nullptr) {
    const absl::Status status = Step(&planned);
    if (!status.ok()) {
      scheduler_->FailAll(Admission::ExecutorFailed(status));
      return status;
    }
  }
  warming_up_ = false;
  return absl::OkStatus();
}

bool ThreadedEngine::TakeCommands(absl::Duration wait) {
  MutexLock lock(&mutex_);
  if (wait == absl::InfiniteDuration()) {
    busy_ = inbox_submits_ > 0;
    while (inbox_.empty() && !load_wanted_ && state_ == State::kRunning) {
      wake_.Wait(&mutex_);
    }
  } else if (wait > absl::ZeroDuration() && inbox_.empty() &&
             state_ == State::kRunning) {
    wake_.WaitWithTimeout(&mutex_, wait);
  }
  commands_.swap(inbox_);
  // Until Publish copies the scheduler's count, count the requests that were in
  // the inbox as waiting in the scheduler.
  scheduler_queued_ += std::exchange(inbox_submits_, 0);
  return state_ == State::kRunning;
}

void ThreadedEngine::RunCommands() {
  for (Command& command : commands_) {
    switch (command.kind) {
      case Command::Kind::kSubmit: {
        // Submit has made the checks of Add, so Add must succeed.
        const Refusal refusal =
            scheduler_->Add(std::move(command.request), command.sink);
        KVASIR_CHECK(refusal.ok());
        break;
      }
      case Command::Kind::kAbort:
        scheduler_->Abort(command.request_id, command.attempt);
        break;
      case Command::Kind::kRefuseAll:
        scheduler_->RefuseAll(command.why);
        break;
    }
  }
  commands_.clear();
}

absl::Status ThreadedEngine::Step(bool* planned) {
  const base::Clock& clock = *options_.clock;
  const auto timed = [&clock](const auto& plan, absl::Duration* spent) {
    const absl::Time start = clock.Now();
    const StepPlan* const made = plan();
    *spent = clock.Now() - start;
    return made;
  };
  *planned = true;
  if (in_flight_ == nullptr) {
    const StepPlan* const plan =
        timed([this] { return scheduler_->Schedule(); }, &planning_);
    *planned = plan != nullptr;
    if (plan == nullptr) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(Enqueue(*plan));
  }
  const StepPlan* next = nullptr;
  absl::Duration next_planning;
  if (executor_->is_asynchronous()) {
    next =
        timed([this] { return scheduler_->ScheduleAhead(); }, &next_planning);
    if (next != nullptr) KVASIR_RETURN_IF_ERROR(executor_->Announce(*next));
  }
  const absl::StatusOr<kvasir::v1::StepResult> result = Await();
  KVASIR_RETURN_IF_ERROR(result.status());
  const absl::Time executed = clock.Now();
  const absl::Duration execute = executed - enqueued_at_;
  // The time that ScheduleAhead took counts towards the step that it planned
  // or, if it planned none, towards this step.
  const absl::Duration planning =
      planning_ + (next == nullptr ? next_planning : absl::ZeroDuration());
  planning_ = next_planning;
  // The next step is enqueued first, so that the device runs it while this
  // step's tokens are delivered. If that Enqueue fails, the tokens are still
  // delivered before the error is returned.
  const absl::Status next_enqueued =
      next == nullptr ? absl::OkStatus() : Enqueue(*next);
  const absl::Time handled_from = clock.Now();
  if (!warming_up_) {
    // Aborts that arrived while the step ran are carried out first, so that
    // their requests get no token of this step.
    TakeCommands(absl::ZeroDuration());
    RunCommands();
  }
  KVASIR_RETURN_IF_ERROR(scheduler_->Apply(*result));
  Observe(planning + (clock.Now() - handled_from), execute);
  return next_enqueued;
}

void ThreadedEngine::Observe(absl::Duration schedule, absl::Duration execute) {
  if (options_.observer == nullptr || warming_up_) return;
  StepStats stats = scheduler_->last_step();
  stats.execute = execute;
  stats.schedule = schedule;
  {
    MutexLock lock(&mutex_);
    // Set here, because the scheduler does not know about drains.
    stats.load.draining = draining_;
  }
  options_.observer->OnStep(stats);
}

absl::Status ThreadedEngine::Enqueue(const StepPlan& plan) {
  in_flight_ = &plan;
  enqueued_at_ = options_.clock->Now();
  {
    MutexLock lock(&mutex_);
    executing_ = &plan;
  }
  return executor_->Enqueue(plan);
}

absl::StatusOr<kvasir::v1::StepResult> ThreadedEngine::Await() {
  absl::StatusOr<kvasir::v1::StepResult> result = executor_->Await();
  in_flight_ = nullptr;
  const absl::Time now = options_.clock->Now();
  // A step above the limit was stopped from outside; it doubles the limit.
  const absl::Duration most = 2 * StepLimit() / kStepLimitFactor;
  const absl::Duration took = now - enqueued_at_;
  longest_step_ = std::max(longest_step_, took > StepLimit() ? most : took);
  MutexLock lock(&mutex_);
  executing_ = nullptr;
  progress_at_ = now;
  return result;
}

absl::Duration ThreadedEngine::StepLimit() const {
  return std::clamp(kStepLimitFactor * longest_step_, kLeastStepLimit,
                    absl::Hours(24));
}

void ThreadedEngine::Publish() {
  LoadSnapshot load = scheduler_->Load();
  std::vector<std::shared_ptr<LoadListener>> listeners;
  {
    MutexLock lock(&mutex_);
    scheduler_queued_ = scheduler_->num_queued();
    load.draining = draining_;
    load.step_limit_ms =
        static_cast<uint32_t>(absl::ToInt64Milliseconds(StepLimit()));
    const bool wanted = std::exchange(load_wanted_, false);
    const bool changed = load != load_;
    load_ = load;
    ForgetEnded();
    if (!changed && !wanted) return;
    std::erase_if(listeners_, [&](const std::weak_ptr<LoadListener>& weak) {
      auto listener = weak.lock();
      if (listener == nullptr) return true;
      listeners.push_back(std::move(listener));
      return false;
    });
  }
  for (const auto& listener : listeners) listener->OnLoad(load);
}

void ThreadedEngine::OnRequestEnd(const RequestSummary& summary) {
  if (warming_up_) return;
  if (options_.observer != nullptr) options_.observer->OnRequestEnd(summary);
  ended_.push_back({.request_id = summary.request_id,
                    .attempt = summary.attempt,
                    .failed = !summary.reason.has_value(),
                    .aborted = summary.aborted});
}

void ThreadedEngine::ForgetEnded() {
  for (const Ended& ended : ended_) {
    ++(ended.failed    ? totals_.failed
       : ended.aborted ? totals_.aborted
                       : totals_.finished);
    const auto found = live_.find(ended.request_id);
    KVASIR_CHECK(found != live_.end());
    std::erase(found->second, ended.attempt);
    if (found->second.empty()) live_.erase(found);
    if (--num_live_ == 0) {
      busy_ = false;
      changed_.SignalAll();
    }
  }
  ended_.clear();
}

void ThreadedEngine::Fail(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    // In this state Submit refuses, so no new request enters the inbox.
    state_ = State::kFailed;
    busy_ = false;
    commands_.swap(inbox_);
    inbox_submits_ = 0;
    changed_.SignalAll();
  }
  RunCommands();
  scheduler_->FailAll(Admission::ExecutorFailed(status));
  Publish();
  if (options_.on_failure) options_.on_failure(status);
}

void ThreadedEngine::EndAll() {
  RunCommands();
  // The running step's result is not used. It must still be awaited, because
  // the executor may be destroyed after Stop.
  scheduler_->FailAll(Admission::EngineStopped());
  Publish();
  if (in_flight_ == nullptr) return;
  if (const auto result = Await(); !result.ok()) Fail(result.status());
}

// ---------------------------------------------------------------------------
// The watchdog's thread
// ---------------------------------------------------------------------------

void ThreadedEngine::Watch() {
  const absl::Duration interval = std::clamp(
      options_.watchdog / 4, absl::Milliseconds(1), absl::Seconds(1));
  StallReport report;
  {
    MutexLock lock(&mutex_);
    while (true) {
      if (state_ == State::kStopped || state_ == State::kFailed) return;
      changed_.WaitWithTimeout(&mutex_, interval);
      const bool working = busy_ || executing_ != nullptr;
      const absl::Duration silent = options_.clock->Now() - progress_at_;
      if (!working || silent <= options_.watchdog) continue;
      report.stalled = silent;
      report.plan =
          executing_ == nullptr ? "no step is running" : DumpPlan(*executing_);
      break;
    }
  }
  if (options_.on_stall) options_.on_stall(report);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options,
                                                       cache::KvCache* cache,
                                                       Executor* executor) {
  auto engine =
      std::make_unique<ThreadedEngine>(std::move(options), cache, executor);
  KVASIR_RETURN_IF_ERROR(engine->Init());
  return engine;
}

}  // namespace kvasir::worker
