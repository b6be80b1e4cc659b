// Whether ranks have sampled the same.
#pragma once

#include <cstdint>

#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Of the step, its sequences, their faults and sampled ids, in their order; the
// same in every process. Log-probabilities are not in it.
uint64_t ResultHash(const kvasir::v1::StepResult& result);

}  // namespace kvasir::worker
