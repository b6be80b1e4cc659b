#include "compress/decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace kvasir::compress {
namespace {

// Queries per attention block: a causal block reads only the keys before its
// end, which saves nearly half of the work in long sequences, and keeps the
// scores of a block in the cache.
constexpr int64_t kQueryBlockTokens = 256;

torch::Tensor Rotate(const torch::Tensor& heads, const torch::Tensor& cos,
                     const torch::Tensor& sin) {
  const std::vector<torch::Tensor> halves = heads.chunk(2, -1);
  return torch::cat(
      {halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin},
      -1);
}

}  // namespace

Decoder::Decoder(const model::ModelShape& shape, uint64_t seed,
                 torch::Device device)
    : shape_(shape), device_(device) {
  torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  auto normal = [&](int64_t rows, int64_t columns, double deviation) {
    return torch::empty({rows, columns})
        .normal_(0.0, deviation, generator)
        .to(device_)
        .requires_grad_(true);
  };
  auto ones = [&] {
    return torch::ones({shape_.hidden_size}, device_).requires_grad_(true);
  };
  const int64_t model_dim = shape_.hidden_size;
  const int64_t q_size = shape_.num_query_heads * shape_.head_dim;
  const int64_t kv_size = shape_.num_kv_heads * shape_.head_dim;
  // A third of the variance that keeps activations level, and the two
  // projections that add to the residual stream scaled down by its depth.
  auto deviation = [](int64_t fan_in) {
    return 1.0 / std::sqrt(3.0 * static_cast<double>(fan_in));
  };
  const double residual =
      1.0 / std::sqrt(2.0 * static_cast<double>(shape_.num_layers));
  constexpr double kEmbeddingDeviation = 0.02;

  embedding_ = normal(shape_.vocab_size, model_dim, kEmbeddingDeviation);
  for (int64_t i = 0; i < shape_.num_layers; ++i) {
    Layer layer;
    layer.input_norm = ones();
    layer.query = normal(q_size, model_dim, deviation(model_dim));
    layer.key = normal(kv_size, model_dim, deviation(model_dim));
    layer.value = normal(kv_size, model_dim, deviation(model_dim));
    layer.output = normal(model_dim, q_size, residual * deviation(q_size));
    layer.post_norm = ones();
    layer.gate =
        normal(shape_.intermediate_size, model_dim, deviation(model_dim));
    layer.up =
        normal(shape_.intermediate_size, model_dim, deviation(model_dim));
    layer.down = normal(model_dim, shape_.intermediate_size,
                        residual * deviation(shape_.intermediate_size));
    layers_.push_back(std::move(layer));
  }
  final_norm_ = ones();
  head_ = shape_.tied_embedding
              ? embedding_
              : normal(shape_.vocab_size, model_dim, kEmbeddingDeviation);

  // Angles in float64: the positions of a training context need no more.
  const int64_t half = shape_.head_dim / 2;
  const torch::Tensor exponent =
      torch::arange(half, torch::kFloat64) / static_cast<double>(half);
  const torch::Tensor frequency =
      torch::exp(-std::log(shape_.rope_theta) * exponent);
  const torch::Tensor angle = torch::outer(
      torch::arange(shape_.max_position, torch::kFloat64), frequency);
  cos_ = angle.cos().to(device_, torch::kFloat32);
  sin_ = angle.sin().to(device_, torch::kFloat32);
}

torch::Tensor Decoder::Normalize(const torch::Tensor& hidden,
                                 const torch::Tensor& weight) const {
  const torch::Tensor scale = torch::rsqrt(
      hidden.square().mean(-1, /*keepdim=*/true) + shape_.rms_norm_eps);
  return hidden * scale * weight;
}

Decoder::Rotation Decoder::RotationOf(int64_t length) const {
  return {cos_.slice(0, 0, length).unsqueeze(1),
          sin_.slice(0, 0, length).unsqueeze(1)};
}

