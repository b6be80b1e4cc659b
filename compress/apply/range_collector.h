#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/oracle/layer_forward.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// Finds the ranges of CHANNEL_STATIC codes on the calibration tokens. A range
// reaches from a channel's minimum to its maximum in the compressed model. If
// the plan gives bits by runs of channels, the range is instead fitted for the
// least squared error (compress/planner/channel_codes.h). The fit uses the
// tokens after the exact sinks. For this fit, rope_low_rank keys that are
// stored after their rotation are rotated further, so that the rows cover
// positions up to kRangePositions. Collect is called for one layer after the
// other. The input of a layer is the output of the compressed layers before it,
// including the error of their codes.
// Owns: the hidden states of all tokens, float32.
// Threads: one caller; the work uses as many threads as the options say.
// Errors: those of LayerForward; InvalidArgument for latents that are not
//   finite.
class RangeCollector {
 public:
  struct Options {
    // The type in which the factors will be stored. They are rounded to it
    // before ranges are found.
    at::ScalarType stored = at::kFloat;
    int threads = 1;
    // If all ranges are fitted for the least squared error, only the first
    // sequences are used, up to this number of tokens. More tokens hardly
    // change the ranges.
    int64_t fitted_tokens = 16384;
  };

  // Returns whether a plan has CHANNEL_STATIC codes.
  static bool IsNeeded(const kvasir::v1::KvPlan& plan);

  // The number of the sample's sequences that are used: all of them, unless all
  // ranges are fitted for the least squared error. Then it is as many as give
  // `fitted_tokens`, with at least one sequence of each domain (kind of text).
  static int64_t SequencesFor(const kvasir::v1::KvPlan& plan,
                              const CalibrationSample& sample,
                              const Options& options);

  // All arguments must outlive the collector. The plan must have been accepted
  // by plan::ValidatePlan.
  static absl::StatusOr<RangeCollector> Create(const model::Checkpoint& base,
                                               const kvasir::v1::KvPlan& plan,
                                               const CalibrationSample& sample,
                                               const Options& options);

  // Finds the layer's ranges and adds them to `attention`, which holds the
  // self_attn tensors that ApplyLayerPlan returned.
  absl::Status Collect(int64_t layer, TensorMap& attention);

 private:
  RangeCollector(const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
                 const Options& options)
      : base_(base), plan_(plan), options_(options) {}

  absl::Status FindRanges(const LayerProgram& program, TensorMap& tensors,
                          TensorMap& attention) const;

  const model::Checkpoint& base_;
  const kvasir::v1::KvPlan& plan_;
  const Options options_;
  int64_t last_layer_ = -1;  // the last layer that has CHANNEL_STATIC codes
  Rotation rotation_;
  std::vector<at::Tensor> hidden_;  // one tensor [1, T, M] per sequence
};

}  // namespace kvasir::compress
