#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/load/model_source.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

// Bytes of weights that the rank of the plan would hold in memory, as the
// loader counts them. Tensors that a checkpoint has not, because the plan is
// still to be applied to it, count in the type of its embedding; those of a
// shape are bf16. Errors: worker::CountWeightBytes's.
absl::StatusOr<int64_t> CountResidentBytes(
    const ModelSource& source, std::shared_ptr<const worker::ServedPlan> plan,
    const worker::MatrixFormat& format);

}  // namespace kvasir::cli
