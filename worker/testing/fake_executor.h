// An executor for tests: its "latents" are hashes, its pages remember what was
// written where, and it refuses every plan that a real one could not run
// correctly. What it samples depends on every token before, read through the
// block tables, so a wrong page shows as a wrong token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/resolved_plan.h"
#include "worker/engine/request.h"
#include "worker/executor/executor.h"

namespace kvasir::worker {

struct FakeExecutorOptions {
  struct PageGroup {
    int32_t num_pages = 0;
    uint32_t sliding_window = 0;  // 0: every key is read
    // A sequence's own: a ring of as many of its latest slots as they hold.
    int32_t side_pages = 0;
    int32_t host_pages = 0;  // of the host pool
    plan::EvictionCounts eviction;
  };
  uint32_t page_tokens = 4;
  std::vector<PageGroup> groups;
  int32_t vocab_size = 1000;
  uint32_t max_num_seqs = 256;
  uint32_t max_batched_tokens = 2048;
  bool runs_behind = false;
  // Called while a step runs, e.g. to move a clock, block, or fail the step:
  // from Await.
  std::function<absl::Status(const kvasir::v1::StepPlan&)> during_step;
  // Called with what a step gave, e.g. to make it faulty.
  std::function<void(const kvasir::v1::StepPlan&, kvasir::v1::StepResult*)>
      after_step;
};

// Threads: one at a time.
// Errors: INVALID_ARGUMENT naming the sequence and the broken rule:
//   - steps count up by one; a sequence comes once per step and never again
//     after its release
//   - positions follow one another; tables cover them; pages are in the pool
//   - what a query sees was written at that position, for the same prefix
//   - a page is written by one sequence, from its first slot on or after a
//     copy, while no other sequence's table names it
//   - what comes from the host pool went there, and comes to a page that no
//     live sequence holds
//   - slots are evicted of tables as the executor knows them, all of them
//     written, and some stay; tokens follow behind these
//   - side pages are a sequence's own, told once, and hold its latest slots
//   - batch limits; the sampled token stands in only one step later;
//     histories are complete
//   - what is announced is the step behind the one in flight, as it comes
class FakeExecutor final : public Executor {
 public:
  explicit FakeExecutor(FakeExecutorOptions options);

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool runs_behind() const override { return options_.runs_behind; }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override;

  uint64_t steps() const { return last_step_; }
  uint64_t announced_steps() const { return announced_steps_; }
  uint64_t tokens_run() const { return tokens_run_; }
  size_t live_sequences() const { return sequences_.size(); }
  uint32_t largest_batch_tokens() const { return largest_batch_tokens_; }
  uint32_t largest_batch_sequences() const { return largest_batch_seqs_; }
  uint64_t pages_to_host() const { return pages_to_host_; }
  uint64_t pages_from_host() const { return pages_from_host_; }

 private:
  struct Slot {
    bool written = false;
    uint64_t position = 0;
    uint64_t prefix_hash = 0;
  };
  struct Page {
    uint64_t writer = 0;  // sequence that filled it last
    // Target of a copy: its writer may start inside, in the same step or, where
    // it came from the host pool, later.
    bool copied = false;
    std::vector<Slot> slots;
    absl::flat_hash_set<uint64_t> held_by;  // live tables that name it
  };
  struct Table {
    std::vector<int32_t> pages;
    uint32_t first_live = 0;
    std::vector<int32_t> side_pages;
    uint64_t num_slots = 0;  // where slots are evicted; else as many as tokens
  };
  struct State {
    std::vector<Table> tables;
    uint64_t length = 0;
    int32_t last_sampled = -1;
    uint64_t sampled_step = 0;
    bool has_history = false;
    uint64_t history_hash = 0;
  };

  absl::StatusOr<kvasir::v1::StepResult> Run(const kvasir::v1::StepPlan& plan);
  absl::Status Release(uint64_t sequence_id);
  // In their order among one another.
  absl::Status CopyAndEvict(const kvasir::v1::StepPlan& plan);
  absl::Status Copy(const kvasir::v1::PageCopy& copy);
  absl::Status CopyOverHost(const kvasir::v1::PageCopy& copy);
  absl::Status Evict(const kvasir::v1::SlotEviction& eviction);
  absl::Status CheckEviction(const kvasir::v1::SlotEviction& eviction) const;
  bool Evicts(size_t group) const {
    return options_.groups[group].eviction.evicts();
  }
  // All that the sequence's evicting tables hold.
  uint64_t HeldHash(const State& state) const;
  absl::Status ApplyTables(const kvasir::v1::SequenceStep& step, State* state);
  absl::Status ApplyDelta(uint64_t id, const kvasir::v1::BlockTableDelta& delta,
                          Table* table);
  absl::Status RunTokens(const kvasir::v1::SequenceStep& step, State* state,
                         uint64_t* prefix_hash);
  absl::Status Write(uint64_t sequence_id, int32_t group, Table* table,
                     uint64_t position, uint64_t prefix_hash);
  absl::Status ApplySidePages(uint64_t id,
                              const kvasir::v1::BlockTableDelta& delta,
                              Table* table);
  Slot& RingSlot(size_t group, const Table& table, uint64_t position);
  // The rings hold the latest of the slots that the tables hold.
  absl::Status CheckRings(uint64_t sequence_id, const State& state);
  void DropBehindWindows(uint64_t writer, int32_t group, int32_t page_id);
  // The slot that holds `position`, checked.
  absl::StatusOr<const Slot*> Read(uint64_t sequence_id, int32_t group,
                                   const Table& table, uint64_t position) const;
  absl::Status CheckVisible(uint64_t sequence_id, const State& state) const;
  absl::Status Sample(const kvasir::v1::SequenceStep& step,
                      uint64_t prefix_hash, State* state,
                      kvasir::v1::SequenceResult* result);

  const FakeExecutorOptions options_;
  std::vector<std::vector<Page>> pages_;  // [group][page]
  // [group][page]; empty: nothing went there.
  std::vector<std::vector<std::vector<Slot>>> host_pages_;
  absl::flat_hash_map<uint64_t, State> sequences_;
  absl::flat_hash_set<uint64_t> released_;
  std::optional<kvasir::v1::StepPlan> in_flight_;
  std::optional<std::string> announced_;  // the plan's bytes
  uint64_t announced_steps_ = 0;
  uint64_t last_step_ = 0;
  uint64_t tokens_run_ = 0;
  uint32_t largest_batch_tokens_ = 0;
  uint32_t largest_batch_seqs_ = 0;
  uint64_t pages_to_host_ = 0;
  uint64_t pages_from_host_ = 0;
};

// What the fake executor makes of a request, told without pages, batches or
// chunks: the output of `sample_index`, emitted tokens excluded.
struct FakeModelLimits {
  int32_t vocab_size = 1000;
  uint32_t max_model_len = 0;
  std::vector<int32_t> eos_token_ids;
  EvictionLimits eviction;
};
std::vector<int32_t> FakeContinuation(const Request& request,
                                      uint32_t sample_index,
                                      const FakeModelLimits& limits);

// The log probability the fake executor reports for `token` after `prefix`.
float FakeLogprob(absl::Span<const int32_t> prefix, int32_t token);

}  // namespace kvasir::worker
