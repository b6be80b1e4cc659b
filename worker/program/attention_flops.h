// Counts the floating-point operations that attention under a plan needs for
// each cached token. A multiply-add counts as two. docs/inspect.md has the
// formulas.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// Floating-point operations of one side (keys or values) of a layer, per cached
// token.
struct SideFlops {
  // Done once for each query token: scores (keys) or the weighted sum (values).
  int64_t attention = 0;
  // Done once for each read of the cached token: lifting keys, and rotating
  // keys that are stored unrotated. A decode step reads a cached token once; a
  // prompt's chunk reads it once for each tile of queries
  // (kernels::AttentionTiles).
  int64_t reconstruction = 0;

  friend bool operator==(const SideFlops&, const SideFlops&) = default;
};

// Counts the operations of the rank for which the plan is resolved.
SideFlops FlopsPerSlot(const plan::ResolvedPlan& plan, int64_t layer,
                       plan::Side side);

// Operations per slot for uncompressed keys that are stored after RoPE, summed
// over all heads. Uncompressed values need as many.
int64_t DenseFlopsPerSlot(const plan::AttentionShape& shape);

// Operations per slot, for each KV head of the rank. RebuildFlops counts
// rebuilding keys; it is 0 if attention reads latents without rebuilding keys.
// LiftFlops counts lifting a latent to a vector of `dims` elements.
std::vector<double> RebuildFlops(const KeyProgram& part);
std::vector<double> LiftFlops(const PartProgram& part, int64_t dims);

}  // namespace kvasir::worker
