#include "compress/train/decoder.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "model/shapes/shape_config.h"

namespace kvasir::compress {
namespace {

// Of a layer, in the order in which they are listed.
constexpr const char* kLayerWeights[] = {
    "input_layernorm",  "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

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
  const int64_t inner_dim = shape_.intermediate_size;
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

  auto spec = model::SpecOfShape(shape_);
  KVASIR_CHECK(spec.ok());  // the shape is valid
  spec_ = *std::move(spec);
  embedding_ = normal(shape_.vocab_size, model_dim, kEmbeddingDeviation);
  for (int64_t i = 0; i < shape_.num_layers; ++i) {
    TensorMap layer;
    auto draw = [&](const char* name, int64_t rows, int64_t columns,
                    double scale) {
      layer[absl::StrCat(name, ".weight")] =
          normal(rows, columns, scale * deviation(columns));
    };
    layer["input_layernorm.weight"] = ones();
    draw("self_attn.q_proj", q_size, model_dim, 1.0);
    draw("self_attn.k_proj", kv_size, model_dim, 1.0);
    draw("self_attn.v_proj", kv_size, model_dim, 1.0);
    draw("self_attn.o_proj", model_dim, q_size, residual);
    layer["post_attention_layernorm.weight"] = ones();
    draw("mlp.gate_proj", inner_dim, model_dim, 1.0);
    draw("mlp.up_proj", inner_dim, model_dim, 1.0);
    draw("mlp.down_proj", model_dim, inner_dim, residual);
    layers_.push_back(std::move(layer));
    auto program = MakeLayerProgram(spec_, nullptr, i, device_);
    KVASIR_CHECK(program.ok());
    programs_.push_back(*std::move(program));
  }
  final_norm_ = ones();
  head_ = shape_.tied_embedding
              ? embedding_
              : normal(shape_.vocab_size, model_dim, kEmbeddingDeviation);
  rotation_ = MakeRotation(spec_.rope, shape_.max_position,
                           torch::TensorOptions().device(device_));
}

torch::Tensor Decoder::Forward(const torch::Tensor& ids) const {
  const OuterTensors outer = {.embedding = embedding_,
                              .positions = {},
                              .final_norm = final_norm_,
                              .final_norm_bias = {},
                              .head = head_};
  torch::Tensor hidden = EmbedTokens(outer, ids);
  for (size_t i = 0; i < layers_.size(); ++i) {
    auto next = LayerForward(programs_[i], layers_[i], rotation_, hidden);
    KVASIR_CHECK(next.ok());  // nothing is coded
    hidden = *std::move(next);
  }
  return FinalLogits(spec_, outer, hidden).flatten(0, 1);
}

std::vector<NamedTensor> Decoder::parameters() const {
  std::vector<NamedTensor> all;
  all.push_back({"model.embed_tokens.weight", embedding_});
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (const char* name : kLayerWeights) {
      const std::string weight = absl::StrCat(name, ".weight");
      all.push_back({absl::StrCat("model.layers.", i, ".", weight),
                     layers_[i].at(weight)});
    }
  }
  all.push_back({"model.norm.weight", final_norm_});
  if (!shape_.tied_embedding) all.push_back({"lm_head.weight", head_});
  return all;
}

}  // namespace kvasir::compress
