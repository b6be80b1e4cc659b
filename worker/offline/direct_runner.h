// Runs sequences on an executor without a scheduler, for offline scoring,
// benchmarks and tests. It keeps its own block tables and writes step plans.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/layout/layout.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/executor.h"

namespace kvasir::worker {

// A sequence's part of one step.
struct DirectStep {
  uint64_t sequence_id = 0;
  // Empty: use the token that the last step sampled for this sequence.
  absl::Span<const int32_t> token_ids;
  // Tokens whose log probabilities are wanted, one after each input token.
  absl::Span<const int32_t> target_ids;
  std::optional<kvasir::v1::SampleRequest> sample;
  // Whether the given tokens are output; otherwise they are prompt.
  bool output = false;
};

// Threads: one at a time.
// Errors: RESOURCE_EXHAUSTED when pages run out; nothing has changed then.
//   Errors of the executor and of CheckFault; the runner cannot be used after
//   them.
class DirectRunner {
 public:
  // Executor and layout outlive the runner. `last_step_id` is the executor's
  // last step, 0 for a new executor.
  DirectRunner(Executor* executor, const cache::PageLayout* layout,
               const cache::PageCounts& pages, uint64_t last_step_id = 0);
  ~DirectRunner();

  // Runs one step. List prompts before output. A sequence starts at position 0
  // when it is first named. INVALID_ARGUMENT for tokens beyond next_eviction;
  // nothing has changed then.
  absl::StatusOr<kvasir::v1::StepResult> Run(
      absl::Span<const DirectStep> steps);

  // Starts a sequence after `length` tokens. Their slots hold whatever is in
  // the pages. Call it before the sequence's first step.
  void StartAt(uint64_t sequence_id, int64_t length);

  // Sets a sequence that has run back to `length` tokens, as if StartAt had
  // just begun it there with a prompt of `prompt_tokens`. It keeps its pages
  // and side pages with their contents. CHECK-fails if a sliding window has
  // given up pages.
  void Rewind(uint64_t sequence_id, int64_t length, int64_t prompt_tokens);

  // Sets how many tokens are the prompt, for a sequence that evicts slots. Call
  // it before the sequence's first step. By default these are the tokens of
  // StartAt, or of the first step.
  void SetPrompt(uint64_t sequence_id, int64_t prompt_tokens);
  // The position that the sequence's next step must not pass; nullopt if there
  // is none, or if the prompt is not known yet.
  std::optional<int64_t> next_eviction(uint64_t sequence_id) const;

  // Where the slots of a sequence lie, in order, after it has run a step. If
  // slots were evicted, `evicted_at` is the token count at that time, and the
  // first `kept_slots` slots are those that stayed; 0 if none were evicted.
  struct Slots {
    absl::Span<const int32_t> pages;  // valid until the next call
    int64_t evicted_at = 0;
    int64_t kept_slots = 0;
  };
  Slots slots(uint64_t sequence_id, int64_t group) const;

  // Frees the sequence's pages at once. The executor forgets the sequence with
  // the next step.
  void Release(uint64_t sequence_id);

  // Tokens run so far.
  int64_t length(uint64_t sequence_id) const;
  int64_t free_pages(int64_t group) const {
    return static_cast<int64_t>(free_[static_cast<size_t>(group)].size());
  }

 private:
  struct Table {
    cache::EvictionSchedule eviction;
    std::vector<int32_t> pages;
    int64_t slots = 0;
    int64_t evicted_at = 0;
    int64_t first_live = 0;
    std::vector<int32_t> side_pages;
  };
  struct Sequence {
    int64_t length = 0;
    int64_t prompt = 0;  // 0: not known
    bool known = false;  // whether the executor knows it
    std::vector<Table> tables;
  };

  cache::EvictionSchedule ScheduleOf(const Sequence& sequence,
                                     size_t group) const;
  void Start(int64_t num_tokens, Sequence* sequence) const;
  std::optional<int64_t> NextEviction(const Sequence& sequence) const;
  // Slots of a table that remain after the evictions before the next step.
  static int64_t SlotsThatStay(const Sequence& sequence, const Table& table);
  int64_t PagesOf(int64_t slots) const;
  // Pages that the table lacks for `slots` slots.
  int64_t MissingPages(const Table& table, size_t group, int64_t slots) const;
  // Checks whether Run can do all of these steps.
  absl::Status CheckSteps(absl::Span<const DirectStep> steps) const;
  void Evict(uint64_t sequence_id, Sequence* sequence,
             kvasir::v1::StepPlan* plan);
  void AddPages(int64_t num_tokens, Sequence* sequence,
                kvasir::v1::SequenceStep* out);
  void GiveUpBehindWindow(Sequence* sequence);

  Executor* const executor_;
  const cache::PageLayout* const layout_;
  uint64_t last_step_id_;
  std::vector<std::vector<int32_t>> free_;  // by page group
  absl::flat_hash_map<uint64_t, Sequence> sequences_;
  std::vector<uint64_t> released_;
};

// A greedy sample with nothing else requested.
kvasir::v1::SampleRequest GreedySample();

}  // namespace kvasir::worker
