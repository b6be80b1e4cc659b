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
  at::Tensor query;  // [B, T, Hq, W], already multiplied by the softmax scale
  at::Tensor key;    // [B, T, Hkv, W]
  at::Tensor value;  // [B, T, Hkv, Wv]
  // For the near_key_tokens (near_value_tokens) nearest to the query, including
  // its own token, near_key (near_value) replaces `key` (`value`). Defined if
  // the number of tokens is not 0.
  at::Tensor near_key;
  at::Tensor near_value;
  int64_t near_key_tokens = 0;
  int64_t near_value_tokens = 0;
  // The largest number of keys that a query sees, including its own; 0: its own
  // and all before it.
  int64_t sliding_window = 0;
};

// Returns `seen` [B, T, ...] with its first `sinks` tokens replaced by those of
// `exact`: what queries see in a cache that keeps these tokens exact.
at::Tensor WithSinks(const at::Tensor& seen, const at::Tensor& exact,
                     int64_t sinks);

// Returns [B, T, Hq, Wv]. Memory: the scores of one block of queries, or all
// scores if a backward pass needs them.
at::Tensor CausalAttention(const AttentionInputs& inputs);

}  // namespace kvasir::compress
