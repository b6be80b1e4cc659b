// One attention layer in plain float64, for tests: the uncompressed layer, and
// the layer that a plan and its tensors make of it by the rules of
// docs/artifact.md, for numbers that are stored uncoded.
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

// Random layers, and their calibration over random inputs of unequal energy.
struct TinyLayers {
  model::DecoderSpec spec;
  std::vector<AttentionWeights> weights;  // [L]
  at::Tensor inputs;                      // [N, M], the same for each layer
  Calibration calibration;
};
TinyLayers MakeTinyLayers(const TinyShape& shape, uint64_t seed);

// A request that plans for `tiny`.
PlanRequest TinyPlanRequest(const TinyLayers& tiny, double keep);
ApplyRequest TinyApplyRequest(const TinyLayers& tiny,
                              const kvasir::v1::KvPlan& plan, int64_t layer);

struct TinyAttention {
  at::Tensor scores;  // [Hq, T, T], all query and key positions
  at::Tensor output;  // [T, M], causal
};

// `key_mask` [Hkv, D] multiplies the keys, if defined.
TinyAttention AttendWhole(const model::DecoderSpec& spec,
                          const AttentionWeights& weights,
                          const at::Tensor& inputs,
                          const at::Tensor& key_mask = {});
TinyAttention AttendCompressed(const model::DecoderSpec& spec,
                               const kvasir::v1::LayerPlan& plan,
                               const TensorMap& tensors,
                               const at::Tensor& inputs);

// |have - want| / |want|.
double RelativeError(const at::Tensor& have, const at::Tensor& want);
// The greater of the errors of scores (before the softmax) and of outputs.
double RelativeError(const TinyAttention& have, const TinyAttention& want);

}  // namespace kvasir::compress
