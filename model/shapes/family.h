// The decoder families that are served, with their names in config.json.
#pragma once

#include <array>
#include <string_view>

namespace kvasir::model {

enum class Family {
  kLlama,
  kMistral,
  kQwen2,
  kNeox,
  kOpt,
  kQwen3,
  kSmolLm3,
  kOlmo2,
  kPhi3,
  kGemma3,
  kGemma2,
  kMixtral,
  kQwen3Moe,
};

// The names of a family in config.json, and its defaults for fields that
// config.json may leave out.
struct FamilyNames {
  std::string_view architecture;
  std::string_view model_type;
  int32_t default_eos = -1;  // of eos_token_id; -1: none
  // of num_key_value_heads; 0: the same as num_attention_heads
  int64_t default_kv_heads = 0;
  // of head_dim; 0: hidden_size / num_attention_heads
  int64_t default_head_dim = 0;
  double default_theta = 10000.0;  // of rope_theta
  double default_eps = 1e-6;       // of rms_norm_eps
  bool default_tied = false;       // of tie_word_embeddings
};

// Indexed by Family. docs/models.md lists them for users.
inline constexpr std::array<FamilyNames, 13> kFamilies = {{
    {.architecture = "LlamaForCausalLM",
     .model_type = "llama",
     .default_eos = 2},
    {.architecture = "MistralForCausalLM",
     .model_type = "mistral",
     .default_eos = 2,
     .default_kv_heads = 8},
    {.architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .default_kv_heads = 32},
    {.architecture = "GPTNeoXForCausalLM",
     .model_type = "gpt_neox",
     .default_eos = 2},
    {.architecture = "OPTForCausalLM",
     .model_type = "opt",
     .default_eos = 2,
     .default_tied = true},
    {.architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .default_kv_heads = 32,
     .default_head_dim = 128},
    {.architecture = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .default_eos = 128001,
     .default_kv_heads = 4,
     .default_theta = 2e6,
     .default_tied = true},
    {.architecture = "Olmo2ForCausalLM",
     .model_type = "olmo2",
     .default_eos = 50279,
     .default_eps = 1e-5},
    {.architecture = "Phi3ForCausalLM",
     .model_type = "phi3",
     .default_eos = 32000,
     .default_eps = 1e-5},
    {.architecture = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .default_eos = 1,
     .default_kv_heads = 4,
     .default_head_dim = 256,
     .default_theta = 1e6,
     .default_tied = true},
    {.architecture = "Gemma2ForCausalLM",
     .model_type = "gemma2",
     .default_eos = 1,
     .default_kv_heads = 4,
     .default_head_dim = 256,
     .default_tied = true},
    {.architecture = "MixtralForCausalLM",
     .model_type = "mixtral",
     .default_eos = 2,
     .default_kv_heads = 8,
     .default_theta = 1e6,
     .default_eps = 1e-5},
    {.architecture = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .default_kv_heads = 4},
}};

// True for GPT-NeoX and OPT, which have LayerNorm, an MLP without a gate,
// biases, and a KV head for each query head.
constexpr bool HasLayerNorm(Family family) {
  return family == Family::kNeox || family == Family::kOpt;
}

constexpr bool HasExperts(Family family) {
  return family == Family::kMixtral || family == Family::kQwen3Moe;
}
// True for Qwen3 families, which normalize each head of queries and keys. So
// does Gemma 3, but ParseGemma handles it.
constexpr bool HasQkNorm(Family family) {
  return family == Family::kQwen3 || family == Family::kQwen3Moe;
}

}  // namespace kvasir::model
