// Which latents prompts lift while they read them. A group's latent is wider
// than a head: absorbed, every row pays for its width at every slot. Where many
// rows of a sequence see a slot, lifting it once for all of them is cheaper.
//
// Lifted and absorbed give the same number but for rounding, which codes make
// larger. So what is lifted depends on what a token is, prompt or output, and
// never on what shares its step: chunks, batches and preemption change no bit.
// One thing does: a prompt that finds pages in the prefix index which another
// request wrote as output, or the other way round.
#pragma once

#include <cstdint>
#include <string>

#include "worker/program/attention_program.h"

namespace kvasir::worker {

// Rows of a prompt's chunk for which a lift must pay. A constant of the
// arithmetic, whatever a server's longest step is.
inline constexpr int64_t kPromptLiftRows = 512;

// Sets `prompt_lift` of the parts that are cheaper to lift where
// kPromptLiftRows rows see a slot: absorbed keys and values whose lift stands
// at run time beside the product, with no online Hadamard transform to take
// back.
void PlanPromptLifts(AttentionProgram* program);

// Whether any part has one: without, bits depend on the request alone.
bool LiftsPrompts(const AttentionProgram& program);

// How far outputs are the same whatever shares a step and whatever the prefix
// index holds, for people: "bits", "bits but for reused output", or "rounding"
// where rows are not: by the device (Device::rows_are_invariant) or by
// attention, whose prompts may have a kernel of their own.
std::string InvarianceName(bool lifts_prompts, bool rows_are_invariant = true);

}  // namespace kvasir::worker
