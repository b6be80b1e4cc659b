// Launch by graphs: steps that only decode are captured when they come for the
// second time, and replayed from then on.
#include <memory>
#include <utility>

#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {

using kernels::LaunchStream;
using kernels::Workspace;

// A profile and a tap want the ops one by one.
bool ModelExecutor::WantsGraphs() const {
  return options_.graphs && options_.profile == nullptr &&
         !options_.logits_tap &&
         parts_.stream->device() != kernels::DeviceKind::kCpu &&
         parts_.collective->can_be_captured();
}

// Of each sequence a row that is output, and no pages that move.
bool ModelExecutor::OnlyDecodes(const StagedStep& step) const {
  return step.sizes.tokens > 0 && step.sizes.tokens == step.sizes.sequences &&
         !batch_.has_prompts() && step.bucket.copies.empty() &&
         step.bucket.evictions.empty();
}

absl::Status ModelExecutor::LaunchStep() {
  const auto launch = [this] {
    Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
    return Launch(staged_, workspace);
  };
  if (graphs_ == nullptr || !OnlyDecodes(staged_)) return launch();
  graphs_->UseBlob(blob_.peaks());
  StepGraphs::Step* const step =
      graphs_->Find(StepGraphs::KeyOf(staged_.sizes, staged_.bucket));
  // What is loaded or chosen with the first launches of a shape is not to be
  // done in a capture.
  if (!std::exchange(step->seen, true)) return launch();
  absl::Status status;
  if (step->work == nullptr) {
    status = Capture(step);
    bool others = true;
    KVASIR_RETURN_IF_ERROR(AgreeOnCapture(status.ok(), &others));
    if (status.ok() && !others) {
      status = absl::AbortedError("another rank could not capture the step");
    }
    totals_.captured_steps += status.ok() ? 1 : 0;
  }
  if (status.ok()) {
    auto& stream = static_cast<LaunchStream&>(*parts_.stream);
    status = stream.Replay(*step->work);
    if (status.ok()) {
      ++totals_.replayed_steps;
      return parts_.collective->Replayed(stream, step->calls);
    }
    // The others are at the captured step.
    if (parts_.collective->shard().size > 1) return status;
  }
  base::LogWarning(
      "steps are captured as graphs no more",
      {{"tokens", staged_.sizes.tokens}, {"status", status.ToString()}});
  graphs_ = nullptr;
  return launch();
}

absl::Status ModelExecutor::Capture(StepGraphs::Step* step) {
  auto& stream = static_cast<LaunchStream&>(*parts_.stream);
  KVASIR_RETURN_IF_ERROR(stream.BeginCapture());
  Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
  const absl::Status launched = Launch(staged_, workspace);
  absl::StatusOr<std::unique_ptr<kernels::CapturedWork>> work =
      stream.EndCapture();
  step->calls = parts_.collective->TakeCaptured();
  KVASIR_RETURN_IF_ERROR(launched);
  KVASIR_ASSIGN_OR_RETURN(step->work, std::move(work));
  return absl::OkStatus();
}

// A collective is captured by all ranks or by none: so is a step. The sum is
// the stream's first work of the step.
absl::Status ModelExecutor::AgreeOnCapture(bool own, bool* all) {
  const int64_t size = parts_.collective->shard().size;
  *all = own;
  if (size == 1) return absl::OkStatus();
  Workspace workspace(workspace_memory_.data(), workspace_memory_.bytes());
  const kernels::DevicePtr<float> sum = workspace.Take<float>(1);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  float captured = own ? 1.0f : 0.0f;
  KVASIR_RETURN_IF_ERROR(
      kernels::Upload(*parts_.stream, sum, &captured, sizeof(captured)));
  KVASIR_RETURN_IF_ERROR(parts_.collective->AllReduceSum(
      *parts_.stream, sum, 1, kernels::DType::kF32, workspace));
  KVASIR_RETURN_IF_ERROR(
      kernels::ReadBack(*parts_.stream, &captured, sum, sizeof(captured)));
  *all = captured == static_cast<float>(size);
  return absl::OkStatus();
}

}  // namespace kvasir::worker
