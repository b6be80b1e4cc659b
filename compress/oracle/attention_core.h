// Causal attention over keys and values of any width, in blocks of queries.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace kvasir::compress {

// Number of queries that attention processes as one block. A block reads only
// the keys before its end, which saves nearly half of the work in long
// sequences. The scores of one block fit into the CPU's cache.
inline constexpr int64_t kQueryBlockTokens = 256;

struct AttentionInputs {
  at::Tensor query;  // [B, T, Hq, W], already multiplied by the softmax scale
  at::Tensor key;    // [B, T, Hkv, W]
  at::Tensor value;  // [B, T, Hkv, Wv]
  // For the near_key_tokens tokens nearest to the query, including its own
  // token, attention uses near_key instead of `key`; likewise near_value_tokens
  // and near_value for `value`. If the number of tokens is 0, the tensor may be
  // undefined.
  at::Tensor near_key;
  at::Tensor near_value;
  int64_t near_key_tokens = 0;
  int64_t near_value_tokens = 0;
  // The largest number of keys that a query sees, including its own key; 0: no
  // limit, so it sees its own key and all earlier keys.
  int64_t sliding_window = 0;
  double score_cap = 0;  // DecoderSpec::score_cap
};

// Returns x with cap * tanh(x / cap) for each number; x itself if the cap is 0.
at::Tensor SoftCap(const at::Tensor& x, double cap);

// Returns `seen` [B, T, ...], but with the first `sinks` tokens taken from
// `exact`. This is what queries see in a cache that keeps these tokens exact.
at::Tensor WithSinks(const at::Tensor& seen, const at::Tensor& exact,
                     int64_t sinks);

// Computes causal attention and returns [B, T, Hq, Wv]. Memory: the scores of
// one block of queries, or all scores if a backward pass needs them.
at::Tensor CausalAttention(const AttentionInputs& inputs);

}  // namespace kvasir::compress
