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
  // The input tokens. Empty: the token that the last step sampled for this
  // sequence.
  absl::Span<const int32_t> token_ids;
  // Tokens to score: the log probability of target i is computed after input
  // token i.
  absl::Span<const int32_t> target_ids;
  std::optional<kvasir::v1::SampleRequest> sample;
  // Whether `token_ids` are output tokens; otherwise they are prompt tokens.
  bool output = false;
};

// Runs steps on an executor and manages the pages of its sequences.
//
// Threads: one at a time.
// Errors: RESOURCE_EXHAUSTED if pages run out, in which case nothing has
//   changed. Errors of the executor and of CheckFault, after which the runner
//   cannot be used.
class DirectRunner {
 public:
  // `executor` and `layout` must outlive the runner. `last_step_id` is the id
  // of the executor's last step; 0 for a new executor.
  DirectRunner(Executor* executor, const cache::PageLayout* layout,
               const cache::PageCounts& pages, uint64_t last_step_id = 0);
  ~DirectRunner();

  // Runs one step. `steps` must list prompts before output tokens. A sequence
  // starts at position 0 when it is first named. If a sequence would go beyond
  // its next_eviction, returns INVALID_ARGUMENT and changes nothing.
  absl::StatusOr<kvasir::v1::StepResult> Run(
      absl::Span<const DirectStep> steps);

  // Makes a sequence start after `length` tokens that are not computed: their
  // slots contain whatever is in the pages. Call it before the sequence's first
  // step.
  void StartAt(uint64_t sequence_id, int64_t length);

  // Sets a sequence back to `length` tokens, as if StartAt and SetPrompt had
  // just been called with these arguments. The sequence keeps the pages of
  // these tokens and its side pages, with their contents. CHECK-fails if pages
  // of the sequence have already been freed because they left a sliding window.
  void Rewind(uint64_t sequence_id, int64_t length, int64_t prompt_tokens);

  // Sets the number of prompt tokens, which decides when a sequence evicts
  // slots. Call it before the sequence's first step. By default the prompt has
  // the tokens of StartAt or, without StartAt, of the first step.
  void SetPrompt(uint64_t sequence_id, int64_t prompt_tokens);
  // The length at which the sequence next evicts slots or, if that comes first,
  // at which its prompt ends. No step may go beyond this length. nullopt if the
  // sequence evicts nothing more, or if its prompt is not known yet.
  std::optional<int64_t> next_eviction(uint64_t sequence_id) const;

  // Where the slots of a sequence lie, in order, after it has run a step.
  // `evicted_at` is the sequence's length at its last eviction, and the first
  // `kept_slots` slots are those that this eviction kept. Both are 0 if nothing
  // was evicted.
  struct Slots {
    absl::Span<const int32_t> pages;  // valid until the next call
    int64_t evicted_at = 0;
    int64_t kept_slots = 0;
  };
  Slots slots(uint64_t sequence_id, int64_t group) const;

  // Ends a sequence. Frees its pages at once; the next step plan reports the
  // end to the executor.
  void Release(uint64_t sequence_id);

  // The number of tokens of the sequence so far.
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
    int64_t prompt = 0;  // tokens of the prompt; 0: not known yet
    bool known = false;  // whether the executor knows the sequence
    std::vector<Table> tables;
  };

  cache::EvictionSchedule ScheduleOf(const Sequence& sequence,
                                     size_t group) const;
  void Start(int64_t num_tokens, Sequence* sequence) const;
  std::optional<int64_t> NextEviction(const Sequence& sequence) const;
  // The number of slots that a table has after the eviction that is due before
  // the next step, if any.
  static int64_t SlotsThatStay(const Sequence& sequence, const Table& table);
  int64_t PagesOf(int64_t slots) const;
  // How many more pages the table needs to have `slots` slots. Negative if it
  // has more pages than it needs.
  int64_t MissingPages(const Table& table, size_t group, int64_t slots) const;
  // Checks whether Run can do all these steps, so that a refused call changes
  // nothing.
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

// A request for a greedy sample, without log probabilities or penalties.
kvasir::v1::SampleRequest GreedySample();

}  // namespace kvasir::worker
