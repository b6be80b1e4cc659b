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

// Ranges of CHANNEL_STATIC codes, of what each channel of a latent is on the
// calibration tokens in the compressed model: from the least number to the
// greatest, or where the plan gives bits by runs of channels, those of the
// least squared error behind the exact sinks
// (compress/planner/channel_codes.h). Keys stored after their rotation are then
// turned on to later positions as well. The layers are given in order; each
// sees what the compressed layers before it make of the tokens, codes and all.
// Owns: the hidden states of all tokens, float32.
// Threads: one; works in as many as it is told.
// Errors: as LayerForward; InvalidArgument for latents that are not finite.
class RangeCollector {
 public:
  struct Options {
    // Factors are rounded to this type first: what will be stored.
    at::ScalarType stored = at::kFloat;
    int threads = 1;
    // Where every range is fitted, of the first sequences; more of them move
    // no range.
    int64_t fitted_tokens = 16384;
  };

  // Whether a plan has such codes at all.
  static bool IsNeeded(const kvasir::v1::KvPlan& plan);

  // Sequences that are looked at: all of them, or those of fitted_tokens, at
  // least one of each domain.
  static int64_t SequencesFor(const kvasir::v1::KvPlan& plan,
                              const CalibrationSample& sample,
                              const Options& options);

  // All outlive the collector. The plan was accepted by plan::ValidatePlan.
  static absl::StatusOr<RangeCollector> Create(const model::Checkpoint& base,
                                               const kvasir::v1::KvPlan& plan,
                                               const CalibrationSample& sample,
                                               const Options& options);

  // Adds the layer's ranges to its self_attn tensors, as ApplyLayerPlan makes
  // them.
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
  int64_t last_layer_ = -1;  // that has ranges
  Rotation rotation_;
  std::vector<at::Tensor> hidden_;  // per sequence, [1, T, M]
};

}  // namespace kvasir::compress
