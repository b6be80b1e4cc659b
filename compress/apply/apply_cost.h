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
  int64_t calibration_bytes = 0;  // the input Grams of all layers
  int64_t layer_bytes = 0;        // one layer's factors and their workspace
  int64_t hidden_bytes = 0;  // hidden states of the pass that finds ranges of
                             // codes; 0 if the plan needs no such pass
  double factor_operations = 0;  // to find the factors, in float64
  double range_operations = 0;   // to find the ranges of codes, in float32
  int64_t copied_bytes = 0;      // from the base model to the artifact

  int64_t peak_bytes() const {
    return calibration_bytes + layer_bytes + hidden_bytes;
  }
};

// If `calibration` is null, it takes no memory. If `sample` is null, there is
// no pass that finds ranges.
ApplyCost CostOfApply(const model::Checkpoint& base,
                      const kvasir::v1::KvPlan& plan,
                      const Calibration* calibration,
                      const CalibrationSample* sample);

// `operations_per_second` comes from MeasureOperationsPerSecond.
absl::Duration TimeOfApply(const ApplyCost& cost, double operations_per_second);

}  // namespace kvasir::compress
