// What attention over a cached token costs under a plan, in floating-point
// operations (a multiply-add is two). docs/inspect.md tells the formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// Of one layer's side, per cached token.
struct SideFlops {
  // Scores (keys) or the weighted sum (values), for each query token.
  int64_t attention = 0;
  // Lifting keys and rotating what was stored before its rotation, each time
  // they are read: once in a step that decodes, once for each tile of a prompt
  // chunk's queries (kernels::AttentionTiles).
  int64_t reconstruction = 0;

  friend bool operator==(const SideFlops&, const SideFlops&) = default;
};

// Of the heads of the plan's rank.
SideFlops FlopsPerSlot(const plan::ResolvedPlan& plan, int64_t layer,
                       plan::Side side);

// The same of a side of whole keys (after RoPE) or values, of all heads.
int64_t DenseFlopsPerSlot(const plan::AttentionShape& shape);

// What the engine does for each slot that it makes keys or values of, by KV
// head of the rank: rebuilt keys (0 for an absorbed part), and a lift to `dims`
// numbers.
std::vector<double> RebuildFlops(const KeyProgram& part);
std::vector<double> LiftFlops(const PartProgram& part, int64_t dims);

}  // namespace kvasir::worker
