// Causal attention over keys and values of any width, in blocks of queries.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace kvasir::compress {

// Queries per block of attention: a causal block reads only the keys before its
// end, which saves nearly half of the work in long sequences, and keeps the
// scores of a block in the cache.
inline constexpr int64_t kQueryBlockTokens = 256;

struct AttentionInputs {
  at::Tensor query;  // [B, T, Hq, W], the softmax scale inside
  at::Tensor key;    // [B, T, Hkv, W]
  at::Tensor value;  // [B, T, Hkv, Wv]
  // Keys and values that the nearest tokens are seen with instead (the query's
  // own included): defined where the window is not 0.
  at::Tensor near_key;
  at::Tensor near_value;
  int64_t near_key_tokens = 0;
  int64_t near_value_tokens = 0;
  // Keys that a query sees at most, itself included; 0: all before it.
  int64_t sliding_window = 0;
};

// `seen` [B, T, ...], its first `sinks` tokens as they are in `exact`: what all
// queries see of a cache that keeps them so.
at::Tensor WithSinks(const at::Tensor& seen, const at::Tensor& exact,
                     int64_t sinks);

// [B, T, Hq, Wv]. Memory: scores of one block of queries (and all of them for
// the backward pass).
at::Tensor CausalAttention(const AttentionInputs& inputs);

}  // namespace kvasir::compress
