// Computes the quantization ranges of codes again after a recovery has changed
// the weights.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// Computes the ranges of CHANNEL_STATIC codes again and puts them into
// `layers`, because the old ranges fit the latents of the old weights. The new
// weights in `layers` must have been rounded to their stored types. Does
// nothing for a plan without such codes. Errors: those of RangeCollector.
absl::Status RenewRanges(const model::Checkpoint& source,
                         const kvasir::v1::KvPlan& plan,
                         const CalibrationSample& sample, int threads,
                         std::vector<TensorMap>& layers);

}  // namespace kvasir::compress
