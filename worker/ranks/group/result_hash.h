// The hash by which ranks detect that they have sampled different tokens.
#pragma once

#include <cstdint>

#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Returns a hash of the step's id and of each sequence's id, fault and sampled
// token, in order. It has the same value in every process. Log probabilities
// are not included.
uint64_t ResultHash(const kvasir::v1::StepResult& result);

}  // namespace kvasir::worker
