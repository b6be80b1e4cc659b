// Causal attention of a layer that evicts tokens. Each token sees what the
// cache of its unit would hold at that time.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "compress/oracle/attention_core.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {

// The eviction of one layer, and which tokens of a sequence are its prompt.
struct EvictionRule {
  plan::LayerEviction layer;
  // Seed. If set, the slots between sinks and recent tokens are kept at random:
  // a baseline that no plan has.
  std::optional<uint64_t> random_seed;
  // Number of first tokens of a sequence that are its prompt; 0: all.
  int64_t prompt_tokens = 0;
};

struct EvictionInputs {
  const EvictionRule* rule = nullptr;
  // Squared errors of what is stored, [B, T, Hkv]. The error of a latent counts
  // for the first of its heads. Undefined if nothing is coded. The rule sees
  // the root of a unit's sum, rounded to one byte (base::EncodeError).
  at::Tensor key_error;
  at::Tensor value_error;
  // For rolling positions: returns `heads` [of a unit, ..., n, width] of keys
  // or queries, which stand at positions `from` [n], as they are at positions
  // `to`.
  std::function<at::Tensor(const at::Tensor& heads,
                           const std::vector<int64_t>& unit,
                           const at::Tensor& from, const at::Tensor& to)>
      move;
  // If set, receives the positions that a unit keeps after `length` tokens.
  std::function<void(int64_t batch, int64_t unit, int64_t length,
                     const std::vector<int64_t>& positions)>
      on_kept;
};

// As CausalAttention, but without a sliding window (CHECK). Keys and queries
// come at the positions of their tokens. If the rule has rolling positions,
// they are moved to those of their slots (CHECK: there is `move`), and a
// query's own token takes the slot after all that are held. The result is that
// of token-by-token computation. It is computed in blocks, because between two
// points of eviction all queries of a unit see the same older slots.
at::Tensor EvictingAttention(const AttentionInputs& inputs,
                             const EvictionInputs& eviction);

}  // namespace kvasir::compress
