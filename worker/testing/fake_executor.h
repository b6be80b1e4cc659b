// An executor for tests of schedulers. Instead of latents its pages hold hashes
// of the tokens up to each position. It refuses every plan that a real executor
// could not run correctly. A sampled token depends on all tokens before it,
// read through the block tables, so a wrong page results in a wrong token.
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
    uint32_t sliding_window = 0;  // 0: no sliding window
    // The number of side pages of each sequence. Together they are a ring
    // buffer of its latest slots.
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
  // Called by Await while the step runs, for example to move a clock, to block,
  // or to fail the step.
  std::function<absl::Status(const kvasir::v1::StepPlan&)> during_step;
  // Called with a step's result before Await returns the result, for example to
  // change it.
  std::function<void(const kvasir::v1::StepPlan&, kvasir::v1::StepResult*)>
      after_step;
};

// An executor that checks every plan and computes hashes instead of a model.
//
// Threads: one thread at a time may call methods.
// Errors: INVALID_ARGUMENT if a plan breaks a rule, with the sequence and the
//   rule. The rules are:
// - Step ids count up by one. A step contains a sequence at most once, and not
//   after the sequence was released.
// - The tokens of a sequence have consecutive positions. Its block tables have
//   a page for each of them, and all pages are in the pool.
// - For each position that a token attends to, the page holds what was written
//   for this position and for the same preceding tokens.
// - A sequence writes to a page only if no other sequence's table names the
//   page. It begins with the page's first slot, unless another page was copied
//   to the page.
// - A host page is copied back only after something was copied to it, and only
//   to a page that no live sequence holds.
// - An eviction names the same pages and slots as the sequence's table. It
//   keeps some slots but not all. New tokens follow the kept slots.
// - Side pages belong to one sequence, are sent only once, and hold its latest
//   slots.
// - A step does not exceed the batch limits. A step may use the last sampled
//   token without its id only if the step before sampled it. Penalty histories
//   are complete.
// - The plan that follows an announced plan is equal to it.
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
    uint64_t writer = 0;  // the sequence that last wrote to the page
    // Whether the page was overwritten by a copy. If so, its next writer may
    // start inside the page: in the same step or, after a copy from the host
    // pool, in a later one.
    bool copied = false;
    std::vector<Slot> slots;
    // The sequences whose live table entries name the page.
    absl::flat_hash_set<uint64_t> held_by;
  };
  struct Table {
    std::vector<int32_t> pages;
    uint32_t first_live = 0;
    std::vector<int32_t> side_pages;
    // The number of slots in use. Set only in page groups with eviction; in
    // other groups there is one slot per token.
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
  // Returns a hash of the slots that the sequence holds in the page groups with
  // eviction.
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
  // Checks that the sequence's side pages hold copies of the latest slots in
  // its tables.
  absl::Status CheckRings(uint64_t sequence_id, const State& state);
  void DropBehindWindows(uint64_t writer, int32_t group, int32_t page_id);
  // Returns the slot that holds `position`. Fails if the sequence has no such
  // slot, or if the slot was not written for this position.
  absl::StatusOr<const Slot*> Read(uint64_t sequence_id, int32_t group,
                                   const Table& table, uint64_t position) const;
  absl::Status CheckVisible(uint64_t sequence_id, const State& state) const;
  absl::Status Sample(const kvasir::v1::SequenceStep& step,
                      uint64_t prefix_hash, State* state,
                      kvasir::v1::SequenceResult* result);

  const FakeExecutorOptions options_;
  std::vector<std::vector<Page>> pages_;  // [group][page]
  // [group][page][slot]. A page is empty until something is copied to it.
  std::vector<std::vector<std::vector<Slot>>> host_pages_;
  absl::flat_hash_map<uint64_t, State> sequences_;
  absl::flat_hash_set<uint64_t> released_;
  std::optional<kvasir::v1::StepPlan> in_flight_;
  std::optional<std::string> announced_;  // the serialized plan
  uint64_t announced_steps_ = 0;
  uint64_t last_step_ = 0;
  uint32_t largest_batch_tokens_ = 0;
  uint32_t largest_batch_seqs_ = 0;
  uint64_t pages_to_host_ = 0;
  uint64_t pages_from_host_ = 0;
};

// Limits of the model whose output FakeContinuation computes.
struct FakeModelLimits {
  int32_t vocab_size = 1000;
  uint32_t max_model_len = 0;
  std::vector<int32_t> eos_token_ids;
  EvictionLimits eviction;
};
std::vector<int32_t> FakeContinuation(const Request& request,
                                      uint32_t sample_index,
                                      const FakeModelLimits& limits);

// Returns the log probability that the fake executor reports for `token` after
// `prefix`.
float FakeLogprob(absl::Span<const int32_t> prefix, int32_t token);

}  // namespace kvasir::worker
