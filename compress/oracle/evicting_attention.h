// Causal attention of a layer that evicts tokens. Each query sees the tokens
// that the cache would hold at that time for its unit (KV heads that evict
// together).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "compress/oracle/attention_core.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

// How one layer evicts tokens, and how many tokens of a sequence are its
// prompt.
struct EvictionRule {
  plan::LayerEviction layer;
  // If set, slots between sinks and recent tokens are kept at random, with this
  // seed. This is a baseline that no plan can express.
  std::optional<uint64_t> random_seed;
  // Length of the prompt at the beginning of each sequence; 0: the whole
  // sequence.
  int64_t prompt_tokens = 0;
};

struct EvictionInputs {
  const EvictionRule* rule = nullptr;
  // Squared errors of stored keys and values, [B, T, Hkv]. The error of a
  // latent is counted for the first of the heads that share it. Undefined if
  // nothing is coded. The eviction rule uses the square root of the sum over a
  // unit's heads, rounded to one byte (base::EncodeError).
  at::Tensor key_error;
  at::Tensor value_error;
  // Required for rolling positions, where a token's position is the index of
  // its slot. Takes keys or queries [heads of the unit, ..., n, width] that
  // were rotated for positions `from` [n], and returns them rotated for
  // positions `to` [n].
  std::function<at::Tensor(const at::Tensor& heads,
                           const std::vector<int64_t>& unit,
                           const at::Tensor& from, const at::Tensor& to)>
      move;
  // If set, receives the positions of the tokens that a unit keeps after the
  // first `length` tokens of a sequence.
  std::function<void(int64_t batch, int64_t unit, int64_t length,
                     const std::vector<int64_t>& positions)>
      on_kept;
};

// CausalAttention with eviction. A sliding window is not allowed (CHECK). Keys
// and queries are rotated for the positions of their tokens. If the rule has
// rolling positions, they are moved to the positions of their slots (CHECK:
// `move` is set), and a query's own token takes the slot after all held slots.
// The result is the same as if tokens were computed one by one. It is computed
// in blocks, because between two evictions all queries of a unit see the same
// older slots.
at::Tensor EvictingAttention(const AttentionInputs& inputs,
                             const EvictionInputs& eviction);

}  // namespace kvasir::compress
