#include "model/shapes/shape_config.h"

#include "model/shapes/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using Json = nlohmann::ordered_json;

Json RopeScalingJson(const ModelShape& shape) {
  if (shape.llama3_rope_factor == 0.0) return nullptr;
  return {{"rope_type", "llama3"},
          {"factor", shape.llama3_rope_factor},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

// Adds the fields of GPT-NeoX or OPT under the names that these families use.
void AddLayerNormFields(const ModelShape& shape, std::string_view torch_dtype,
                        Json& config) {
  config["bos_token_id"] = shape.bos_token_id;
  config["eos_token_id"] = shape.eos_token_id;
  config["hidden_size"] = shape.hidden_size;
  config["max_position_embeddings"] = shape.max_position;
  config["num_attention_heads"] = shape.num_query_heads;
  config["num_hidden_layers"] = shape.num_layers;
  config["tie_word_embeddings"] = shape.tied_embedding;
  config["torch_dtype"] = torch_dtype;
  config["use_cache"] = true;
  config["vocab_size"] = shape.vocab_size;
  // These families have a KV head for each query head. Another number of KV
  // heads is written anyway, so that the parser refuses it.
  if (shape.num_kv_heads != shape.num_query_heads) {
    config["num_key_value_heads"] = shape.num_kv_heads;
  }
  if (shape.num_query_heads * shape.head_dim != shape.hidden_size) {
    config["head_dim"] = shape.head_dim;
  }
  if (shape.family == Family::kOpt) {
    config["_remove_final_layer_norm"] = false;
    config["activation_function"] = "relu";
    config["do_layer_norm_before"] = true;
    config["enable_bias"] = shape.qkv_bias;
    config["ffn_dim"] = shape.intermediate_size;
    config["layer_norm_elementwise_affine"] = true;
    config["word_embed_proj_dim"] = shape.hidden_size;
    return;
  }
  config["attention_bias"] = shape.qkv_bias;
  config["hidden_act"] = "gelu";
  config["intermediate_size"] = shape.intermediate_size;
  config["layer_norm_eps"] = shape.norm_eps;
  config["rotary_emb_base"] = shape.rope_theta;
  config["rotary_pct"] = shape.rotary_part;
  config["use_parallel_residual"] = true;
}

void AddExpertFields(const ModelShape& shape, Json& config) {
  config["num_experts_per_tok"] = shape.experts_per_token;
  if (shape.family == Family::kMixtral) {
    config["num_local_experts"] = shape.num_experts;
    return;
  }
  config["decoder_sparse_step"] = 1;
  config["moe_intermediate_size"] = shape.intermediate_size;
  config["norm_topk_prob"] = true;
  config["num_experts"] = shape.num_experts;
}

}  // namespace

std::string ConfigJsonOfShape(const ModelShape& shape,
                              std::string_view torch_dtype) {
  const FamilyNames& names = kFamilies[static_cast<size_t>(shape.family)];
  Json config;
  config["architectures"] = {names.architecture};
  config["model_type"] = names.model_type;
  if (HasLayerNorm(shape.family)) {
    AddLayerNormFields(shape, torch_dtype, config);
    return config.dump(2) + "\n";
  }
  // Fields for biases are written only for Llama. Shapes of other families have
  // the biases that their family has by default.
  const bool is_llama = shape.family == Family::kLlama;
  if (is_llama) config["attention_bias"] = shape.qkv_bias;
  config["attention_dropout"] = 0.0;
  config["bos_token_id"] = shape.bos_token_id;
  config["eos_token_id"] = shape.eos_token_id;
  config["head_dim"] = shape.head_dim;
  config["hidden_act"] = "silu";
  config["hidden_size"] = shape.hidden_size;
  config["initializer_range"] = 0.02;
  config["intermediate_size"] = shape.intermediate_size;
  config["max_position_embeddings"] = shape.max_position;
  if (is_llama) config["mlp_bias"] = false;
  config["num_attention_heads"] = shape.num_query_heads;
  if (HasExperts(shape.family)) AddExpertFields(shape, config);
  config["num_hidden_layers"] = shape.num_layers;
  config["num_key_value_heads"] = shape.num_kv_heads;
  config["rms_norm_eps"] = shape.norm_eps;
  config["rope_scaling"] = RopeScalingJson(shape);
  config["rope_theta"] = shape.rope_theta;
  if (shape.sliding_window > 0) {
    config["sliding_window"] = shape.sliding_window;
  }
  config["tie_word_embeddings"] = shape.tied_embedding;
  config["torch_dtype"] = torch_dtype;
  config["use_cache"] = true;
  config["vocab_size"] = shape.vocab_size;
  return config.dump(2) + "\n";
}

absl::StatusOr<DecoderSpec> SpecOfShape(const ModelShape& shape) {
  return ParseConfig(ConfigJsonOfShape(shape, "bfloat16"), shape.name);
}

}  // namespace kvasir::model
