#include <string>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "model/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;

const char* ArchitectureOf(ShapeFamily family) {
  switch (family) {
    case ShapeFamily::kMistral:
      return "MistralForCausalLM";
    case ShapeFamily::kQwen2:
      return "Qwen2ForCausalLM";
    case ShapeFamily::kLlama:
      break;
  }
  return "LlamaForCausalLM";
}

json RopeScalingOf(const RopeScalingShape& shape) {
  switch (shape.kind) {
    case RopeScalingKind::kNone:
      return nullptr;
    case RopeScalingKind::kLlama3:
      return {
          {"rope_type", "llama3"},
          {"factor", shape.factor},
          {"low_freq_factor", shape.low_freq_factor},
          {"high_freq_factor", shape.high_freq_factor},
          {"original_max_position_embeddings", shape.original_max_position}};
    case RopeScalingKind::kYarn:
      return {
          {"rope_type", "yarn"},
          {"factor", shape.factor},
          {"original_max_position_embeddings", shape.original_max_position}};
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<DecoderSpec> SpecOfShape(const ModelShape& shape) {
  KVASIR_RETURN_IF_ERROR(ValidateShape(shape));
  json config = {{"architectures", json::array({ArchitectureOf(shape.family)})},
                 {"hidden_size", shape.hidden_size},
                 {"intermediate_size", shape.intermediate_size},
                 {"num_hidden_layers", shape.num_layers},
                 {"num_attention_heads", shape.num_query_heads},
                 {"num_key_value_heads", shape.num_kv_heads},
                 {"head_dim", shape.head_dim},
                 {"vocab_size", shape.vocab_size},
                 {"max_position_embeddings", shape.max_position},
                 {"rope_theta", shape.rope_theta},
                 {"rope_scaling", RopeScalingOf(shape.rope_scaling)},
                 {"rms_norm_eps", shape.rms_norm_eps},
                 {"tie_word_embeddings", shape.tied_embedding},
                 {"sliding_window", nullptr},
                 {"bos_token_id", shape.bos_token_id},
                 {"eos_token_id", shape.eos_token_id}};
  if (shape.sliding_window > 0) config["sliding_window"] = shape.sliding_window;
  KVASIR_ASSIGN_OR_RETURN(
      DecoderSpec spec,
      ParseConfig(config.dump(), absl::StrFormat("shape %s", shape.name)));
  if (spec.qkv_bias != shape.qkv_bias) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shape %s: qkv_bias: %s has it %s", shape.name,
                        spec.architecture, spec.qkv_bias ? "always" : "never"));
  }
  return spec;
}

}  // namespace kvasir::model
