#include "model/shapes/shape_config.h"

#include "base/status_macros.h"
#include "model/shapes/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using Json = nlohmann::ordered_json;

struct FamilyNames {
  const char* architecture;
  const char* model_type;
};

FamilyNames NamesOf(ShapeFamily family) {
  switch (family) {
    case ShapeFamily::kMistral:
      return {"MistralForCausalLM", "mistral"};
    case ShapeFamily::kQwen2:
      return {"Qwen2ForCausalLM", "qwen2"};
    case ShapeFamily::kNeox:
      return {"GPTNeoXForCausalLM", "gpt_neox"};
    case ShapeFamily::kOpt:
      return {"OPTForCausalLM", "opt"};
    case ShapeFamily::kLlama:
      break;
  }
  return {"LlamaForCausalLM", "llama"};
}

Json RopeScalingJson(const RopeScalingShape& scaling) {
  switch (scaling.kind) {
    case RopeScalingKind::kLlama3:
      return {
          {"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {"original_max_position_embeddings", scaling.original_max_position}};
    case RopeScalingKind::kYarn:
      return {
          {"rope_type", "yarn"},
          {"factor", scaling.factor},
          {"original_max_position_embeddings", scaling.original_max_position}};
    case RopeScalingKind::kNone:
      break;
  }
  return nullptr;
}

// GPT-NeoX's or OPT's fields, in their own words.
Json LayerNormConfig(const ModelShape& shape, const FamilyNames& names,
                     std::string_view torch_dtype) {
  Json config;
  config["architectures"] = {names.architecture};
  config["model_type"] = names.model_type;
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
  if (shape.family == ShapeFamily::kOpt) {
    config["_remove_final_layer_norm"] = false;
    config["activation_function"] = "relu";
    config["do_layer_norm_before"] = true;
    config["enable_bias"] = shape.qkv_bias;
    config["ffn_dim"] = shape.intermediate_size;
    config["layer_norm_elementwise_affine"] = true;
    config["word_embed_proj_dim"] = shape.hidden_size;
    return config;
  }
  config["attention_bias"] = shape.qkv_bias;
  config["hidden_act"] = "gelu";
  config["intermediate_size"] = shape.intermediate_size;
  config["layer_norm_eps"] = shape.norm_eps;
  config["rotary_emb_base"] = shape.rope_theta;
  config["rotary_pct"] = shape.rotary_part;
  config["use_parallel_residual"] = true;
  return config;
}

}  // namespace

std::string ConfigJsonOfShape(const ModelShape& shape,
                              std::string_view torch_dtype) {
  const FamilyNames names = NamesOf(shape.family);
  if (HasLayerNorm(shape.family)) {
    return LayerNormConfig(shape, names, torch_dtype).dump(2) + "\n";
  }
  Json config;
  config["architectures"] = {names.architecture};
  config["model_type"] = names.model_type;
  config["attention_bias"] = shape.qkv_bias;
  config["attention_dropout"] = 0.0;
  config["bos_token_id"] = shape.bos_token_id;
  config["eos_token_id"] = shape.eos_token_id;
  config["head_dim"] = shape.head_dim;
  config["hidden_act"] = "silu";
  config["hidden_size"] = shape.hidden_size;
  config["initializer_range"] = 0.02;
  config["intermediate_size"] = shape.intermediate_size;
  config["max_position_embeddings"] = shape.max_position;
  config["mlp_bias"] = false;
  config["num_attention_heads"] = shape.num_query_heads;
  config["num_hidden_layers"] = shape.num_layers;
  config["num_key_value_heads"] = shape.num_kv_heads;
  config["rms_norm_eps"] = shape.norm_eps;
  config["rope_scaling"] = RopeScalingJson(shape.rope_scaling);
  config["rope_theta"] = shape.rope_theta;
  if (shape.sliding_window > 0) {
    config["sliding_window"] = shape.sliding_window;
  }
  config["tie_word_embeddings"] = shape.tied_embedding;
  config["torch_dtype"] = torch_dtype;
  config["use_cache"] = true;
  config["vocab_size"] = shape.vocab_size;
  if (shape.family != ShapeFamily::kLlama) {
    // Llama's switches; in the other families the biases are given by the
    // architecture.
    config.erase("attention_bias");
    config.erase("mlp_bias");
  }
  return config.dump(2) + "\n";
}

absl::StatusOr<DecoderSpec> SpecOfShape(const ModelShape& shape) {
  KVASIR_RETURN_IF_ERROR(ValidateShape(shape));
  return ParseConfig(ConfigJsonOfShape(shape, "bfloat16"), shape.name);
}

}  // namespace kvasir::model
