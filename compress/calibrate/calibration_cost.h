// Memory and time that a calibration takes, estimated before it begins.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/calibrate.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Byte counts are upper bounds, except that small amounts of memory are not
// counted.
struct CalibrationCost {
  // weights of one layer, or of all layers if gradients are needed
  int64_t model_bytes = 0;
  // The larger of two workspaces (one for a layer and all sequences of a batch,
  // the other for the output head), plus freed memory that the allocator does
  // not return.
  int64_t workspace_bytes = 0;
  // The activations that are kept at once: with a backward pass, the inputs of
  // all layers for one batch; without one, the hidden states of all tokens.
  int64_t micro_batch_bytes = 0;
  int64_t sum_bytes = 0;  // Gram matrices and sums of squares of all layers
  double forward_operations = 0;  // float32 operations of the forward pass
  // operations of the output head and the backward passes
  double back_operations = 0;
  double gram_operations = 0;  // float64 operations of Gram matrices

  int64_t peak_bytes() const {
    return model_bytes + workspace_bytes + micro_batch_bytes + sum_bytes;
  }
};

CalibrationCost CostOfCalibration(const model::Checkpoint& checkpoint,
                                  const CalibrationSample& sample,
                                  const CalibrateOptions& options);

// Float32 multiplications and additions per second in matrix products with
// `threads` threads. The measurement takes a tenth of a second.
double MeasureOperationsPerSecond(int threads, at::Device device = at::kCPU);

struct CalibrationTime {
  absl::Duration total;
  absl::Duration way_back;
};
CalibrationTime TimeOfCalibration(const CalibrationCost& cost,
                                  double operations_per_second);

}  // namespace kvasir::compress
