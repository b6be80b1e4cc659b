// Decides which tokens run in the next step: continuous batching with chunked
// prefill, priorities, deadlines, preemption. Pure logic over an injected clock
// and the cache's bookkeeping; its output is a StepPlan, its input the result.
//
//   scheduler->Add(request, sink);
//   while (const StepPlan* plan = scheduler->Schedule()) {
//     scheduler->Apply(*executor->Execute(*plan));   // sinks hear the tokens
//   }
//
// Where a step runs behind its Enqueue, the next one can be planned meanwhile
// (ScheduleAhead): what it needs of the first is that every sequence of it gets
// a token, not which.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "cache/kv_cache.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/engine/admission.h"
#include "worker/engine/engine_events.h"
#include "worker/engine/plan_builder.h"
#include "worker/engine/preemption.h"
#include "worker/engine/request.h"
#include "worker/engine/scheduler_options.h"
#include "worker/engine/sequence.h"
#include "worker/engine/token_mask.h"

namespace kvasir::worker {

struct SchedulerDeps {
  cache::KvCache* cache = nullptr;
  const base::Clock* clock = nullptr;
  EngineObserver* observer = nullptr;        // may be null
  TokenMaskProvider* token_masks = nullptr;  // may be null
};

// One sequence as others may see it: for tests and for an operator who looks.
struct SequenceSnapshot {
  std::string request_id;
  uint32_t sample_index = 0;
  uint64_t sequence_id = 0;
  bool running = false;  // else waiting
  int32_t priority = 0;
  uint32_t num_tokens = 0;
  uint32_t computed_tokens = 0;
  uint32_t preemptions = 0;
};

// Owns: every request from Add to its last sink call, and their sequences.
// Threads: one thread at a time; it calls the sinks and the observer.
// Errors: what a request can do wrong is a Refusal; a result that does not
//   belong to the plan is an error of the executor.
class Scheduler {
 public:
  // INVALID_ARGUMENT when the options contradict each other or one sequence of
  // max_model_len tokens does not fit the cache.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(
      const SchedulerOptions& options, const SchedulerDeps& deps);
  ~Scheduler();

  // Queues a validated request of at most max_num_seqs samples. Refusals:
  // ALREADY_EXISTS, kRetryElsewhere (queue full).
  // The sink hears OnAccepted; if what was emitted before already ends the
  // output, OnFinished as well.
  Refusal Add(Request request, std::shared_ptr<EngineSink> sink);

  // The next step; nullptr when nothing can run. Ends requests whose time is
  // up. No step is planned and not applied (CHECK). A plan is valid until its
  // Apply; each is followed by that or by FailAll.
  const kvasir::v1::StepPlan* Schedule();
  // The step behind the one that Schedule or ScheduleAhead gave last, whose
  // result is not known yet (CHECK): all running sequences decode on. nullptr
  // where it takes the result, or where more than that is to be done: somebody
  // can be admitted, a prompt goes on, slots are due to be evicted, pages run
  // out, a token mask follows the output. A sequence that ends meanwhile runs
  // in it for nothing.
  const kvasir::v1::StepPlan* ScheduleAhead();

  // Takes over a step's result and hands out its tokens; of two planned steps
  // the first one's. INTERNAL when the result lacks what the plan asked for. A
  // request for which no token could be sampled fails alone.
  absl::Status Apply(const kvasir::v1::StepResult& result);

  // Ends requests between or during steps (a result for them is dropped).
  // Returns how many matched.
  int Abort(std::string_view request_id, std::optional<uint32_t> attempt);
  // The same for every request, each of which hears OnFailed(why).
  void RefuseAll(const Refusal& why);
  // The same when there will be no result for the step that runs.
  void FailAll(const Refusal& why);

  // Whether anything runs or waits.
  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  uint32_t num_running() const {
    return static_cast<uint32_t>(running_.size());
  }
  uint32_t num_waiting() const {
    return static_cast<uint32_t>(waiting_.size());
  }
  // Requests that wait for their first step.
  uint32_t num_queued() const { return num_queued_; }
  LoadSnapshot Load() const;
  // Running sequences, then waiting ones, each in the order they are served.
  std::vector<SequenceSnapshot> Snapshot() const;
  // What the last step to be applied did, in its Schedule too; before that, or
  // when nothing could run, what the last Schedule did. The durations are the
  // caller's.
  const StepStats& last_step() const { return stats_; }

 private:
  Scheduler(const SchedulerOptions& options, const SchedulerDeps& deps);

  struct Step : PlannedStep {
    absl::Time planned_at;
    StepStats stats;
  };
  Step& StepOf(uint64_t step_id) { return steps_[step_id % kMostPlannedSteps]; }

