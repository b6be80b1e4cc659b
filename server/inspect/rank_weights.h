#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/load/model_source.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

// Returns the bytes of weights that one rank would hold in memory. `plan` is
// resolved for this rank. If the checkpoint lacks a tensor, because the plan
// was not applied to it yet, the tensor counts with the data type of the
// embedding. Without a checkpoint, all tensors count as bf16. Errors: those
// of worker::CountWeightBytes.
absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format);

}  // namespace kvasir::cli
