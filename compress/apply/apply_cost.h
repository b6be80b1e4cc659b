// Memory and time that applying a plan takes, estimated before the work begins.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "compress/calibrate/calibration.h"
#include "compress/calibrate/calibration_sample.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct ApplyCost {
  int64_t calibration_bytes = 0;  // input Gram matrices of all layers
  int64_t layer_bytes = 0;        // one layer's factors and their workspace
  // hidden states in the pass that finds the ranges of codes; 0 without this
  // pass
  int64_t hidden_bytes = 0;
  double factor_operations = 0;  // float64 operations that find the factors
  double range_operations = 0;   // float32 operations that find the ranges
  int64_t copied_bytes = 0;  // bytes copied from the base model to the artifact

  int64_t peak_bytes() const {
    return calibration_bytes + layer_bytes + hidden_bytes;
  }
};

// Estimates the cost of applying `plan` to `base`. If `calibration` is null, it
// counts as 0 bytes. If `sample` is null, the pass that finds the ranges of
// codes is not counted.
ApplyCost CostOfApply(const model::Checkpoint& base,
                      const kvasir::v1::KvPlan& plan,
                      const Calibration* calibration,
                      const CalibrationSample* sample);

// The expected time. `operations_per_second` comes from
// MeasureOperationsPerSecond.
absl::Duration TimeOfApply(const ApplyCost& cost, double operations_per_second);

}  // namespace kvasir::compress
