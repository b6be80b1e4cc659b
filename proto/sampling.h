// Default values of sampling parameters.
#pragma once

#include "proto/kvasir/v1/sampling.pb.h"

namespace kvasir::proto {

// Returns parameters that leave the model's distribution unchanged: temperature
// 1, top_p 1, no top_k, no min_p, no penalties. n is 1.
kvasir::v1::SamplingParams NeutralSampling();

}  // namespace kvasir::proto
