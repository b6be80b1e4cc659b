// Causal attention of a layer that evicts: what each token sees is what a cache
// would hold of its unit when it comes.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "compress/oracle/attention_core.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

// What evicts in one layer, and how a sequence is taken.
struct EvictionRule {
  plan::LayerEviction layer;
  // Others than sinks and recent ones stay by lot: a baseline that no plan has.
  std::optional<uint64_t> lot;
  // First tokens of a sequence that are its prompt; 0: all.
  int64_t prompt_tokens = 0;
};

struct EvictionInputs {
  const EvictionRule* rule = nullptr;
  // Squared errors of what is stored [B, T, Hkv], a latent's at the first of
  // its heads; undefined: nothing is coded. Slots are told apart by what is
  // left of a unit's error in one byte (base::EncodeError).
  at::Tensor key_error;
  at::Tensor value_error;
  // For rolling positions: `heads` [of a unit, ..., n, width] of keys or
  // queries that stand at the positions `from` [n], as they are at `to`.
  std::function<at::Tensor(const at::Tensor& heads,
                           const std::vector<int64_t>& unit,
                           const at::Tensor& from, const at::Tensor& to)>
      move;
  // Sees, if set, the positions that stay of a unit when `length` tokens have
  // been seen.
  std::function<void(int64_t batch, int64_t unit, int64_t length,
                     const std::vector<int64_t>& positions)>
      on_kept;
};

// As CausalAttention, without a sliding window (CHECK). Keys and queries come
// at the positions of their tokens; of a rule with rolling positions they are
// moved to those of their slots (CHECK: there is `move`), a query's own being
// the slots behind all that are held. Token by token in what is seen and
// counted, block by block in how it is computed: between two points of eviction
// all queries of a unit see the same older slots.
at::Tensor EvictingAttention(const AttentionInputs& inputs,
                             const EvictionInputs& eviction);

}  // namespace kvasir::compress
