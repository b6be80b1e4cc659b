// Launches steps as graphs: a step that only decodes is captured when its key
// (StepGraphs::KeyOf) occurs for the second time, and replayed from then on.
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "worker/executor/launcher.h"

namespace kvasir::worker {

using kernels::LaunchStream;
using kernels::Workspace;

namespace {

// Whether each sequence runs one output token, and the step has no page copies
// and no evictions.
bool OnlyDecodes(const StagedStep& step) {
  return step.sizes.tokens > 0 && step.sizes.tokens == step.sizes.sequences &&
         !step.batch->has_prompts() && step.bucket.copies.empty() &&
         step.bucket.evictions.empty();
}

}  // namespace

absl::Status Launcher::Launch(const StagedStep& step) {
  const auto launch = [&] {
    Workspace whole = workspace();
    return LaunchOps(step, whole);
  };
  if (graphs_ == nullptr || !OnlyDecodes(step)) return launch();
  graphs_->UseBlob(step.blob_peaks);
  StepGraphs::Step* const graph =
      graphs_->Find(StepGraphs::KeyOf(step.sizes, step.bucket));
  // The first step of a key runs op by op, because first launches load and
  // choose kernels, which is not allowed during a capture.
  if (!std::exchange(graph->seen, true)) return launch();
  absl::Status status;
  if (graph->work == nullptr) {
    status = Capture(step, graph);
    bool others = true;
    KVASIR_RETURN_IF_ERROR(AgreeOnCapture(status.ok(), &others));
    if (status.ok() && !others) {
      status = absl::AbortedError(
          "another tensor-parallel rank could not capture the step as a CUDA "
          "graph");
    }
    parts_.totals->captured_steps += status.ok() ? 1 : 0;
  }
  if (status.ok()) {
    auto& stream = static_cast<LaunchStream&>(*parts_.stream);
    status = stream.Replay(*graph->work);
    if (status.ok()) {
      ++parts_.totals->replayed_steps;
      return parts_.collective->Replayed(stream, graph->calls);
    }
    // The other ranks replay the step. If this rank launched it op by op, the
    // ranks would make their collective calls in different orders.
    if (parts_.collective->shard().size > 1) return status;
  }
  base::LogWarning(
      "a step could not be captured or replayed as a graph; from now on steps "
      "are launched op by op",
      {{"tokens", step.sizes.tokens}, {"status", status.ToString()}});
  graphs_ = nullptr;
  return launch();
}

absl::Status Launcher::Capture(const StagedStep& step,
                               StepGraphs::Step* captured) {
  auto& stream = static_cast<LaunchStream&>(*parts_.stream);
  KVASIR_RETURN_IF_ERROR(stream.BeginCapture());
  Workspace whole = workspace();
  const absl::Status launched = LaunchOps(step, whole);
  absl::StatusOr<std::unique_ptr<kernels::CapturedWork>> work =
      stream.EndCapture();
  captured->calls = parts_.collective->TakeCaptured();
  KVASIR_RETURN_IF_ERROR(launched);
  KVASIR_ASSIGN_OR_RETURN(captured->work, std::move(work));
  return absl::OkStatus();
}

// Either all ranks or no rank must replay the step. So each rank that has
// captured the step adds 1 to a sum, which must equal the number of ranks.
// Capturing executes nothing, so this sum is the step's first work on the
// stream.
absl::Status Launcher::AgreeOnCapture(bool own, bool* all) {
  const int64_t size = parts_.collective->shard().size;
  *all = own;
  if (size == 1) return absl::OkStatus();
  Workspace whole = workspace();
  const kernels::DevicePtr<float> sum = whole.Take<float>(1);
  KVASIR_RETURN_IF_ERROR(whole.status());
  float captured = own ? 1.0f : 0.0f;
  KVASIR_RETURN_IF_ERROR(
      kernels::Upload(*parts_.stream, sum, &captured, sizeof(captured)));
  KVASIR_RETURN_IF_ERROR(parts_.collective->AllReduceSum(
      *parts_.stream, sum, 1, kernels::DType::kF32, whole));
  KVASIR_RETURN_IF_ERROR(
      kernels::ReadBack(*parts_.stream, &captured, sum, sizeof(captured)));
  *all = captured == static_cast<float>(size);
  return absl::OkStatus();
}

}  // namespace kvasir::worker
