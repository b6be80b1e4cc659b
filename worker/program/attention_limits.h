// Checks an attention program against the limits of the kernels, before its
// weights are read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "plan/resolved_plan.h"
#include "worker/program/attention_program.h"

namespace kvasir::worker {

// `program` was made from `attention`. UNIMPLEMENTED names layer, side, part,
// the value and its limit.
absl::Status CheckAttentionLimits(const AttentionProgram& program,
                                  int64_t layer,
                                  const plan::ResolvedAttention& attention);

// Removes prompt lifts that the kernels cannot launch. The layer is then served
// without them.
void DropPromptLiftsBeyondLimits(const plan::ResolvedAttention& attention,
                                 AttentionProgram* program);

}  // namespace kvasir::worker