  // Schedule's parts.
  void EndOverdue(absl::Time now);
  // What plan_ has, as the next step; nullptr when it has nothing.
  const kvasir::v1::StepPlan* BuildStep(absl::Time now);
  // Whether the sequences of the step that runs can decode on without more
  // being done.
  bool CanRunAhead() const;
  // The sequence's part of the step planned last; null: it has none.
  const PlannedSequence* LastPartOf(const Sequence& sequence) const;
  // The first of those that wait finds no place in the next step, but for what
  // comes free with the one that runs: that is seen a step later.
  bool MustWait(const Sequence& sequence) const;
  // Nothing has changed since too few pages were found for it.
  bool LackedPages(const Sequence& sequence) const;
  // Puts the best waiting sequence, with its forks, into the batch if it can
  // run now; returns how many sequences went in. May preempt running sequences
  // of strictly lower priority at `victims_from` and behind.
  size_t TryAdmit(size_t victims_from, absl::Time now);
  bool HasRoomFor(const Sequence& sequence);
  // What a sequence of the request takes of a page group.
  cache::SequencePages PagesOf(const RequestState& state,
                               cache::PageGroupId group) const;
  // For its tokens and one more; `found_tokens`: of a prefix, whose pages it
  // has once it is started.
  bool PagesSuffice(const Sequence& sequence, int64_t found_tokens,
                    bool is_started = false) const;
  // From its image, if it has one. False when it does not fit after all;
  // nothing has changed then.
  bool Start(Sequence* sequence, absl::Time now);
  bool StartAnew(Sequence* sequence);
  bool StartFromImage(Sequence* sequence);
  // Plans as many of the sequence's tokens as budget and pages allow; false
  // when no page was to be had.
  bool PlanSequence(Sequence* sequence, size_t victims_from);
  // Makes room for up to `want` tokens; returns for how many. When there is
  // room for none, preempts running sequences at `victims_from` and behind.
  uint32_t Grow(const Sequence& sequence, uint32_t want, size_t victims_from);
  // Its cache goes to the host pool, where there is room for it and that takes
  // less time than computing it again.
  void Preempt(Sequence* sequence);
  bool ShouldCopy(const Sequence& sequence) const;
  // Sample 0 has all of the prompt but the last token in the cache: the other
  // samples share it, and each runs that token for itself.
  void ForkIfReady(Sequence* leader);

  // Apply's parts.
  absl::Status CheckResult(uint64_t step_id, const PlannedSequence& planned,
                           const kvasir::v1::SequenceResult* result) const;
  void ApplyToSequence(uint64_t step_id, const PlannedSequence& planned,
                       const kvasir::v1::SequenceResult* result,
                       absl::Time now);
  void Deliver(uint64_t step_id, Sequence* sequence,
               const kvasir::v1::SequenceResult& result, absl::Time now);

  void InitRequest(RequestState* state, absl::Time now) const;

  // Moves between waiting, running and neither.
  void Enqueue(Sequence* sequence);
  void LeaveQueue(Sequence* sequence);
  void EnterBatch(Sequence* sequence);
  void LeaveBatch(Sequence* sequence);
  void Leave(Sequence* sequence);

  // Ends. The request stays readable until the public method returns.
  bool EndIfComplete(Sequence* sequence, absl::Time now);
  void Finish(Sequence* sequence, kvasir::v1::FinishReason reason,
              std::optional<int32_t> matched, absl::Time now);
  void AbortRequest(RequestState* request);
  void FailRequest(RequestState* request, const Refusal& why);
  void EndRequest(RequestState* request, absl::Time now);
  std::vector<RequestState*> LiveRequests() const;  // by arrival

  // Constant after construction.
  const SchedulerOptions options_;
  const SchedulerDeps deps_;
  const Admission admission_;

  // By request id: its attempts, mostly one.
  absl::flat_hash_map<std::string, std::vector<std::unique_ptr<RequestState>>>
      requests_;
  std::vector<std::unique_ptr<RequestState>> ended_;
  std::vector<Sequence*> running_;  // by RunsBefore
  std::set<Sequence*, RunsBefore> waiting_;
  PlanBuilder plan_;
  // By step id. Those that are planned and not applied are the last ones.
  std::array<Step, kMostPlannedSteps> steps_;
  uint64_t num_planned_ = 0;

  uint32_t seats_ = 0;       // of running sequences and their pending forks
  uint32_t num_queued_ = 0;  // requests not started
  uint64_t queued_tokens_ = 0;
  uint64_t next_order_ = 1;
  uint64_t next_sequence_id_ = 1;
  uint64_t step_id_ = 0;
  // No request's time is up before this.
  absl::Time earliest_expiry_ = absl::InfiniteFuture();
  // The sequence of this request found too few pages when so many were free.
  uint64_t blocked_order_ = 0;
  uint64_t blocked_pages_ = 0;
  bool prefix_grew_ = false;     // since then
  uint32_t prefill_budget_ = 0;  // tokens left in the step being planned
  PrefillRate prefill_rate_;

  StepStats stats_;  // of the step that is being planned or applied
  std::vector<absl::Duration> time_to_first_token_;
  std::vector<absl::Duration> inter_token_;
  // The token being delivered. Reused, so that nothing is allocated for it.
  kvasir::v1::GenerateEvent::Tokens tokens_;
};

}  // namespace kvasir::worker
