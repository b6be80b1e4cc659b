// The decoder families that are served, with their names in config.json.
#pragma once

#include <array>
#include <string_view>

namespace kvasir::model {

enum class Family { kLlama, kMistral, kQwen2, kNeox, kOpt };

struct FamilyNames {
  std::string_view architecture;
  std::string_view model_type;
  // The eos_token_id of a config.json without this field; -1: none.
  int32_t default_eos = -1;
  // The num_key_value_heads without this field; 0: num_attention_heads.
  int64_t default_kv_heads = 0;
};

// Indexed by Family.
inline constexpr std::array<FamilyNames, 5> kFamilies = {{
    {"LlamaForCausalLM", "llama", 2},
    {"MistralForCausalLM", "mistral", 2, 8},
    {"Qwen2ForCausalLM", "qwen2", -1, 32},
    {"GPTNeoXForCausalLM", "gpt_neox", 2},
    {"OPTForCausalLM", "opt", 2},
}};

// True for GPT-NeoX and OPT, which have LayerNorm, an MLP without a gate,
// biases, and a KV head for each query head.
constexpr bool HasLayerNorm(Family family) {
  return family == Family::kNeox || family == Family::kOpt;
}

}  // namespace kvasir::model
