// Decides which latents are lifted, that is, expanded to the width of one head,
// when attention of a prompt reads them. The latent that a group of heads
// shares is wider than a head. An absorbed read computes with the latent
// itself, so it costs more for every slot and query row. If many rows of a
// sequence see a slot, it is cheaper to lift its latent once for all these
// rows. Lifted and absorbed reads round differently, and compression to codes
// makes that difference larger. So the choice depends only on whether a token
// is prompt or output, not on what else runs in its step. Chunks, batches and
// preemption therefore change no bit. The prefix index is the only exception:
// bits can change if a request's prompt reuses a page that another request
// wrote as output.
#pragma once

#include <cstdint>
#include <string>

#include "worker/program/attention_program.h"

namespace kvasir::worker {

// A latent is lifted if that is cheaper for this many query rows. The number is
// fixed, so that results do not depend on the server's longest step.
inline constexpr int64_t kPromptLiftRows = 512;

// Sets `prompt_lift` of the parts that are cheaper to lift if kPromptLiftRows
// rows read a slot. A part qualifies only if attention reads it in absorbed
// form, and if it has a run-time lift of its own and no online Hadamard
// transform.
void PlanPromptLifts(AttentionProgram* program);

// Whether any part has a prompt lift. If none has, the bits of a request's
// output depend only on the request.
bool LiftsPrompts(const AttentionProgram& program);

// Says, for users, how reproducible results are. "bits": no bit depends on the
// requests in the same step or on the prefix index. "bits but for reused
// output": as "bits", except if a prompt reuses pages that another request
// wrote as output. "rounding": results depend on the requests in the same step
// (Device::rows_are_invariant is false), or prompts use another attention
// kernel.
std::string InvarianceName(bool lifts_prompts, bool rows_are_invariant = true);

}  // namespace kvasir::worker
