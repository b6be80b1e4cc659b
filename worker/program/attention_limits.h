// What the kernels of attention can do, asked of a program before its weights
// are read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// `program` was made of `attention`. UNIMPLEMENTED names layer, side, part, the
// value and its limit.
absl::Status CheckAttentionLimits(const AttentionProgram& program,
                                  int64_t layer,
                                  const plan::ResolvedAttention& attention);

// Takes back prompt lifts where a launch with them is beyond the kernels: the
// layer is served without.
void DropPromptLiftsBeyondLimits(const plan::ResolvedAttention& attention,
                                 AttentionProgram* program);

}  // namespace kvasir::worker
