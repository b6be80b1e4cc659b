#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/load/model_source.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

// Returns how many bytes of weights one rank, the one for which the plan is
// resolved, would hold in memory. If the plan has not been applied to the
// checkpoint yet, tensors that the checkpoint lacks count with the type of its
// embedding. Without a checkpoint, all tensors count as bf16. Errors: those of
// worker::CountWeightBytes.
absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format);

}  // namespace kvasir::cli
