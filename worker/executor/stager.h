// The first of the three parts of a step (launcher.h, collector.h): checks a
// step plan and packs what the device needs into one upload.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/layout/layout.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/decoder.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/pages/sequence_table.h"
#include "worker/executor/slot_evictions.h"
#include "worker/executor/step/staged_step.h"
#include "worker/executor/step/step_batch.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_state.h"

namespace kvasir::worker {

// Checks the plan and applies it to the SequenceTable, builds a StepBatch (host
// arrays), packs it into the StepBlob, and uploads the blob in one copy.
// Launches no op and reads nothing back.
//
// Owns: block tables, penalty counts, token masks, the blob, and the staged
//   step.
// Threads: one at a time.
// Errors: INVALID_ARGUMENT naming sequence, field, value and limit for a plan
//   that breaks a rule; RESOURCE_EXHAUSTED if there is too little memory for
//   the blob or penalty counts. After an error the tables are undefined.
class Stager {
 public:
  // All pointers except `plan` must outlive the stager.
  struct Parts {
    kernels::Device* device = nullptr;
    kernels::Stream* stream = nullptr;
    const plan::ResolvedPlan* plan = nullptr;
    const cache::PageLayout* layout = nullptr;
    const KvArenas* arenas = nullptr;
    Decoder* decoder = nullptr;
    const StepState* state = nullptr;
    StepLimits limits;
    int64_t max_model_len = 0;
    int64_t most_slots = 0;   // the most slots of a sequence that evicts
    int64_t logits_rows = 0;  // see StepOutput::logits_rows
    bool lifts_prompts = false;
    bool taps_logits = false;
  };

  static absl::StatusOr<std::unique_ptr<Stager>> Create(const Parts& parts);

  // Returns a step of the largest sizes, without addresses, for measuring the
  // workspace. It launches every op that any step may launch.
  StagedStep LargestStepToCount() const;
  // Reserves memory for the blob of a large step. Such a step has the largest
  // bucket, one page copy per sequence and page group, block tables of the
  // greatest length, and the token history of one sequence. A later step that
  // needs more makes the blob grow. Returns the reserved bytes.
  absl::StatusOr<size_t> ReserveBlob();

  // Applies the plan to the tables and uploads the step. staged() is valid
  // until the next call.
  absl::Status Stage(const kvasir::v1::StepPlan& plan);
  const StagedStep& staged() const { return staged_; }

  // See ModelExecutor::RegisterTokenMask.
  absl::Status RegisterTokenMask(std::string name,
                                 absl::Span<const uint32_t> allowed);
  uint64_t last_step_id() const { return last_step_id_; }

 private:
  // Where the sequences of a page group lie in the blob. `output` is a second
  // copy of the sequences that decode, for a launch without prompts.
  struct SequencePlaces {
    StepBlob::Place<kernels::AttentionSequence> all;
    StepBlob::Place<kernels::AttentionSequence> output;
  };

  Stager(const Parts& parts, SequenceTable table);
  absl::Status ApplyPlan(const kvasir::v1::StepPlan& plan);
  absl::Status ListMoves(const kvasir::v1::StepPlan& plan);
  absl::Status PrepareSample(const kvasir::v1::SequenceStep& step,
                             SequenceTable::Sequence* sequence,
                             kernels::SampleRow* row);
  absl::Status PreparePenalties(const kvasir::v1::SequenceStep& step,
                                SequenceTable::Sequence* sequence,
                                kernels::SampleRow* row);
  StepBucket BucketOfBatch() const;
  void Pack();
  void PackSequences(kernels::DevicePtr<const int32_t> tables,
                     const std::vector<SequencePlaces>& places);
  void PackHistories(const StepBlob::Place<kernels::TokenHistory>& rows);
  void PackSamples(const StepBlob::Place<kernels::SampleRow>& rows,
                   const StepBlob::Place<int32_t>& carried);
  void PlaceResults();

  const Parts parts_;
  SequenceTable table_;
  StepBatch batch_;
  KvArenas::CopyList copies_;
  SlotEvictions evictions_;
  StepBlob blob_;
  StagedStep staged_;
  std::vector<std::unique_ptr<PenaltyCounts>> idle_penalties_;
  uint64_t last_step_id_ = 0;
  absl::flat_hash_map<std::string, kernels::DeviceBuffer> masks_;
};

}  // namespace kvasir::worker
