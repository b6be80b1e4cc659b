// Describes the decoder model that the executor runs: the content of a
// checkpoint's config.json, in one form for all supported families.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/attention_shape.h"

namespace kvasir::model {

enum class NormKind {
  kRmsNorm,    // has a weight
  kLayerNorm,  // has a weight and a bias
};
enum class MlpKind {
  kGatedSilu,  // down(silu(gate(x)) * up(x))
  kGelu,       // down(gelu(up(x))), exact
  kGeluTanh,   // down(gelu(up(x))), with the tanh approximation
  kRelu,
  kGatedGeluTanh,  // down(gelu(gate(x)) * up(x)), with the tanh approximation
};
inline bool IsGated(MlpKind kind) {
  return kind == MlpKind::kGatedSilu || kind == MlpKind::kGatedGeluTanh;
}
inline int64_t MlpMatrices(MlpKind kind) { return IsGated(kind) ? 3 : 2; }

// RMSNorm of queries and keys, after their projection and before RoPE.
enum class QkNorm {
  kNone,
  kHeads,     // of each head by itself; all heads share the weight [D]
  kAllHeads,  // of all heads together; the weights are [Hq * D] and [Hkv * D]
};

using plan::RopePairing;

// The number of unused rows at the beginning of OPT's table of
// learned positions.
inline constexpr int64_t kUnusedOptPositions = 2;

struct RopeSpec {
  int64_t rotary_dim = 0;  // even and <= head_dim; 0: no layer rotates
  RopePairing pairing = RopePairing::kHalfSplit;
  // The angle in radians by which each pair rotates per position [rotary_dim /
  // 2]. Scaling (llama3, YaRN, linear) is already applied.
  std::vector<double> frequencies;
  // LongRoPE (arXiv:2402.13753): the frequencies for sequences of more than
  // `short_positions` tokens. Empty: `frequencies` serve all lengths.
  std::vector<double> long_frequencies;
  int64_t short_positions = 0;
  // The factor by which cos and sin are multiplied (the attention factor of
  // YaRN and LongRoPE; otherwise 1).
  double attention_factor = 1.0;

  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;
};

// The mixture of experts that replaces the MLP in some layers. A router, a
// matrix [count, M], gives a token a logit for each expert. The token runs
// through the top_k experts with the largest logits. Their results are added,
// weighted with the softmax of the logits. Each expert is a gated MLP.
struct ExpertsSpec {
  int64_t count = 0;  // E; 0: the model has no experts
  int64_t top_k = 0;
  int64_t intermediate_size = 0;  // of each expert
  // True: the softmax is over the logits of the chosen experts. False: it is
  // over the logits of all experts.
  bool normalize = false;

  friend bool operator==(const ExpertsSpec&, const ExpertsSpec&) = default;
};

struct LayerSpec {
  // The most keys that a query attends to, including the key of its own token.
  // 0: all keys up to its own.
  int64_t sliding_window = 0;
  // Whether queries and keys are rotated. False for NoPE layers.
  bool rope = true;
  bool experts = false;  // whether ExpertsSpec replaces the MLP
};

struct DecoderSpec {
  std::string architecture;       // "LlamaForCausalLM"
  std::string model_type;         // "llama"
  int64_t hidden_size = 0;        // M
  int64_t num_heads = 0;          // Hq
  int64_t num_kv_heads = 0;       // Hkv, divides Hq
  int64_t head_dim = 0;           // D
  int64_t intermediate_size = 0;  // F
  int64_t vocab_size = 0;         // V
  int64_t max_position_embeddings = 0;
  NormKind norm = NormKind::kRmsNorm;
  double norm_eps = 1e-5;
  // RMSNorm adds this to its stored weights: 1 in Gemma, 0 in other families.
  double norm_weight_offset = 0;
  // norm_inputs: the inputs of attention and MLP are normalized. norm_outputs:
  // their outputs are normalized before they are added to the residual stream.
  bool norm_inputs = true;
  bool norm_outputs = false;
  MlpKind mlp = MlpKind::kGatedSilu;
  // True: attention and MLP both read the layer's input x; the result
  // is x + attention(norm1(x)) + mlp(norm2(x)). False: the MLP reads x
  // + attention(norm1(x)).
  bool parallel_residual = false;
  // True: each position has a learned vector, which is added to the token's
  // embedding. The table of these vectors is [max_position_embeddings, M].
  bool learned_positions = false;
  // Embeddings are multiplied by this before learned positions are added.
  double embedding_scale = 1;
  RopeSpec rope;
  // The RoPE of layers with a sliding window, if it differs from `rope`. Only
  // its frequencies and attention factor may differ.
  std::optional<RopeSpec> window_rope;
  // Dot products of queries and keys are multiplied by this. 0:
  // by head_dim^-0.5.
  double score_scale = 0;
  // Scores and logits x become cap * tanh(x / cap). 0: no cap.
  double score_cap = 0;
  double logit_cap = 0;
  QkNorm qk_norm = QkNorm::kNone;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool tied_head = false;
  ExpertsSpec experts;
  std::vector<LayerSpec> layers;
  std::optional<int32_t> bos_token_id;
  // The ids that end an output. The tokenizer may name more of them.
  std::vector<int32_t> eos_token_ids;
  // Where eos_token_ids come from: the path of a file, or "the default
  // of LlamaForCausalLM".
  std::string eos_source;

  const RopeSpec& rope_of(int64_t layer) const {
    const bool windowed = layers[static_cast<size_t>(layer)].sliding_window > 0;
    return windowed && window_rope.has_value() ? *window_rope : rope;
  }
  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  // mlp_features: the number of hidden features of a layer's MLP, or of all its
  // experts together. used_mlp_features: how many of them one token uses. Both
  // return the largest number over all layers.
  int64_t mlp_features() const {
    return LargestMlp(experts.count * experts.intermediate_size);
  }
  int64_t used_mlp_features() const {
    return LargestMlp(experts.top_k * experts.intermediate_size);
  }
  int64_t num_expert_layers() const {
    return std::count_if(layers.begin(), layers.end(),
                         [](const LayerSpec& layer) { return layer.experts; });
  }

 private:
  int64_t LargestMlp(int64_t of_experts) const {
    const int64_t expert_layers = num_expert_layers();
    if (expert_layers == 0) return intermediate_size;
    return expert_layers == num_layers()
               ? of_experts
               : std::max(intermediate_size, of_experts);
  }
};

// Chooses the frequencies of LongRoPE for sequences of up to `max_model_len`
// tokens. All keys in a cache must be rotated with the same frequencies, so a
// server chooses only once.
inline void ChooseRope(int64_t max_model_len, RopeSpec* rope) {
  if (rope->long_frequencies.empty()) return;
  if (max_model_len > rope->short_positions) {
    rope->frequencies = rope->long_frequencies;
  }
  rope->long_frequencies.clear();
}

}  // namespace kvasir::model
