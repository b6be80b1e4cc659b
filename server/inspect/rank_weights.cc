#include "server/inspect/rank_weights.h"

#include <optional>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "model/checkpoint/plan_tensors.h"
#include "worker/weights/weight_source.h"
#include "worker/weights/weights.h"

namespace kvasir::cli {

absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format) {
  if (!source.checkpoint.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(
        const auto weights,
        worker::RandomSource::Create(*source.shape, source.spec, *source.plan,
                                     /*seed=*/0, kernels::DType::kBf16));
    return worker::CountWeightBytes(source.spec, std::move(plan), weights.get(),
                                    format);
  }
  std::optional<kernels::DType> missing;
  if (!source.weights_fit) {
    KVASIR_ASSIGN_OR_RETURN(missing,
                            worker::CheckpointSource(&*source.checkpoint)
                                .TypeOf(std::string(model::kEmbeddingName)));
  }
  worker::CheckpointSource weights(&*source.checkpoint, missing);
  return worker::CountWeightBytes(source.spec, std::move(plan), &weights,
                                  format);
}

}  // namespace kvasir::cli
