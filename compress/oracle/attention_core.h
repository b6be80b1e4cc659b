// Causal attention over keys and values of any width, in blocks of queries.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace kvasir::compress {

// Queries per block of attention. A block reads only the keys before its end,
// which saves nearly half of the work in long sequences. The scores of a block
// stay in the CPU's cache.
inline constexpr int64_t kQueryBlockTokens = 256;

struct AttentionInputs {
  at::Tensor query;  // [B, T, Hq, W], the softmax scale inside
  at::Tensor key;    // [B, T, Hkv, W]
  at::Tensor value;  // [B, T, Hkv, Wv]
  // These replace keys and values of the tokens nearest to the query, including
  // its own. Defined if the window below is not 0.
  at::Tensor near_key;
  at::Tensor near_value;
  int64_t near_key_tokens = 0;
  int64_t near_value_tokens = 0;
  // The most keys that a query sees, including its own; 0: all before it.
  int64_t sliding_window = 0;
};

// `seen` [B, T, ...] with its first `sinks` tokens taken from `exact`: what all
// queries see of a cache that keeps these tokens exact.
at::Tensor WithSinks(const at::Tensor& seen, const at::Tensor& exact,
                     int64_t sinks);

// [B, T, Hq, Wv]. Memory: the scores of one block of queries (for the backward
// pass, all scores).
at::Tensor CausalAttention(const AttentionInputs& inputs);

}  // namespace kvasir::compress
