#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::model {

enum class ShapeFamily { kLlama, kMistral, kQwen2, kNeox, kOpt };
// GPT-NeoX and OPT: LayerNorm, a plain MLP, biases, a KV head per query head.
inline bool HasLayerNorm(ShapeFamily family) {
  return family == ShapeFamily::kNeox || family == ShapeFamily::kOpt;
}
enum class RopeScalingKind { kNone, kLlama3, kYarn };

// The `rope_scaling` entry of config.json. Fields that the kind does not use
// stay at their defaults.
struct RopeScalingShape {
  RopeScalingKind kind = RopeScalingKind::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position = 0;
};

// The sizes of a public model, without any weights: what is needed to write a
// random-weight checkpoint or to build such a model in memory.
struct ModelShape {
  std::string name;
  ShapeFamily family = ShapeFamily::kLlama;
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_position = 0;
  double rope_theta = 10000.0;
  RopeScalingShape rope_scaling = {};
  // Of a head, turned by RoPE: 1 but in GPT-NeoX, 0 in OPT.
  double rotary_part = 1.0;
  double norm_eps = 1e-5;
  bool tied_embedding = false;
  // Biases of q_proj, k_proj and v_proj (Qwen2), of all projections in families
  // of LayerNorm.
  bool qkv_bias = false;
  // 0: attention over the whole context.
  int64_t sliding_window = 0;
  int64_t bos_token_id = 1;
  int64_t eos_token_id = 2;
};

// Weights of the shape, biases and norms included.
int64_t CountParameters(const ModelShape& shape);

// InvalidArgument naming the field when the sizes do not fit one another.
absl::Status ValidateShape(const ModelShape& shape);

// NotFound listing the known names.
absl::StatusOr<ModelShape> FindShape(std::string_view name);

std::vector<std::string> KnownShapeNames();

}  // namespace kvasir::model
