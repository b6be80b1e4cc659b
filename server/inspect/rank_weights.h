#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/load/model_source.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

// The bytes of weights that the rank for which the plan is resolved would hold
// in memory, as the loader counts them. If the plan has not been applied to the
// checkpoint yet, missing tensors are assumed to have the type of its
// embedding. Without a checkpoint, all tensors are assumed to be bf16. Errors:
// those of worker::CountWeightBytes.
absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format);

}  // namespace kvasir::cli
