// Decides whether this build can serve a plan, before any weight is read. The
// server, `inspect` and the benchmarks all call ServePlan. Each rank of a group
// checks its own part of the plan.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// A plan as one rank runs it. Layers with equal attention share a program.
//
// Threads: immutable.
struct ServedPlan {
  std::shared_ptr<const plan::ResolvedPlan> resolved;
  // Indexed by plan::ResolvedLayer::attention.
  std::vector<AttentionProgram> programs;

  // Returns the index of the layer's program in `programs`.
  int64_t program_of_layer(int64_t layer) const {
    return resolved->layer(layer).attention;
  }
  const AttentionProgram& program(int64_t layer) const {
    return programs[static_cast<size_t>(program_of_layer(layer))];
  }
  // Whether the cache of some layer has keys without the bias of the key
  // projection.
  bool leaves_key_bias_out() const;
  // Whether the cache of some layer leaves out the means of keys if they were
  // measured (LayerWeights::key_mean).
  bool can_leave_key_means_out() const;
};

struct ServeOptions {
  // Whether prompts may lift latents (prompt_lift.h). They do so only if that
  // is cheaper and the kernels can do it.
  bool lift_prompts = true;
};

// Every plan is served except one with:
// - a method that needs the whole sequence (CHANNEL_SEQUENCE, BASIS_SEQUENCE,
//   selection);
// - eviction units that span several ranks;
// - ANCHORED keys;
// - low_rank keys stored POST_ROPE, for which no tensors are defined;
// - rope_low_rank keys stored PRE_ROPE whose groups differ in width;
// - sizes beyond the kernels' limits (attention_limits.h).
// For such a plan, returns UNIMPLEMENTED. The error names the first layer that
// is not served, the side and part if there is one, and the feature or limit.
absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    std::shared_ptr<const plan::ResolvedPlan> plan,
    const ServeOptions& options);

// Like the function above, but resolves the plan first. Also returns the errors
// of plan::ResolvePlan.
absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape,
    const ServeOptions& options, plan::TpShard shard = {});

}  // namespace kvasir::worker
