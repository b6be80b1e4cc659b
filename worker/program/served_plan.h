// Whether this build serves a plan: asked by the server before it reads a
// weight, by `inspect` and by the benchmarks. Of one rank with all heads they
// all hear the same; a rank of several is asked about its own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// What a rank runs. Layers that are alike share a program.
// Threads: immutable.
struct ServedPlan {
  std::shared_ptr<const plan::ResolvedPlan> resolved;
  std::vector<AttentionProgram> programs;  // by plan::ResolvedLayer::attention

  // The layer's place in `programs`.
  int64_t program_of_layer(int64_t layer) const {
    return resolved->layer(layer).attention;
  }
  const AttentionProgram& program(int64_t layer) const {
    return programs[static_cast<size_t>(program_of_layer(layer))];
  }
};

struct ServeOptions {
  // Prompts may lift latents, where that is cheaper and the kernels can.
  bool lift_prompts = true;
};

// All plans are served but for
//   - what depends on a whole sequence (CHANNEL_SEQUENCE, BASIS_SEQUENCE,
//     selection);
//   - units of eviction that lie on several ranks;
//   - ANCHORED keys;
//   - low_rank keys stored POST_ROPE, for which no tensors are defined;
//   - rope_low_rank keys stored PRE_ROPE whose groups are of unlike width;
//   - sizes beyond the kernels' limits (attention_limits.h).
// UNIMPLEMENTED names the first layer, side and part that asks for such, and
// what it asks for or the value and its limit.
absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    std::shared_ptr<const plan::ResolvedPlan> plan,
    const ServeOptions& options);

// The same of a plan that is resolved first, with plan::ResolvePlan's errors.
absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape,
    const ServeOptions& options, plan::TpShard shard = {});

}  // namespace kvasir::worker
