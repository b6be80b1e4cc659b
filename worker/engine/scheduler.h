// Decides which tokens run in the next step: continuous batching with chunked
// prefill, priorities, deadlines and preemption. Pure logic that uses a given
// clock and the cache's bookkeeping. It makes a StepPlan, and then handles the
// plan's result.
//
//   scheduler->Add(request, sink);
//   while (const StepPlan* plan = scheduler->Schedule()) {
//     scheduler->Apply(*executor->Execute(*plan));   // calls the sinks
//   }
//
// If the executor runs a step asynchronously, ScheduleAhead plans the next step
// meanwhile. It assumes that every sequence of the running step gets a token;
// the plan does not depend on which token.
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

// A copy of a sequence's state, for tests and for operators.
struct SequenceSnapshot {
  std::string request_id;
  uint32_t sample_index = 0;
  uint64_t sequence_id = 0;
  bool running = false;  // false: it is waiting
  int32_t priority = 0;
  uint32_t num_tokens = 0;
  uint32_t computed_tokens = 0;
  uint32_t preemptions = 0;
};

// Owns: every request, with its sequences, from Add until the last call to its
//   sink.
// Threads: one thread at a time may call methods, which call sinks and observer
//   on the same thread.
// Errors: a request that cannot run gets a Refusal. Apply returns an error if a
//   result does not fit the plan.
class Scheduler {
 public:
  // INVALID_ARGUMENT if the options contradict each other, or if one sequence
  // of max_model_len tokens does not fit the cache.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(
      const SchedulerOptions& options, const SchedulerDeps& deps);
  ~Scheduler();

  // Queues a validated request of at most max_num_seqs samples. Refuses it with
  // ALREADY_EXISTS if its id and attempt are live, or with RETRY_ELSEWHERE if
  // the queue is full. Otherwise calls OnAccepted. If earlier attempts have
  // delivered the complete output, also calls OnFinished.
  Refusal Add(Request request, std::shared_ptr<EngineSink> sink);

  // Ends overdue requests, then returns the plan of the next step, or nullptr
  // if nothing can run. Every earlier step must have been applied (CHECK). The
  // plan is valid until Apply or FailAll, one of which must follow.
  const kvasir::v1::StepPlan* Schedule();
  // Plans the step after the running one: one token of every sequence, except
  // those that reach their maximum length in the running step. That step must
  // be the only one not yet applied (CHECK). Returns nullptr if its result is
  // needed first: if a request can be admitted, a prompt continues, an eviction
  // is due, pages run out, there are side pages, or a token mask depends on the
  // output. The new step's token of a sequence that has ended is dropped.
  const kvasir::v1::StepPlan* ScheduleAhead();

  // Applies the result of the oldest planned step and delivers its tokens.
  // INTERNAL if the result does not fit the plan. If no token could be sampled
  // for a request, only that request fails.
  absl::Status Apply(const kvasir::v1::StepResult& result);

  // Ends matching requests and returns their number. May be called while a step
  // runs; the step's results for these requests are dropped.
  int Abort(std::string_view request_id, std::optional<uint32_t> attempt);
  // Ends every request: calls OnFailed(why) of its sink.
  void RefuseAll(const Refusal& why);
  // Like RefuseAll, but also forgets the planned steps. Call it if a step has
  // failed, because then there is no result to apply.
  void FailAll(const Refusal& why);

  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  uint32_t num_running() const {
    return static_cast<uint32_t>(running_.size());
  }
  uint32_t num_waiting() const {
    return static_cast<uint32_t>(waiting_.size());
  }
  // Number of requests that wait for their first step.
  uint32_t num_queued() const { return num_queued_; }
  LoadSnapshot Load() const;
  // Returns first the running sequences, then the waiting ones, both in the
  // order of service (RunsBefore).
  std::vector<SequenceSnapshot> Snapshot() const;
  // Statistics of the step that the last call of Schedule, ScheduleAhead or
  // Apply handled. The caller must fill in the durations.
  const StepStats& last_step() const { return stats_; }

 private:
  Scheduler(const SchedulerOptions& options, const SchedulerDeps& deps);

  struct Step : PlannedStep {
    absl::Time planned_at;
    StepStats stats;
  };
  Step& StepOf(uint64_t step_id) { return steps_[step_id % kMostPlannedSteps]; }

  // The methods from EndOverdue to ForkIfReady are parts of Schedule and
  // ScheduleAhead. Apply also calls ForkIfReady.
  void EndOverdue(absl::Time now);
  // Builds the next step's plan from plan_. Returns nullptr if plan_ is empty.
  const kvasir::v1::StepPlan* BuildStep(absl::Time now);
  // Whether ScheduleAhead can plan a step in which every sequence of the
  // running step decodes one token.
  bool CanRunAhead() const;
  // Returns the sequence's part of the most recently planned step; null if it
  // has none.
  const PlannedSequence* LastPartOf(const Sequence& sequence) const;
  // Whether the first waiting sequence, `sequence`, cannot join the next step.
  // Ignores seats and pages that the running step will free.
  bool MustWait(const Sequence& sequence) const;
  // Whether the last check found too few free pages for the sequence, and since
  // then no page has become free and no prefill has run.
  bool LackedPages(const Sequence& sequence) const;
  // Moves the first waiting sequence, with its forks, into the batch if it can
  // run now. Returns how many sequences joined. May preempt running sequences
  // of strictly lower priority whose index is at least `victims_from`.
  size_t TryAdmit(size_t victims_from, absl::Time now);
  bool HasRoomFor(const Sequence& sequence);
  // Describes how many pages of the group a sequence of this request needs at
  // each length.
  cache::SequencePages PagesOf(const RequestState& state,
                               cache::PageGroupId group) const;
  // Whether enough pages are free for the sequence's tokens and one more.
  // `found_tokens` is the length of the sequence's cached prefix; if
  // `is_started`, the sequence already holds the prefix's pages.
  bool PagesSuffice(const Sequence& sequence, int64_t found_tokens,
                    bool is_started = false) const;
  // Starts the sequence. If it has a copy in the host pool (Sequence::image),
  // its pages are restored from that copy. Returns false, with the cache
  // unchanged, if too few pages are free after all.
  bool Start(Sequence* sequence, absl::Time now);
  bool StartAnew(Sequence* sequence);
  bool StartFromImage(Sequence* sequence);
  // Plans as many of the sequence's tokens as the token budget and the free
  // pages allow. Returns false if no page was free.
  bool PlanSequence(Sequence* sequence, size_t victims_from);
  // Reserves cache slots for up to `want` tokens and returns how many were
  // reserved. If no slot is free, preempts running sequences, from the last
  // down to index `victims_from`.
  uint32_t Grow(const Sequence& sequence, uint32_t want, size_t victims_from);
  // Moves the sequence from the batch to the queue. Copies its pages to the
  // host pool if they fit and if copying should be faster than computing them
  // again; otherwise drops them.
  void Preempt(Sequence* sequence);
  bool ShouldCopy(const Sequence& sequence) const;
  // If sample 0 (`leader`) has computed all of the prompt except the last
  // token, starts the other samples. They share the cached prompt, and each
  // computes the last token itself.
  void ForkIfReady(Sequence* leader);

  // CheckResult and the methods up to Deliver are parts of Apply.
  absl::Status CheckResult(uint64_t step_id, const PlannedSequence& planned,
                           const kvasir::v1::SequenceResult* result) const;
  void ApplyToSequence(uint64_t step_id, const PlannedSequence& planned,
                       const kvasir::v1::SequenceResult* result,
                       absl::Time now);
  void Deliver(uint64_t step_id, Sequence* sequence,
               const kvasir::v1::SequenceResult& result, absl::Time now);

  void InitRequest(RequestState* state, absl::Time now) const;

  // These methods move a sequence into and out of `waiting_` and `running_`.
  void Enqueue(Sequence* sequence);
  void LeaveQueue(Sequence* sequence);
  void EnterBatch(Sequence* sequence);
  void LeaveBatch(Sequence* sequence);
  void Leave(Sequence* sequence);

  // These methods end sequences and requests. The state of an ended request
  // exists until the public method that called them returns.
  bool EndIfComplete(Sequence* sequence, absl::Time now);
  void Finish(Sequence* sequence, kvasir::v1::FinishReason reason,
              std::optional<int32_t> matched, absl::Time now);
  void AbortRequest(RequestState* request);
  void FailRequest(RequestState* request, const Refusal& why);
  void EndRequest(RequestState* request, absl::Time now);
  std::vector<RequestState*> LiveRequests() const;  // in order of arrival

  // Constant after construction.
  const SchedulerOptions options_;
  const SchedulerDeps deps_;
  const Admission admission_;

  // The live attempts of each request, by request id; usually one.
  absl::flat_hash_map<std::string, std::vector<std::unique_ptr<RequestState>>>
      requests_;
  std::vector<std::unique_ptr<RequestState>> ended_;
  std::vector<Sequence*> running_;  // sorted by RunsBefore
  std::set<Sequence*, RunsBefore> waiting_;
  PlanBuilder plan_;
  // Indexed by step id (StepOf). The latest `num_planned_` steps are not yet
  // applied.
  std::array<Step, kMostPlannedSteps> steps_;
  uint64_t num_planned_ = 0;

  uint32_t seats_ = 0;  // seats that running sequences and pending forks take
  uint32_t num_queued_ = 0;  // requests that have not started
  uint64_t queued_tokens_ = 0;
  uint64_t next_order_ = 1;
  uint64_t next_sequence_id_ = 1;
  uint64_t step_id_ = 0;
  // No deadline or queue timeout of a live request passes before this time.
  absl::Time earliest_expiry_ = absl::InfiniteFuture();
  // The RequestState::order of the request that last lacked pages to start, and
  // the number of free pages at that time.
  uint64_t blocked_order_ = 0;
  uint64_t blocked_pages_ = 0;
  // Whether a prefill has run since blocked_pages_ was set. It may have cached
  // a prefix that the request can share.
  bool prefix_grew_ = false;
  uint32_t prefill_budget_ = 0;  // tokens that prefills may still add
  PrefillRate prefill_rate_;

  StepStats stats_;  // statistics of the step being planned or applied
  std::vector<absl::Duration> time_to_first_token_;
  std::vector<absl::Duration> inter_token_;
  // The message that delivers tokens to a sink. It is reused, so that
  // deliveries allocate no memory.
  kvasir::v1::GenerateEvent::Tokens tokens_;
};

}  // namespace kvasir::worker
