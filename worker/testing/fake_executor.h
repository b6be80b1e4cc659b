// An executor for tests. Its "latents" are hashes and its pages remember what
// was written where. It refuses every plan that a real executor could not run
// correctly. A sampled token depends on every token before it, read through the
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
    // A sequence's own pages: a ring of its latest slots, as many as they hold.
    int32_t side_pages = 0;
    int32_t host_pages = 0;  // pages of the host pool
    plan::EvictionCounts eviction;
  };
  uint32_t page_tokens = 4;
  std::vector<PageGroup> groups;
  int32_t vocab_size = 1000;
  uint32_t max_num_seqs = 256;
  uint32_t max_batched_tokens = 2048;
  bool is_asynchronous = false;
  // Called from Await, while a step runs, for example to move a clock, to block
  // or to fail the step.
  std::function<absl::Status(const kvasir::v1::StepPlan&)> during_step;
  // Called with a step's result, for example to make it faulty.
  std::function<void(const kvasir::v1::StepPlan&, kvasir::v1::StepResult*)>
      after_step;
};

// Threads: one at a time.
// Errors: INVALID_ARGUMENT naming the sequence and the broken rule. The rules:
// - Steps count up by one. A sequence comes once per step, and never again
//   after its release.
// - Positions follow one another, tables cover them, and pages are in the pool.
// - A query sees what was written at that position, for the same prefix.
// - One sequence writes a page, from its first slot on or after a copy, while
//   no other sequence's table names it.
// - A page that comes from the host pool was copied there before, and its
//   target is held by no live sequence.
// - Evictions name tables as the executor knows them, all slots written; some
//   slots stay and tokens continue after these.
// - Side pages belong to one sequence, are sent once, and hold its latest
//   slots.
// - Batch limits hold. The last sampled token is used only in the next step.
//   Penalty histories are complete.
// - An announced plan is the next one, and is enqueued unchanged.
class FakeExecutor final : public Executor {
 public:
  explicit FakeExecutor(FakeExecutorOptions options);

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool is_asynchronous() const override { return options_.is_asynchronous; }
  absl::Status Announce(const kvasir::v1::StepPlan& plan) override;

  uint64_t steps() const { return last_step_; }
  uint64_t announced_steps() const { return announced_steps_; }
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
    uint64_t writer = 0;  // the sequence that filled it last
    // Whether it is the target of a copy. Then its writer may start inside the
    // page: in the same step or, after a copy from the host pool, later.
    bool copied = false;
    std::vector<Slot> slots;
    // sequences with live tables that name it
    absl::flat_hash_set<uint64_t> held_by;
  };
  struct Table {
    std::vector<int32_t> pages;
    uint32_t first_live = 0;
    std::vector<int32_t> side_pages;
    // only in groups that evict; otherwise as many as tokens
    uint64_t num_slots = 0;
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
  // Applies copies and evictions in the plan's order.
  absl::Status CopyAndEvict(const kvasir::v1::StepPlan& plan);
  absl::Status Copy(const kvasir::v1::PageCopy& copy);
  absl::Status CopyOverHost(const kvasir::v1::PageCopy& copy);
  absl::Status Evict(const kvasir::v1::SlotEviction& eviction);
  absl::Status CheckEviction(const kvasir::v1::SlotEviction& eviction) const;
  bool Evicts(size_t group) const {
    return options_.groups[group].eviction.evicts();
  }
  // Hash of everything that the sequence's evicting tables hold.
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
  // Checks that rings hold the latest of the slots that the tables hold.
  absl::Status CheckRings(uint64_t sequence_id, const State& state);
  void DropBehindWindows(uint64_t writer, int32_t group, int32_t page_id);
  // Finds and checks the slot that holds `position`.
  absl::StatusOr<const Slot*> Read(uint64_t sequence_id, int32_t group,
                                   const Table& table, uint64_t position) const;
  absl::Status CheckVisible(uint64_t sequence_id, const State& state) const;
  absl::Status Sample(const kvasir::v1::SequenceStep& step,
                      uint64_t prefix_hash, State* state,
                      kvasir::v1::SequenceResult* result);

  const FakeExecutorOptions options_;
  std::vector<std::vector<Page>> pages_;  // [group][page]
  // [group][page]; empty: nothing was copied there
  std::vector<std::vector<std::vector<Slot>>> host_pages_;
  absl::flat_hash_map<uint64_t, State> sequences_;
  absl::flat_hash_set<uint64_t> released_;
  std::optional<kvasir::v1::StepPlan> in_flight_;
  std::optional<std::string> announced_;  // the plan's bytes
  uint64_t announced_steps_ = 0;
  uint64_t last_step_ = 0;
  uint32_t largest_batch_tokens_ = 0;
  uint32_t largest_batch_seqs_ = 0;
  uint64_t pages_to_host_ = 0;
  uint64_t pages_from_host_ = 0;
};

// The model that FakeContinuation assumes.
struct FakeModelLimits {
  int32_t vocab_size = 1000;
  uint32_t max_model_len = 0;
  std::vector<int32_t> eos_token_ids;
  EvictionLimits eviction;
};
std::vector<int32_t> FakeContinuation(const Request& request,
                                      uint32_t sample_index,
                                      const FakeModelLimits& limits);

// The log probability that the fake executor reports for `token` after
// `prefix`.
float FakeLogprob(absl::Span<const int32_t> prefix, int32_t token);

}  // namespace kvasir::worker
