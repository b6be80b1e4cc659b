#include "model/shape_config.h"

#include "base/status_macros.h"
#include "model/config.h"
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

}  // namespace

std::string ConfigJsonOfShape(const ModelShape& shape,
                              std::string_view torch_dtype) {
  const FamilyNames names = NamesOf(shape.family);
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
  config["rms_norm_eps"] = shape.rms_norm_eps;
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
