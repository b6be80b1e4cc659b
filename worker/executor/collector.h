// The last of the three parts of a step (stager.h, launcher.h): reads the
// results back from the device and reports them in the plan's order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/stream.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/attention/mass_room.h"
#include "worker/executor/decoder.h"
#include "worker/executor/executor_totals.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/step/staged_step.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_state.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// Waits for the stream, reads a step's results back, turns them into a
// StepResult, and adds to the totals.
//
// Owns: the host's copy of the results.
// Threads: one at a time.
// Errors: those of ops that the step enqueued.
class Collector {
 public:
  // All pointers must outlive the collector. Only the constructor uses
  // `weights` and `plan`.
  struct Parts {
    kernels::Stream* stream = nullptr;
    const KvArenas* arenas = nullptr;
    const Decoder* decoder = nullptr;
    const StepState* state = nullptr;
    ExecutorTotals* totals = nullptr;
    StepLimits limits;
  };

  Collector(const Parts& parts, const ModelWeights& weights,
            const plan::ResolvedPlan& plan);

  // Bytes that the largest step reads back.
  size_t results_bytes() const { return host_results_.size(); }

  // Waits for a launched step and returns its results. `step` must not have
  // changed since the launch.
  absl::StatusOr<kvasir::v1::StepResult> Collect(const StagedStep& step);

 private:
  // `count` layers that do the same work on the same slots. `first` is the
  // lowest index of these layers.
  struct LikeLayers {
    int64_t first = 0;
    int64_t count = 1;
  };

  kvasir::v1::StepResult ResultOf(const StagedStep& step) const;
  // Reads element `index` of the array that begins at `offset_bytes` in the
  // results.
  template <typename T>
  T ResultAt(int64_t offset_bytes, int64_t index) const;
  // Returns the fault, if any, of the sequence whose tokens begin at row
  // `first_row` of the step: NaN or infinite numbers.
  kvasir::v1::SequenceFault FaultOf(const StagedStep& step,
                                    const StepBatch::Output& output,
                                    int64_t first_row) const;
  void CountStep(const StagedStep& step);
  int64_t& ScoredTokens(ScoringKind kind);

  const Parts parts_;
  std::vector<LikeLayers> like_layers_;
  // For each page group, whether any of its layers evicts by scores.
  std::vector<bool> scores_;
  int64_t static_codes_per_token_ = 0;
  size_t load_bytes_ = 0;  // size of StepState::expert_load
  // A copy of StepState::expert_load (the tokens that each expert has run),
  // followed by the results.
  std::vector<std::byte> host_results_;
};

}  // namespace kvasir::worker
