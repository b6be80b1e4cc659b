// What the executor remembers of each sequence: its own copy of the block
// tables, kept from the step plan's deltas, and how far the sequence has been
// written. Host memory: a step takes the tables of its own sequences along.
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
  int64_t max_sequences = 0;  // known at the same time
  int64_t max_model_len = 0;  // tokens of one sequence
  int64_t page_tokens = 0;    // P
  // By page group: keys that a query sees at most; 0: all.
  std::vector<int64_t> windows;
  // By page group: pages of a sequence beside those of its tokens.
  std::vector<int64_t> side_pages;
};

// Counts of ids for the sampler's penalties; kept only for who asks.
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
    // That are written: as many as tokens but where slots were evicted.
    int64_t slots = 0;
    int64_t first_live = 0;
    std::vector<int32_t> side_pages;
  };
  struct Sequence {
    int32_t row = 0;       // below max_sequences, no other live one's
    int64_t length = 0;    // tokens written
    bool is_fresh = true;  // may start anywhere: its pages come from elsewhere
    bool has_sampled = false;
    std::vector<Table> tables;  // by page group
    std::unique_ptr<PenaltyCounts> penalties;
  };

  // `arenas` must outlive it.
  static absl::StatusOr<SequenceTable> Create(SequenceTableLimits limits,
                                              const KvArenas* arenas);

  // Forgets a sequence; gives back its penalty counts, if any.
  absl::StatusOr<std::unique_ptr<PenaltyCounts>> Release(uint64_t id);

  // Starts a new step: pages may be written by one sequence each.
  void BeginStep() {
    ++step_;
    written_pages_.clear();
  }

  // Checks an eviction, and takes it from its sequence's table, if it has one:
  // its pages end with the kept slots.
  absl::Status Evict(const kvasir::v1::SlotEviction& eviction);

  // Applies the step's deltas and checks that its tokens have slots, that what
  // they see is live, and that they follow what was written before. The
  // pointer is valid until the next call.
  absl::StatusOr<Sequence*> Apply(const kvasir::v1::SequenceStep& step);

  // A slot of the sequence in its group's arenas: page * P + slot in the page.
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
  // Takes a page from the sequence that has it as a side page, if any; an error
  // if that one is in this step.
  absl::Status TakeSidePage(size_t group, int32_t page);
  absl::Status CheckPositions(const kvasir::v1::SequenceStep& step,
                              const Sequence& sequence) const;
  // Where the step's slots begin in each group.
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
  // (group, page) of tokens that this step writes.
  absl::flat_hash_set<std::pair<int64_t, int32_t>> written_pages_;
  // Side pages are told once, and are not looked at again while nobody else
  // takes them.
  struct SidePages {
    std::vector<int32_t> owner;  // by page: row of its sequence, or below 0
    std::vector<bool> lost;      // by row: another sequence took one
  };
  std::vector<SidePages> side_pages_;  // by page group; empty: it has none
  uint64_t step_ = 0;
  std::vector<uint64_t> last_step_;  // by row: that its sequence was in
};

}  // namespace kvasir::worker
