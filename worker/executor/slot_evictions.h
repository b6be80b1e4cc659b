// The evictions of a step: turns the plan's list into what the ops of each
// layer take.
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
  // `most_slots` is the most that a sequence may have. The arguments are not
  // kept.
  SlotEvictions(const plan::ResolvedPlan& plan, const KvArenas& arenas,
                int64_t most_slots);

  // Forgets the evictions of the last step.
  void Clear();
  // Adds the plan's next eviction, which follows `copy_batches` batches of page
  // copies. SequenceTable::Evict has checked it, so it has no more slots than
  // there is room for (CHECK). INVALID_ARGUMENT for counts that a layer of the
  // group refuses.
  absl::Status Add(const kvasir::v1::SlotEviction& eviction,
                   int64_t copy_batches);

  const std::vector<EvictionBatch>& batches() const { return batches_; }
  // The largest batch that a step may have, for each page group that evicts.
  std::vector<EvictionBatch> LargestBatches() const;

  // Pack puts what ops take by address into the blob; its size depends only on
  // batches(). PackTables later adds the tables that those rows point to, of
  // any length.
  void Pack(StepBlob* blob);
  void PackTables(StepBlob* blob);
  // Enqueues batch `index` of batches() over the layers of its page group. With
  // a counting workspace `index` is not used.
  absl::Status Run(kernels::Stream& stream, const Decoder& decoder,
                   const EvictionBatch& batch, size_t index,
                   kernels::Workspace& workspace) const;

 private:
  // How layers choose the slots to keep. Layers of one page group may have
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
    int64_t most_units = 0;  // the most of any layer
  };
  struct Entry {
    int64_t num_slots = 0;
    int64_t kept = 0;
    int64_t first_kept = 0;
    int64_t first_page = 0;  // in pages_
  };

  // The host's record of one batch.
  struct Work {
    std::vector<Entry> entries;
    // numbers in the lists of kept slots of all entries
    int64_t kept_numbers = 0;
    absl::flat_hash_set<int32_t> pages;
    std::vector<StepBlob::Place<kernels::Eviction>> places;  // by rule
  };

  // Returns the batch that this eviction joins: the latest that shares no page
  // with it and has room, or a new one.
  size_t BatchFor(const kvasir::v1::SlotEviction& eviction,
                  int64_t copy_batches, int64_t kept_numbers);
  kernels::Eviction EvictionOf(const Entry& entry, const Rule& rule) const;
  const Group& group(int64_t index) const {
    return groups_[static_cast<size_t>(index)];
  }

  const int64_t most_slots_;
  std::vector<Group> groups_;  // by page group
  int64_t kept_capacity_ = 0;  // room for numbers in the lists of kept slots

  std::vector<EvictionBatch> batches_;
  std::vector<Work> work_;      // by batch
  std::vector<int32_t> pages_;  // the pages of all entries
};

}  // namespace kvasir::worker
