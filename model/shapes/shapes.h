#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/shapes/family.h"

namespace kvasir::model {

// The sizes of a public model, without its weights. They are enough to write a
// checkpoint with random weights, or to build such a model in memory.
struct ModelShape {
  std::string name;
  Family family = Family::kLlama;
  int64_t num_layers = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // of each expert, if there are experts
  // 0: the model has no experts. Otherwise all layers have them.
  int64_t num_experts = 0;
  int64_t experts_per_token = 0;
  int64_t num_query_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_position = 0;
  double rope_theta = 10000.0;
  // The factor by which Llama 3.1's RoPE scaling stretches long wavelengths. 0:
  // no scaling.
  double llama3_rope_factor = 0.0;
  // The fraction of each head's dimensions that RoPE rotates: below 1 in
  // GPT-NeoX, 0 in OPT, otherwise 1.
  double rotary_part = 1.0;
  double norm_eps = 1e-5;
  bool tied_embedding = false;
  // Whether q_proj, k_proj and v_proj have biases (Qwen2). In families with
  // LayerNorm: whether all projections have them.
  bool qkv_bias = false;
  // 0: attention over the whole context.
  int64_t sliding_window = 0;
  int64_t bos_token_id = 1;
  int64_t eos_token_id = 2;
};

// NOT_FOUND for an unknown name; the error lists the known names.
absl::StatusOr<ModelShape> FindShape(std::string_view name);

std::vector<std::string> KnownShapeNames();

}  // namespace kvasir::model
