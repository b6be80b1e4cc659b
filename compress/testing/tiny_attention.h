// Test support: small attention layers with random weights, and their
// calibration. Their attention is computed in float64 by the reference
// decoder's functions, uncompressed or under a plan.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "compress/calibrate/calibration.h"
#include "compress/methods/method.h"
#include "compress/tensors/attention_weights.h"
#include "compress/tensors/tensor_map.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct TinyShape {
  int64_t num_layers = 1;
  int64_t hidden_size = 40;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 8;
  int64_t rotary_dim = 8;
  model::RopePairing pairing = model::RopePairing::kHalfSplit;
  bool qkv_bias = false;
};

// Random layers, and their calibration on random inputs whose channels have
// unequal energies.
struct TinyLayers {
  model::DecoderSpec spec;
  std::vector<AttentionWeights> weights;  // [L]
  at::Tensor inputs;                      // [N, M], the same for each layer
  Calibration calibration;
};
TinyLayers MakeTinyLayers(const TinyShape& shape, uint64_t seed);

// Returns a planner's request for the layers of `tiny`.
PlanRequest TinyPlanRequest(const TinyLayers& tiny, double keep);
ApplyRequest TinyApplyRequest(const TinyLayers& tiny,
                              const kvasir::v1::KvPlan& plan, int64_t layer);

// Returns the output [N, M] of a layer's uncompressed attention over the
// inputs, float64. `key_mask` [Hkv, D], if defined, multiplies the keys.
at::Tensor AttendWhole(const TinyLayers& tiny, int64_t layer = 0,
                       const at::Tensor& key_mask = {});
// Like AttendWhole, but under the plan, with `tensors` as the layer's tensors.
// Latents are not coded.
at::Tensor AttendCompressed(const TinyLayers& tiny,
                            const kvasir::v1::KvPlan& plan,
                            const TensorMap& tensors, int64_t layer = 0);

// Returns |have - want| / |want|.
double RelativeError(const at::Tensor& have, const at::Tensor& want);

}  // namespace kvasir::compress
