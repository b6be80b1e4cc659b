// Prepares the evictions of a step: turns the plan's list into the arguments of
// each layer's eviction ops.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/eviction/ops.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/decoder.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/step/step_layout.h"

namespace kvasir::worker {

// The evictions of one step. The object is reused for each step.
//
// Threads: one at a time.
class SlotEvictions {
 public:
  // `most_slots` is the most slots that a sequence may have. `plan` and
  // `arenas` are used only by the constructor.
  SlotEvictions(const plan::ResolvedPlan& plan, const KvArenas& arenas,
                int64_t most_slots);

  // Forgets the evictions of the last step.
  void Clear();
  // Adds the plan's next eviction, to run after the first `copy_batches`
  // batches of page copies. SequenceTable::Evict must have accepted the
  // eviction, and its sequence must have at most `most_slots` slots (CHECK).
  // INVALID_ARGUMENT if a layer's rule does not allow the eviction's counts.
  absl::Status Add(const kvasir::v1::SlotEviction& eviction,
                   int64_t copy_batches);

  const std::vector<EvictionBatch>& batches() const { return batches_; }
  // The largest batch that a step may have, for each page group that evicts.
  std::vector<EvictionBatch> LargestBatches() const;

  // Pack adds to the blob the arrays that ops receive by address. Their size
  // depends only on batches(). PackTables must be called after Pack. It adds
  // the block tables to which these arrays point, and whose size differs from
  // step to step.
  void Pack(StepBlob* blob);
  void PackTables(StepBlob* blob);
  // Enqueues `batch`, for all layers of its page group. `index` is its index in
  // batches(); a counting workspace does not need it.
  absl::Status Run(kernels::Stream& stream, const Decoder& decoder,
                   const EvictionBatch& batch, size_t index,
                   kernels::Workspace& workspace) const;

 private:
  // How a layer chooses the slots to keep. Layers of one page group may have
  // different rules.
  struct Rule {
    int64_t sinks = 0;
    int64_t recent = 0;
    bool scored = true;
    float lambda = 0;
    float friendliness = 1;
    float decay = 1;

    friend bool operator==(const Rule&, const Rule&) = default;
  };
  struct Group {
    std::vector<Rule> rules;
    struct Layer {
      int64_t layer = 0;
      size_t rule = 0;
    };
    std::vector<Layer> layers;
    int64_t most_units = 0;  // the most eviction units of any layer
  };
  struct Entry {
    int64_t num_slots = 0;
    int64_t kept = 0;
    int64_t first_kept = 0;
    int64_t first_page = 0;  // index in pages_
  };

  // One batch of evictions, on the host.
  struct Work {
    std::vector<Entry> entries;
    // the sum of Entry::kept * Group::most_units
    int64_t kept_numbers = 0;
    absl::flat_hash_set<int32_t> pages;
    std::vector<StepBlob::Place<kernels::Eviction>> places;  // for each rule
  };

  // Returns the index of the batch for this eviction. This is the page group's
  // latest batch, or a new one if the latest is full, has a page of the
  // eviction, or runs before some of the `copy_batches` batches of copies.
  size_t BatchFor(const kvasir::v1::SlotEviction& eviction,
                  int64_t copy_batches, int64_t kept_numbers);
  kernels::Eviction EvictionOf(const Entry& entry, const Rule& rule) const;
  const Group& group(int64_t index) const {
    return groups_[static_cast<size_t>(index)];
  }

  const int64_t most_slots_;
  std::vector<Group> groups_;  // by page group
  // the most slots that a batch may keep, summed over its sequences and their
  // eviction units
  int64_t kept_capacity_ = 0;

  std::vector<EvictionBatch> batches_;
  std::vector<Work> work_;      // one element for each batch
  std::vector<int32_t> pages_;  // the pages of all entries
};

}  // namespace kvasir::worker
