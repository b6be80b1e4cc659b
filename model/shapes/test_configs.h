// Small configurations for tests, and ways to change and parse them.
#pragma once

#include <utility>

#include "absl/status/statusor.h"
#include "base/status_matchers.h"
#include "model/shapes/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {

inline nlohmann::json SmallLlama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 64},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"intermediate_size", 96},
          {"num_hidden_layers", 3},
          {"vocab_size", 100},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", 1e-5}};
}

inline absl::StatusOr<DecoderSpec> Parse(const nlohmann::json& config) {
  return ParseConfig(config.dump(), "config.json");
}

inline nlohmann::json With(nlohmann::json config, const char* name,
                           nlohmann::json value) {
  config[name] = std::move(value);
  return config;
}

inline nlohmann::json SmallNeox() {
  return {{"architectures", {"GPTNeoXForCausalLM"}},
          {"model_type", "gpt_neox"},
          {"hidden_size", 64},
          {"num_attention_heads", 4},
          {"intermediate_size", 96},
          {"num_hidden_layers", 2},
          {"vocab_size", 100},
          {"max_position_embeddings", 256}};
}

inline nlohmann::json SmallOpt() {
  return {{"architectures", {"OPTForCausalLM"}},
          {"model_type", "opt"},
          {"hidden_size", 64},
          {"num_attention_heads", 4},
          {"ffn_dim", 96},
          {"num_hidden_layers", 2},
          {"vocab_size", 100},
          {"max_position_embeddings", 256}};
}

inline DecoderSpec MustParse(const nlohmann::json& config) {
  absl::StatusOr<DecoderSpec> spec = Parse(config);
  KVASIR_EXPECT_OK(spec);
  return spec.ok() ? *std::move(spec) : DecoderSpec{};
}

}  // namespace kvasir::model
