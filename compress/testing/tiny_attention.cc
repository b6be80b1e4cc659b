#include "compress/testing/tiny_attention.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "compress/oracle/layer_forward.h"

namespace kvasir::compress {
namespace {

constexpr int64_t kTokens = 150;

at::Tensor Project(const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& bias) {
  const at::Tensor y = x.mm(weight.to(at::kDouble).t());
  return bias.defined() ? y + bias.to(at::kDouble) : y;
}

AttentionWeights RandomWeights(const TinyShape& shape) {
  const int64_t queries = shape.num_heads * shape.head_dim;
  const int64_t keys = shape.num_kv_heads * shape.head_dim;
  const auto matrix = [](int64_t rows, int64_t columns) {
    return at::randn({rows, columns}, at::kFloat) /
           std::sqrt(static_cast<double>(columns));
  };
  AttentionWeights weights;
  weights.query = matrix(queries, shape.hidden_size);
  weights.key = matrix(keys, shape.hidden_size);
  weights.value = matrix(keys, shape.hidden_size);
  weights.output = matrix(shape.hidden_size, queries);
  if (shape.qkv_bias) {
    weights.query_bias = at::randn({queries}, at::kFloat);
    weights.key_bias = at::randn({keys}, at::kFloat);
    weights.value_bias = at::randn({keys}, at::kFloat);
  }
  return weights;
}

LayerCalibration Calibrate(const model::DecoderSpec& spec,
                           const AttentionWeights& weights,
                           const at::Tensor& inputs) {
  LayerCalibration layer;
  layer.input_gram = inputs.t().mm(inputs);
  layer.input_sum = inputs.sum(0);
  layer.query_energy = Project(inputs, weights.query, weights.query_bias)
                           .square()
                           .mean(0)
                           .view({spec.num_heads, spec.head_dim});
  const int64_t rows = weights.key.size(0);
  layer.key_fisher = at::rand({rows}, at::kDouble);
  layer.value_fisher = at::rand({rows}, at::kDouble) * 3;
  layer.key_fisher_root = layer.key_fisher.sqrt();
  layer.value_fisher_root = layer.value_fisher.sqrt();
  const Rotation rotation = MakeRotation(spec.rope, kTokens, at::kDouble);
  const at::Tensor keys =
      Rotate(Project(inputs, weights.key, weights.key_bias)
                 .view({1, kTokens, spec.num_kv_heads, spec.head_dim}),
             {.cos = rotation.cos.unsqueeze(1),
              .sin = rotation.sin.unsqueeze(1),
              .pairing = spec.rope.pairing})
          .view({kTokens, rows});
  layer.rotated_key_gram = keys.t().mm(keys);
  layer.rotated_key_sum = keys.sum(0);
  return layer;
}

}  // namespace

TinyLayers MakeTinyLayers(const TinyShape& shape, uint64_t seed) {
  // The tensors are so small that more threads are slower.
  at::set_num_threads(1);
  at::manual_seed(seed);
  TinyLayers tiny;
  model::DecoderSpec& spec = tiny.spec;
  spec.hidden_size = shape.hidden_size;
  spec.num_heads = shape.num_heads;
  spec.num_kv_heads = shape.num_kv_heads;
  spec.head_dim = shape.head_dim;
  spec.intermediate_size = shape.hidden_size;
  spec.vocab_size = 10;
  spec.qkv_bias = shape.qkv_bias;
  spec.rope.rotary_dim = shape.rotary_dim;
  spec.rope.pairing = shape.pairing;
  for (int64_t pair = 0; pair < shape.rotary_dim / 2; ++pair) {
    spec.rope.frequencies.push_back(
        std::pow(50.0, -2.0 * static_cast<double>(pair) /
                           static_cast<double>(shape.rotary_dim)));
  }
  spec.layers.resize(static_cast<size_t>(shape.num_layers));
  const at::Tensor scales = at::rand({shape.hidden_size}, at::kDouble) + 0.1;
  tiny.inputs =
      (at::randn({kTokens, shape.hidden_size}, at::kDouble) + 0.4) * scales;
  tiny.calibration.id = "tiny";
  tiny.calibration.num_tokens = kTokens;
  tiny.calibration.num_sequences = 1;
  for (int64_t l = 0; l < shape.num_layers; ++l) {
    tiny.weights.push_back(RandomWeights(shape));
    tiny.calibration.layers.push_back(
        Calibrate(spec, tiny.weights.back(), tiny.inputs));
  }
  const int64_t width = spec.num_kv_heads * spec.head_dim;
  for (LayerCalibration& layer : tiny.calibration.layers) {
    for (at::Tensor* information :
         {&layer.key_information, &layer.value_information}) {
      const at::Tensor gradients = at::randn({2 * width, width}, at::kDouble) *
                                   (at::rand({width}, at::kDouble) + 0.1);
      *information = gradients.t().mm(gradients);
    }
  }
  return tiny;
}

PlanRequest TinyPlanRequest(const TinyLayers& tiny, double keep) {
  PlanRequest request;
  request.spec = tiny.spec;
  request.calibration = &tiny.calibration;
  request.weights = [&tiny](int64_t layer) -> absl::StatusOr<AttentionWeights> {
    return tiny.weights[static_cast<size_t>(layer)];
  };
  request.keep = keep;
  request.rank_multiple = 1;
  request.key_codec.set_dtype(kvasir::v1::F32);
  request.value_codec.set_dtype(kvasir::v1::F32);
  return request;
}

ApplyRequest TinyApplyRequest(const TinyLayers& tiny,
                              const kvasir::v1::KvPlan& plan, int64_t layer) {
  ApplyRequest request;
  request.spec = &tiny.spec;
  request.plan = &plan.layers(static_cast<int>(layer));
  request.layer = layer;
  request.weights = tiny.weights[static_cast<size_t>(layer)];
  request.calibration = &tiny.calibration.layers[static_cast<size_t>(layer)];
  request.num_tokens = tiny.calibration.num_tokens;
  request.commuting = CommutingWeightsOf(plan);
  return request;
}

namespace {

// Computes the attention of one layer; `plan` is null for the uncompressed
// layer.
at::Tensor Attend(const TinyLayers& tiny, const kvasir::v1::LayerPlan* plan,
                  const TensorMap& tensors, int64_t layer) {
  const auto program = MakeLayerProgram(tiny.spec, plan, layer);
  KVASIR_CHECK(program.ok());
  TensorMap wide;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) wide[name] = tensor.to(at::kDouble);
  }
  const auto output = AttentionForward(
      *program, wide, MakeRotation(tiny.spec.rope, kTokens, at::kDouble),
      tiny.inputs.unsqueeze(0), {.code_latents = false});
  KVASIR_CHECK(output.ok());
  return output->squeeze(0);
}

}  // namespace

