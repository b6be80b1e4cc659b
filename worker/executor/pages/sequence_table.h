// The executor's record of each sequence: its own copy of the block tables,
// kept up to date by the deltas of step plans, and how far the sequence has
// been written. Host memory: each step uploads the tables of its own sequences.
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
  int64_t max_sequences = 0;  // live at the same time
  int64_t max_model_len = 0;  // tokens of one sequence
  int64_t page_tokens = 0;    // P
  // By page group: how many keys a query sees at most; 0: all.
  std::vector<int64_t> windows;
  // By page group: pages of a sequence besides those of its tokens.
  std::vector<int64_t> side_pages;
};

// Counts of ids for the sampler's penalties. Only sequences that ask for
// penalties have them.
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
    // Slots that are written: one per token, minus the evicted ones.
    int64_t slots = 0;
    int64_t first_live = 0;
    std::vector<int32_t> side_pages;
  };
  struct Sequence {
    int32_t row = 0;     // below max_sequences, unique among live sequences
    int64_t length = 0;  // tokens written
    // no step yet since the last reset: it may start at any position
    bool is_fresh = true;
    bool has_sampled = false;
    std::vector<Table> tables;  // by page group
    std::unique_ptr<PenaltyCounts> penalties;
  };

  // `arenas` must outlive it.
  static absl::StatusOr<SequenceTable> Create(SequenceTableLimits limits,
                                              const KvArenas* arenas);

  // Forgets a sequence. Returns its penalty counts, if it has any, for reuse.
  absl::StatusOr<std::unique_ptr<PenaltyCounts>> Release(uint64_t id);

  // Starts a new step. In one step a page may be written by one sequence only.
  void BeginStep() {
    ++step_;
    written_pages_.clear();
  }

  // Checks an eviction. If the sequence is known, its table then ends with the
  // kept slots.
  absl::Status Evict(const kvasir::v1::SlotEviction& eviction);

  // Applies the step's deltas. Checks that its tokens have slots, that the
  // slots they see are live, and that they follow what was written before. The
  // pointer is valid until the next call.
  absl::StatusOr<Sequence*> Apply(const kvasir::v1::SequenceStep& step);

  // Index of a sequence's slot in its group's arenas: page * P + slot in the
  // page.
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
  // Takes the page away from a sequence that has it as a side page, if there is
  // one. An error if that sequence is in this step.
  absl::Status TakeSidePage(size_t group, int32_t page);
  absl::Status CheckPositions(const kvasir::v1::SequenceStep& step,
                              const Sequence& sequence) const;
  // Checks where the step's slots begin in each group.
  absl::Status CheckStarts(const kvasir::v1::SequenceStep& step,
                           const Sequence& sequence) const;
  absl::Status CheckSlots(const kvasir::v1::SequenceStep& step,
                          const Sequence& sequence);
  absl::Status AddWrittenPage(size_t group, int32_t page);

  SequenceTableLimits limits_;
  const KvArenas* arenas_ = nullptr;
  int64_t max_pages_ = 0;  // of one sequence
  std::vector<int32_t> free_rows_;
  absl::flat_hash_map<uint64_t, Sequence> sequences_;
  // (group, page) of the pages that this step writes.
  absl::flat_hash_set<std::pair<int64_t, int32_t>> written_pages_;
  // Owners of side pages. A plan sends a sequence's side pages once; they are
  // checked again only if another sequence has taken one.
  struct SidePages {
    std::vector<int32_t> owner;  // by page: row of its sequence; below 0: none
    std::vector<bool> lost;      // by row: whether another sequence took a page
  };
  std::vector<SidePages> side_pages_;  // by page group; empty: no side pages
  uint64_t step_ = 0;
  // by row: the last step that its sequence was in
  std::vector<uint64_t> last_step_;
};

}  // namespace kvasir::worker
