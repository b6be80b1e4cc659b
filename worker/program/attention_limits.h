// Checks an attention program against the limits of the kernels, before its
// weights are read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// UNIMPLEMENTED if `program`, which was made from `attention`, exceeds a limit.
// The error names the layer and the limit, and usually side, part and value.
absl::Status CheckAttentionLimits(const AttentionProgram& program,
                                  int64_t layer,
                                  const plan::ResolvedAttention& attention);

// Removes the program's prompt lifts if the kernels cannot launch them. The
// layer is then served without prompt lifts.
void DropPromptLiftsBeyondLimits(const plan::ResolvedAttention& attention,
                                 AttentionProgram* program);

}  // namespace kvasir::worker