at::Tensor AttendWhole(const TinyLayers& tiny, int64_t layer,
                       const at::Tensor& key_mask) {
  AttentionWeights weights = tiny.weights[static_cast<size_t>(layer)];
  if (key_mask.defined()) {
    const at::Tensor mask = key_mask.flatten();
    weights.key = weights.key * mask.unsqueeze(1);
    if (weights.key_bias.defined()) weights.key_bias = weights.key_bias * mask;
  }
  return Attend(tiny, nullptr,
                {{"self_attn.q_proj.weight", weights.query},
                 {"self_attn.q_proj.bias", weights.query_bias},
                 {"self_attn.k_proj.weight", weights.key},
                 {"self_attn.k_proj.bias", weights.key_bias},
                 {"self_attn.v_proj.weight", weights.value},
                 {"self_attn.v_proj.bias", weights.value_bias},
                 {"self_attn.o_proj.weight", weights.output}},
                layer);
}

at::Tensor AttendCompressed(const TinyLayers& tiny,
                            const kvasir::v1::KvPlan& plan,
                            const TensorMap& tensors, int64_t layer) {
  return Attend(tiny, &plan.layers(static_cast<int>(layer)), tensors, layer);
}

double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).norm() / want.norm()).item<double>();
}

}  // namespace kvasir::compress
