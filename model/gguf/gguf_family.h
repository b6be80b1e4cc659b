// The architectures of GGUF files that are served.
#pragma once

#include <array>
#include <string_view>

namespace kvasir::model {

struct GgufFamily {
  std::string_view architecture;     // general.architecture of the file
  std::string_view hf_architecture;  // in config.json
  std::string_view model_type;       // in config.json
  // True if the file has the rows of queries and keys in another order than
  // Hugging Face: the two rows of a RoPE pair are neighbours, instead of half a
  // head apart.
  bool neighbour_pairs = false;
};

// Mistral's files have the architecture llama.
inline constexpr std::array<GgufFamily, 4> kGgufFamilies = {{
    {"llama", "LlamaForCausalLM", "llama", true},
    {"qwen2", "Qwen2ForCausalLM", "qwen2"},
    {"qwen3", "Qwen3ForCausalLM", "qwen3"},
    {"smollm3", "SmolLM3ForCausalLM", "smollm3", true},
}};

// nullptr if the architecture is not served.
constexpr const GgufFamily* FindGgufFamily(std::string_view architecture) {
  for (const GgufFamily& family : kGgufFamilies) {
    if (family.architecture == architecture) return &family;
  }
  return nullptr;
}

inline constexpr std::string_view kGgufEmbedding = "token_embd.weight";
inline constexpr std::string_view kGgufHead = "output.weight";
// Divisors of the RoPE frequencies, one for each pair (Llama 3.1's scaling).
inline constexpr std::string_view kGgufRopeFactors = "rope_freqs.weight";

}  // namespace kvasir::model
