// What the kernels of attention can do, asked of a program before its weights
// are read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// `program` was made of `plan`. UNIMPLEMENTED names layer, side, part, the
// value and its limit.
absl::Status CheckAttentionLimits(const AttentionProgram& program,
                                  int64_t layer,
                                  const kvasir::v1::LayerPlan& plan);

// Takes back prompt lifts where a launch with them is beyond the kernels: the
// layer is served without.
void DropPromptLiftsBeyondLimits(const kvasir::v1::LayerPlan& plan,
                                 AttentionProgram* program);

}  // namespace kvasir::worker
