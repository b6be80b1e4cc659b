// The sampling parameters of a request that sets none.
#pragma once

#include "proto/kvasir/v1/sampling.pb.h"

namespace kvasir::proto {

// The parameters that change nothing: temperature 1, top_p 1, no top_k, no
// min_p, penalties off, n 1.
kvasir::v1::SamplingParams NeutralSampling();

}  // namespace kvasir::proto
