// The executor's record of each sequence: its length in tokens, and its block
// tables, which step plans change. Host memory; each step uploads the tables of
// its sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/allocator.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/pages/kv_arenas.h"

namespace kvasir::worker {

struct SequenceTableLimits {
  int64_t max_sequences = 0;  // the most live sequences
  int64_t max_model_len = 0;  // the most tokens of one sequence
  int64_t page_tokens = 0;    // P in formulas
  // By page group: the most keys that a query sees; 0: all keys.
  std::vector<int64_t> windows;
  // By page group: the number of side pages of a sequence. These hold exact
  // rows.
  std::vector<int64_t> side_pages;
};

// How often each token id occurs in a sequence, for the sampler's penalties.
// Only sequences that ask for penalties have these counts.
struct PenaltyCounts {
  kernels::DeviceBuffer prompt;  // [V] int32
  kernels::DeviceBuffer output;  // [V] int32
};

// Owns: tables and penalty counts of live sequences.
// Threads: one at a time.
// Errors: INVALID_ARGUMENT naming sequence, value and limit.
class SequenceTable {
 public:
  struct Table {
    std::vector<int32_t> pages;
    // The slots in use: one for each token that was not evicted.
    int64_t slots = 0;
    int64_t first_live = 0;
    std::vector<int32_t> side_pages;
  };
  struct Sequence {
    int32_t row = 0;  // unique among live sequences; below max_sequences
    // The position of the next token. Evicted tokens count.
    int64_t length = 0;
    // true: no step has run since the last reset, so any start position is
    // allowed
    bool is_fresh = true;
    bool has_sampled = false;
    std::vector<Table> tables;  // by page group
    std::unique_ptr<PenaltyCounts> penalties;
  };

  // `arenas` must outlive the table.
  static absl::StatusOr<SequenceTable> Create(SequenceTableLimits limits,
                                              const KvArenas* arenas);

  // Forgets a sequence. Returns its penalty counts, if any, so that their
  // memory can be reused.
  absl::StatusOr<std::unique_ptr<PenaltyCounts>> Release(uint64_t id);

  // Starts a new step. Within a step only one sequence may write to a page.
  void BeginStep() {
    ++step_;
    written_pages_.clear();
  }

  // Checks an eviction. If the table has the sequence, cuts its block table to
  // the kept slots.
  absl::Status Evict(const kvasir::v1::SlotEviction& eviction);

  // Applies the step's changes to the sequence's block tables. Checks three
  // conditions: the step's tokens continue the tokens in the cache, the block
  // tables have slots for them, and the slots of their sliding windows still
  // exist. The result is valid until the next call.
  absl::StatusOr<Sequence*> Apply(const kvasir::v1::SequenceStep& step);

  // Index, in the page group's arenas, of slot number `slot` of a sequence:
  // page * P + slot within the page.
  int64_t SlotOf(const Sequence& sequence, int64_t group, int64_t slot) const;

  int64_t size() const { return static_cast<int64_t>(sequences_.size()); }
  const SequenceTableLimits& limits() const { return limits_; }

 private:
  SequenceTable() = default;

  absl::StatusOr<Sequence*> FindOrStart(const kvasir::v1::SequenceStep& step);
  absl::Status CheckResets(const kvasir::v1::SequenceStep& step,
                           const Sequence& sequence) const;
  absl::Status ApplyDelta(const kvasir::v1::BlockTableDelta& delta,
                          Sequence* sequence);
  absl::Status ApplySidePages(const kvasir::v1::BlockTableDelta& delta,
                              Sequence* sequence);
  void DropSidePages(const Sequence& sequence, size_t group);
  // If the page is a side page of another sequence, takes it away. Fails if
  // that sequence is in this step.
  absl::Status TakeSidePage(size_t group, int32_t page);
  absl::Status CheckPositions(const kvasir::v1::SequenceStep& step,
                              const Sequence& sequence) const;
  // Checks the slot at which the step's tokens begin in each page group.
  absl::Status CheckStarts(const kvasir::v1::SequenceStep& step,
                           const Sequence& sequence) const;
  absl::Status CheckSlots(const kvasir::v1::SequenceStep& step,
                          const Sequence& sequence);
  absl::Status AddWrittenPage(size_t group, int32_t page);

  SequenceTableLimits limits_;
  const KvArenas* arenas_ = nullptr;
  int64_t max_pages_ = 0;  // the most pages that a sequence may have
  std::vector<int32_t> free_rows_;
  absl::flat_hash_map<uint64_t, Sequence> sequences_;
  // The pages that this step writes, as (page group, page).
  absl::flat_hash_set<std::pair<int64_t, int32_t>> written_pages_;
  // The owner of each side page, and whether a sequence has lost a side page to
  // another sequence. Needed because plans send a sequence's side pages only
  // once.
  struct SidePages {
    // by page: the row of the sequence that owns it; negative: no owner
    std::vector<int32_t> owner;
    std::vector<bool> lost;  // by row: whether another sequence took a page
  };
  std::vector<SidePages> side_pages_;  // by page group; empty: no side pages
  uint64_t step_ = 0;
  // By row: the last step that ran the row's sequence.
  std::vector<uint64_t> last_step_;
};

}  // namespace kvasir::worker
