// Decides which latents prompts lift while they read them. The latent of a
// group is wider than a head. An absorbed read pays for that width at every
// slot and row. If many rows of a sequence see a slot, lifting the latent once
// for all of them is cheaper.
//
// Lifted and absorbed reads differ by rounding, which codes amplify. So the
// choice depends only on whether a token is prompt or output, and never on what
// shares its step: chunks, batches and preemption change no bit. One thing does
// change bits: a prompt that finds pages in the prefix index which another
// request wrote as output, or the reverse.
#pragma once

#include <cstdint>
#include <string>

#include "worker/program/attention_program.h"

namespace kvasir::worker {

// A lift must pay off for this many rows of a prompt's chunk. The arithmetic
// depends on this constant, not on a server's longest step.
inline constexpr int64_t kPromptLiftRows = 512;

// Sets `prompt_lift` for the parts that are cheaper to lift when
// kPromptLiftRows rows see a slot. These are absorbed keys and values that are
// lifted at run time by a matrix of their own and have no online Hadamard
// transform.
void PlanPromptLifts(AttentionProgram* program);

// Whether any part has a prompt lift. If none has, bits depend only on the
// request.
bool LiftsPrompts(const AttentionProgram& program);

// Names, for people, what results depend on. "bits": every bit is the same
// whatever shares a step and whatever the prefix index holds. "bits but for
// reused output": the same, except after a prompt reuses pages of output.
// "rounding": rows are not invariant on this device
// (Device::rows_are_invariant), or prompts have an attention kernel of their
// own.
std::string InvarianceName(bool lifts_prompts, bool rows_are_invariant = true);

}  // namespace kvasir::worker
