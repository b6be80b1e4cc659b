// Runs sequences on an executor without a scheduler: offline scoring,
// benchmarks and tests. Keeps block tables of its own and writes step plans.
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
  // Empty: the token that the last step sampled for this sequence.
  absl::Span<const int32_t> token_ids;
  // Log probabilities are wanted of these, one after each token.
  absl::Span<const int32_t> target_ids;
  std::optional<kvasir::v1::SampleRequest> sample;
  // Tokens given are output, not prompt.
  bool output = false;
};

// Threads: one at a time.
// Errors: RESOURCE_EXHAUSTED when pages run out, and nothing has changed then;
//   the executor's; CheckFault's, after which it is of no more use.
class DirectRunner {
 public:
  // Executor and layout outlive it. `last_step_id`: of the executor's last
  // step, 0 for a new one.
  DirectRunner(Executor* executor, const cache::PageLayout* layout,
               const cache::PageCounts& pages, uint64_t last_step_id = 0);
  ~DirectRunner();

  // One step, prompts before output. A sequence begins with its first mention,
  // at position 0. INVALID_ARGUMENT for tokens beyond next_eviction: nothing
  // has changed then, either.
  absl::StatusOr<kvasir::v1::StepResult> Run(
      absl::Span<const DirectStep> steps);

  // The sequence begins after `length` tokens whose slots hold what somebody
  // else wrote there, or anything. Before its first step.
  void StartAt(uint64_t sequence_id, int64_t length);

  // A sequence that has run goes on behind `length` tokens, as one that has
  // just begun there (StartAt) with a prompt of so many: in the pages that it
  // has, which keep what is in them, its side pages too. None was given up
  // behind a window (CHECK).
  void Rewind(uint64_t sequence_id, int64_t length, int64_t prompt_tokens);

  // Of a sequence whose slots are evicted: tokens that are its prompt. Before
  // its first step; else they are those of StartAt, or of its first step.
  void SetPrompt(uint64_t sequence_id, int64_t prompt_tokens);
  // Where its next step ends at the latest; nothing: anywhere, or its prompt is
  // not known yet.
  std::optional<int64_t> next_eviction(uint64_t sequence_id) const;

  // Where the slots of a sequence lie that has run a step, in their order.
  // Behind an eviction, when `evicted_at` tokens were there, the first
  // `kept_slots` are those that stayed; 0: none has been.
  struct Slots {
    absl::Span<const int32_t> pages;  // until the next call
    int64_t evicted_at = 0;
    int64_t kept_slots = 0;
  };
  Slots slots(uint64_t sequence_id, int64_t group) const;

  // The executor forgets it with the next step; its pages are free at once.
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
    int64_t prompt = 0;  // 0: not told
    bool known = false;  // to the executor
    std::vector<Table> tables;
  };

  cache::EvictionSchedule ScheduleOf(const Sequence& sequence,
                                     size_t group) const;
  void Start(int64_t num_tokens, Sequence* sequence) const;
  std::optional<int64_t> NextEviction(const Sequence& sequence) const;
  // Slots of a table behind what is evicted before the next step.
  static int64_t SlotsThatStay(const Sequence& sequence, const Table& table);
  int64_t PagesOf(int64_t slots) const;
  // Of a step's tokens behind so many slots, that the table does not have.
  int64_t MissingPages(const Table& table, size_t group, int64_t slots) const;
  // Whether Run can do all of them.
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

// A greedy sample, nothing else asked for.
kvasir::v1::SampleRequest GreedySample();

}  // namespace kvasir::worker
