#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/load/model_source.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

// Returns the bytes of weights that one rank would hold in memory; `plan` is
// resolved for this rank. Tensors that the checkpoint lacks (the plan was not
// applied to it yet) count with the data type of its embedding. Without a
// checkpoint, all tensors count as bf16. Errors: those of
// worker::CountWeightBytes.
absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format);

}  // namespace kvasir::cli
