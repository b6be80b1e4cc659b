// Whether this build serves a plan: asked by the server before it reads a
// weight, by `inspect` and by the benchmarks. Of one rank with all heads they
// all hear the same; a rank of several is asked about its own.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

struct ServeOptions {
  RankHeads heads;  // of the rank
  // Prompts may lift latents, where that is cheaper and the kernels can.
  bool lift_prompts = true;
};

// What attention does in every layer. `plan` is valid for the model
// (cache::ValidatePlan). UNIMPLEMENTED names layer, side and part, and what
// this build does not do or the value and its limit; MakeAttentionProgram's
// errors.
absl::StatusOr<std::vector<AttentionProgram>> ServedAttention(
    const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
    const ServeOptions& options);

// All heads on one rank.
RankHeads AllHeads(const model::DecoderSpec& spec);

}  // namespace kvasir::worker
