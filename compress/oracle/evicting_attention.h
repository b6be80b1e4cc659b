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
  // its heads; undefined: nothing is coded.
  at::Tensor key_error;
  at::Tensor value_error;
  // Sees, if set, the positions that stay of a unit when `length` tokens have
  // been seen.
  std::function<void(int64_t batch, int64_t unit, int64_t length,
                     const std::vector<int64_t>& positions)>
      on_kept;
};

// As CausalAttention, without a sliding window (CHECK); positions are those of
// the tokens. Token by token in what is seen and counted, block by block in how
// it is computed: between two points of eviction all queries of a unit see the
// same older slots.
at::Tensor EvictingAttention(const AttentionInputs& inputs,
                             const EvictionInputs& eviction);

}  // namespace kvasir::compress
