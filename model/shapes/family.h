// The decoder families that are served, with their names in config.json.
#pragma once

#include <array>
#include <string_view>

namespace kvasir::model {

enum class Family { kLlama, kMistral, kQwen2, kNeox, kOpt };

struct FamilyNames {
  std::string_view architecture;
  std::string_view model_type;
};

// Indexed by Family.
inline constexpr std::array<FamilyNames, 5> kFamilies = {{
    {"LlamaForCausalLM", "llama"},
    {"MistralForCausalLM", "mistral"},
    {"Qwen2ForCausalLM", "qwen2"},
    {"GPTNeoXForCausalLM", "gpt_neox"},
    {"OPTForCausalLM", "opt"},
}};

// True for GPT-NeoX and OPT, which have LayerNorm, an MLP without a gate,
// biases, and a KV head for each query head.
constexpr bool HasLayerNorm(Family family) {
  return family == Family::kNeox || family == Family::kOpt;
}

}  // namespace kvasir::model
