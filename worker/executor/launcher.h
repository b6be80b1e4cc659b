// The second of the three parts of a step (stager.h, collector.h): enqueues a
// staged step, from page copies to sampled tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/allocator.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "worker/collective/collective.h"
#include "worker/executor/decoder.h"
#include "worker/executor/executor_totals.h"
#include "worker/executor/graphs/step_graphs.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/step/staged_step.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_state.h"
#include "worker/executor/step_output.h"

namespace kvasir::worker {

// One row of logits that a step computed, on the host.
struct LogitsRow {
  uint64_t sequence_id = 0;
  // logical position of the token before the predicted one
  int64_t position = 0;
  absl::Span<const float> logits;  // [V]
};

// Enqueues a step's page copies and evictions, then the layers (Decoder), then
// head and sampler (StepOutput). A step allocates no device memory. Steps of
// one StepBucket launch the same ops at the same addresses, until the StepBlob
// grows and moves. Reads back, and waits for the device, only for a logits tap
// and to capture a step in a group of several ranks.
//
// Owns: the workspace, and the captured graphs.
// Threads: one at a time.
// Errors: those of the ops and of the collective. After an error the results of
//   the step and the cache are undefined.
class Launcher {
 public:
  // All pointers must outlive the launcher.
  struct Parts {
    kernels::Stream* stream = nullptr;
    Collective* collective = nullptr;
    const KvArenas* arenas = nullptr;
    const Decoder* decoder = nullptr;
    const StepState* state = nullptr;
    ExecutorTotals* totals = nullptr;
    StepLimits limits;
    int64_t logits_bytes = 0;
    // See ModelExecutorOptions::logits_tap.
    std::function<void(const LogitsRow&)> logits_tap;
    bool graphs = false;  // see ModelExecutorOptions::graphs
  };

  explicit Launcher(Parts parts);

  // See StepOutput::logits_rows.
  int64_t logits_rows() const { return output_.logits_rows(); }

  // Allocates the workspace that `largest` needs (Stager::LargestStepToCount).
  // UNIMPLEMENTED with the op's name if the device lacks an op that steps may
  // launch.
  absl::Status AllocateWorkspace(const StagedStep& largest,
                                 kernels::DeviceAllocator* allocator);
  // The whole workspace. Use it for other work only after the stream has
  // finished what was enqueued with it.
  kernels::Workspace workspace() const {
    return kernels::Workspace(workspace_memory_.data(),
                              workspace_memory_.bytes());
  }

  // Enqueues the step, op by op or as a graph.
  absl::Status Launch(const StagedStep& step);

 private:
  // Enqueues the step op by op. With a counting workspace it only counts
  // memory.
  absl::Status LaunchOps(const StagedStep& step, kernels::Workspace& workspace);
  absl::Status MovePages(const StagedStep& step, kernels::Workspace& workspace);
  absl::Status Evict(const StagedStep& step, size_t index,
                     kernels::Workspace& workspace);
  absl::Status GatherIds(const StagedStep& step,
                         kernels::DevicePtr<int32_t> ids,
                         kernels::Workspace& workspace);
  absl::Status CountHistories(const StagedStep& step,
                              kernels::Workspace& workspace);
  absl::Status RunTargets(const StagedStep& step, const HiddenStates& hidden,
                          kernels::Workspace& workspace);
  absl::Status RunSamples(const StagedStep& step, const HiddenStates& hidden,
                          kernels::Workspace& workspace);
  absl::Status CarrySampled(const StagedStep& step,
                            kernels::Workspace& workspace);
  absl::Status TapLogits(const StagedStep& step, const HiddenStates& hidden,
                         kernels::Workspace& workspace);

  absl::Status Capture(const StagedStep& step, StepGraphs::Step* captured);
  // Sets *all to whether every rank has captured the step; `own` says whether
  // this rank has. Waits for the device. An error means that the step has
  // failed.
  absl::Status AgreeOnCapture(bool own, bool* all);

  const Parts parts_;
  const StepOutput output_;
  kernels::DeviceBuffer workspace_memory_;
  std::unique_ptr<StepGraphs> graphs_;  // null if steps are launched op by op
};

}  // namespace kvasir::worker
