// Detects ranks that have sampled different tokens.
#pragma once

#include <cstdint>

#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Hash of the step id, its sequences, their faults and sampled ids, in order.
// It is the same in every process. Log probabilities are not included.
uint64_t ResultHash(const kvasir::v1::StepResult& result);

}  // namespace kvasir::worker
