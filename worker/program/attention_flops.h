// The cost of attention over a cached token under a plan, in floating-point
// operations (a multiply-add is two). docs/inspect.md has the formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// The cost of one side (keys or values) of a layer, per cached token.
struct SideFlops {
  // For each query token: scores (keys) or the weighted sum (values).
  int64_t attention = 0;
  // For each read of the token: lifting keys, and rotating keys that were
  // stored before RoPE. A step reads a token once if it decodes, and once for
  // each tile of queries in a prompt's chunk (kernels::AttentionTiles).
  int64_t reconstruction = 0;

  friend bool operator==(const SideFlops&, const SideFlops&) = default;
};

// Counts the heads of the plan's rank.
SideFlops FlopsPerSlot(const plan::ResolvedPlan& plan, int64_t layer,
                       plan::Side side);

// The cost of a side of whole keys (after RoPE) or values, over all heads.
int64_t DenseFlopsPerSlot(const plan::AttentionShape& shape);

// Operations of the engine for each slot, by KV head of the rank: rebuilding
// keys (0 for an absorbed part), and lifting to `dims` numbers.
std::vector<double> RebuildFlops(const KeyProgram& part);
std::vector<double> LiftFlops(const PartProgram& part, int64_t dims);

}  // namespace kvasir::worker
