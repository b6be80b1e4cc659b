// The architectures of GGUF files that are served.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace kvasir::model {

// Says which layers have a mixture of experts.
enum class GgufExperts {
  kNone,
  kMixtral,      // all layers, if the file has experts; the model is Mixtral
  kWithARouter,  // the layers for which the file has a tensor ffn_gate_inp
};

// Says to which layers the key attention.sliding_window applies.
enum class GgufWindows {
  kUnknown,  // the file does not say, so a window is refused
  kAll,
  // those of attention.sliding_window_pattern, or else as in Hugging Face
  kSome,
};

// The matrices whose rows the file stores in one fused tensor.
enum class GgufFused {
  kNone,
  kQkv,         // attn_qkv: all queries, then all keys, then all values
  kQkvAndGate,  // also ffn_up: the rows of gate_proj, then of up_proj
};

struct GgufFamily {
  std::string_view architecture;     // general.architecture of the file
  std::string_view hf_architecture;  // in config.json
  std::string_view model_type;       // in config.json
  // True if the file has the rows of queries and keys in another order than
  // Hugging Face: the two rows of a RoPE pair are neighbours, instead of half a
  // head apart.
  bool neighbour_pairs = false;
  GgufExperts experts = GgufExperts::kNone;
  GgufWindows windows = GgufWindows::kUnknown;
  GgufFused fused = GgufFused::kNone;
  // True for Gemma: the norm weights in the file already include the 1 that the
  // model adds to them.
  bool norms_have_one = false;
  // Gemma models with this number of layers divide scores by the root of
  // hidden_size / heads; all other sizes divide by the root of head_dim. The
  // file has no key for this.
  int64_t wide_scores_layers = 0;
  // The value of rope.freq_base_swa if the file does not have it. 0: layers
  // with a window have the same RoPE as the others.
  double window_base = 0;
  bool layer_norm = false;    // instead of RMSNorm
  bool part_rotates = false;  // RoPE may rotate only a part of each head
  bool long_rope = false;     // the file may have LongRoPE's factors
};

// Files with the architecture llama may also contain Mistral or Mixtral models.
inline constexpr std::array<GgufFamily, 10> kGgufFamilies = {{
    {.architecture = "llama",
     .hf_architecture = "LlamaForCausalLM",
     .model_type = "llama",
     .neighbour_pairs = true,
     .experts = GgufExperts::kMixtral,
     .windows = GgufWindows::kAll},
    {.architecture = "qwen2",
     .hf_architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2"},
    {.architecture = "qwen3",
     .hf_architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3"},
    {.architecture = "qwen3moe",
     .hf_architecture = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .experts = GgufExperts::kWithARouter},
    {.architecture = "smollm3",
     .hf_architecture = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .neighbour_pairs = true},
    {.architecture = "olmo2",
     .hf_architecture = "Olmo2ForCausalLM",
     .model_type = "olmo2"},
    {.architecture = "phi3",
     .hf_architecture = "Phi3ForCausalLM",
     .model_type = "phi3",
     .windows = GgufWindows::kAll,
     .fused = GgufFused::kQkvAndGate,
     .part_rotates = true,
     .long_rope = true},
    {.architecture = "gemma3",
     .hf_architecture = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .windows = GgufWindows::kSome,
     .norms_have_one = true,
     .wide_scores_layers = 62,
     .window_base = 10000},
    {.architecture = "gemma2",
     .hf_architecture = "Gemma2ForCausalLM",
     .model_type = "gemma2",
     .windows = GgufWindows::kSome,
     .norms_have_one = true,
     .wide_scores_layers = 46},
    {.architecture = "gptneox",
     .hf_architecture = "GPTNeoXForCausalLM",
     .model_type = "gpt_neox",
     .fused = GgufFused::kQkv,
     .layer_norm = true,
     .part_rotates = true},
}};

// Returns nullptr if the architecture is not supported.
constexpr const GgufFamily* FindGgufFamily(std::string_view architecture) {
  for (const GgufFamily& family : kGgufFamilies) {
    if (family.architecture == architecture) return &family;
  }
  return nullptr;
}

inline constexpr std::string_view kGgufEmbedding = "token_embd.weight";
inline constexpr std::string_view kGgufHead = "output.weight";
// A tensor with divisors of the RoPE frequencies, one for each pair (Llama
// 3.1's scaling).
inline constexpr std::string_view kGgufRopeFactors = "rope_freqs.weight";
// Tensors with LongRoPE's divisors of the frequencies: one for sequences longer
// than the original context, one for shorter sequences.
inline constexpr std::string_view kGgufLongFactors = "rope_factors_long.weight";
inline constexpr std::string_view kGgufShortFactors =
    "rope_factors_short.weight";

}  // namespace kvasir::model
