#include "compress/apply/layer_applier.h"

#include <string>
#include <utility>

#include "base/status_macros.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/tensors/attention_loader.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

// For matrices of at least this width, products use several threads. For
// smaller ones the threads would mostly wait for each other.
constexpr int64_t kManyThreadsWidth = 1024;

}  // namespace

absl::StatusOr<Decomposition> DecompositionOf(const kvasir::v1::KvPlan& plan) {
  const std::string& name = plan.provenance().decomposition();
  return name.empty() ? Decomposition::kWhitened : ParseDecomposition(name);
}

absl::StatusOr<at::ScalarType> StoredTypeOf(const model::Checkpoint& base) {
  KVASIR_ASSIGN_OR_RETURN(
      const model::TensorStore::Entry key,
      base.Tensor(model::LayerTensorName(0, "self_attn.k_proj.weight")));
  return ScalarTypeOf(key.info->type);
}

absl::StatusOr<LayerApplier> LayerApplier::Create(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const Calibration* calibration, const CalibrationSample* sample,
    const Options& options) {
  LayerApplier applier(base, plan, calibration, options);
  KVASIR_ASSIGN_OR_RETURN(applier.decomposition_, DecompositionOf(plan));
  if (RangeCollector::IsNeeded(plan)) {
    KVASIR_ASSIGN_OR_RETURN(
        RangeCollector ranges,
        RangeCollector::Create(base, plan, *sample, options.ranges));
    applier.ranges_.emplace(std::move(ranges));
  }
  return applier;
}

absl::StatusOr<TensorMap> LayerApplier::Apply(int64_t layer) {
  // If the layer is wide, its factors are found with all threads.
  SetBlasThreads(base_.spec().hidden_size >= kManyThreadsWidth
                     ? options_.ranges.threads
                     : 1);
  ApplyRequest request;
  request.spec = &base_.spec();
  request.plan = &plan_.layers(static_cast<int>(layer));
  request.layer = layer;
  KVASIR_ASSIGN_OR_RETURN(request.weights, LoadAttention(base_, layer));
  if (calibration_ != nullptr) {
    request.calibration = &calibration_->layers[static_cast<size_t>(layer)];
    request.num_tokens = calibration_->num_tokens;
  }
  request.decomposition = decomposition_;
  request.commuting = CommutingWeightsOf(plan_);
  request.profile = options_.profile;
  KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, ApplyLayerPlan(request));
  SetBlasThreads(1);
  if (ranges_) {
    KVASIR_RETURN_IF_ERROR(ranges_->Collect(layer, tensors));
  }
  return tensors;
}

}  // namespace kvasir::compress
