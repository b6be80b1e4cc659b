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

// Finds the ranges of CHANNEL_STATIC codes: the values that each channel of a
// latent takes in the compressed model on the calibration tokens. A range
// reaches from the least to the greatest value. If the plan gives bits by runs
// of channels, it is the range of least squared error over the tokens after the
// exact sinks (compress/planner/channel_codes.h); keys stored after their
// rotation are then also rotated to later positions. Layers are given in order:
// the input of a layer is the output of the compressed layers before it,
// including the error of their codes.
// Owns: the hidden states of all tokens, float32.
// Threads: one caller; the work uses as many threads as the options say.
// Errors: as LayerForward; InvalidArgument for latents that are not finite.
class RangeCollector {
 public:
  struct Options {
    // Factors are first rounded to this type, in which they will be stored.
    at::ScalarType stored = at::kFloat;
    int threads = 1;
    // If every range is fitted for least error, only the first sequences with
    // this many tokens are used. More tokens do not change the ranges.
    int64_t fitted_tokens = 16384;
  };

  // Returns whether a plan has CHANNEL_STATIC codes.
  static bool IsNeeded(const kvasir::v1::KvPlan& plan);

  // Number of sequences that are used: all of them, or those of fitted_tokens
  // and at least one of each domain.
  static int64_t SequencesFor(const kvasir::v1::KvPlan& plan,
                              const CalibrationSample& sample,
                              const Options& options);

  // All arguments outlive the collector. The plan was accepted by
  // plan::ValidatePlan.
  static absl::StatusOr<RangeCollector> Create(const model::Checkpoint& base,
                                               const kvasir::v1::KvPlan& plan,
                                               const CalibrationSample& sample,
                                               const Options& options);

  // Adds the layer's ranges to its self_attn tensors, which ApplyLayerPlan
  // made.
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
  int64_t last_layer_ = -1;  // last layer with such ranges
  Rotation rotation_;
  std::vector<at::Tensor> hidden_;  // per sequence, [1, T, M]
};

}  // namespace kvasir::compress