torch::Tensor Decoder::Attend(const Layer& layer, const torch::Tensor& hidden,
                              int64_t batch, int64_t length) const {
  const int64_t kv_heads = shape_.num_kv_heads;
  const int64_t share = shape_.num_query_heads / kv_heads;
  const int64_t dim = shape_.head_dim;
  const Rotation rotation = RotationOf(length);
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(dim));

  torch::Tensor query = torch::linear(hidden, layer.query)
                            .view({batch, length, shape_.num_query_heads, dim});
  torch::Tensor key =
      torch::linear(hidden, layer.key).view({batch, length, kv_heads, dim});
  // [B * Hkv, share, T, D]: the query heads of a KV head are rows of one
  // product, so keys are never repeated.
  query =
      Rotate(query, rotation.cos * softmax_scale, rotation.sin * softmax_scale)
          .view({batch, length, kv_heads, share, dim})
          .permute({0, 2, 3, 1, 4})
          .reshape({batch * kv_heads, share, length, dim});
  key = Rotate(key, rotation.cos, rotation.sin)
            .permute({0, 2, 1, 3})
            .reshape({batch * kv_heads, length, dim});
  const torch::Tensor value = torch::linear(hidden, layer.value)
                                  .view({batch, length, kv_heads, dim})
                                  .permute({0, 2, 1, 3})
                                  .reshape({batch * kv_heads, length, dim});

  std::vector<torch::Tensor> blocks;
  for (int64_t begin = 0; begin < length; begin += kQueryBlockTokens) {
    const int64_t end = std::min(begin + kQueryBlockTokens, length);
    const int64_t rows = share * (end - begin);
    const torch::Tensor mask =
        torch::full({end - begin, end}, -std::numeric_limits<float>::infinity(),
                    hidden.options().requires_grad(false))
            .triu_(begin + 1);
    const torch::Tensor scores = torch::bmm(
        query.slice(2, begin, end).reshape({batch * kv_heads, rows, dim}),
        key.slice(1, 0, end).transpose(1, 2));
    const torch::Tensor weights = torch::softmax(
        scores.view({batch * kv_heads, share, end - begin, end}) + mask, -1);
    blocks.push_back(torch::bmm(weights.view({batch * kv_heads, rows, end}),
                                value.slice(1, 0, end))
                         .view({batch, kv_heads, share, end - begin, dim}));
  }
  const torch::Tensor mixed =
      (blocks.size() == 1 ? blocks[0] : torch::cat(blocks, 3))
          .permute({0, 3, 1, 2, 4})
          .reshape({batch * length, shape_.num_query_heads * dim});
  return torch::linear(mixed, layer.output);
}

torch::Tensor Decoder::Forward(const torch::Tensor& ids) const {
  const int64_t batch = ids.size(0);
  const int64_t length = ids.size(1);
  torch::Tensor hidden = torch::embedding(embedding_, ids.reshape({-1}));
  for (const Layer& layer : layers_) {
    hidden = hidden +
             Attend(layer, Normalize(hidden, layer.input_norm), batch, length);
    const torch::Tensor normal = Normalize(hidden, layer.post_norm);
    hidden =
        hidden + torch::linear(torch::silu(torch::linear(normal, layer.gate)) *
                                   torch::linear(normal, layer.up),
                               layer.down);
  }
  return torch::linear(Normalize(hidden, final_norm_), head_);
}

std::vector<NamedTensor> Decoder::parameters() const {
  std::vector<NamedTensor> all;
  all.push_back({"model.embed_tokens.weight", embedding_});
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    auto add = [&](const char* name, const torch::Tensor& tensor) {
      all.push_back({absl::StrCat(prefix, name, ".weight"), tensor});
    };
    add("input_layernorm", layer.input_norm);
    add("self_attn.q_proj", layer.query);
    add("self_attn.k_proj", layer.key);
    add("self_attn.v_proj", layer.value);
    add("self_attn.o_proj", layer.output);
    add("post_attention_layernorm", layer.post_norm);
    add("mlp.gate_proj", layer.gate);
    add("mlp.up_proj", layer.up);
    add("mlp.down_proj", layer.down);
  }
  all.push_back({"model.norm.weight", final_norm_});
  if (!shape_.tied_embedding) all.push_back({"lm_head.weight", head_});
  return all;
}

}  // namespace kvasir::compress
