// The evictions of a step: from the plan's list to what each layer's ops take.
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

// Threads: one at a time. Reused from step to step.
class SlotEvictions {
 public:
  // A sequence has `most_slots` at most. What is given is not kept.
  SlotEvictions(const plan::ResolvedPlan& plan, const KvArenas& arenas,
                int64_t most_slots);

  // The evictions of the step before are forgotten.
  void Clear();
  // The plan's next one, behind so many batches of page copies. It has been
  // checked (SequenceTable::Evict), so that it has at most as many slots as
  // there is room for (CHECK). INVALID_ARGUMENT for counts that a layer of the
  // group refuses.
  absl::Status Add(const kvasir::v1::SlotEviction& eviction,
                   int64_t copy_batches);

  const std::vector<EvictionBatch>& batches() const { return batches_; }
  // What any batch of a step takes at most, for each page group that evicts.
  std::vector<EvictionBatch> LargestBatches() const;

  // Puts what ops take into the blob: what depends on batches() alone, and,
  // later, tables of any length that it leads to.
  void Pack(StepBlob* blob);
  void PackTables(StepBlob* blob);
  // Enqueues batch `index` of batches() over the layers of its page group. With
  // a counting workspace it may be any.
  absl::Status Run(kernels::Stream& stream, const Decoder& decoder,
                   const EvictionBatch& batch, size_t index,
                   kernels::Workspace& workspace) const;

 private:
  // How layers choose; those of a page group may do it in different ways.
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
    int64_t most_units = 0;  // of a layer
  };
  struct Entry {
    int64_t num_slots = 0;
    int64_t kept = 0;
    int64_t first_kept = 0;
    int64_t first_page = 0;  // in pages_
  };

  // Of a batch.
  struct Work {
    std::vector<Entry> entries;
    int64_t kept_numbers = 0;  // of their lists
    absl::flat_hash_set<int32_t> pages;
    std::vector<StepBlob::Place<kernels::Eviction>> places;  // by rule
  };

  // The batch that may take it: nothing of it stands in the way of another.
  size_t BatchFor(const kvasir::v1::SlotEviction& eviction,
                  int64_t copy_batches, int64_t kept_numbers);
  kernels::Eviction EvictionOf(const Entry& entry, const Rule& rule) const;
  const Group& group(int64_t index) const {
    return groups_[static_cast<size_t>(index)];
  }

  const int64_t most_slots_;
  std::vector<Group> groups_;  // by page group
  int64_t kept_capacity_ = 0;  // numbers of a list of kept slots

  std::vector<EvictionBatch> batches_;
  std::vector<Work> work_;      // by batch
  std::vector<int32_t> pages_;  // of all entries
};

}  // namespace kvasir::worker
