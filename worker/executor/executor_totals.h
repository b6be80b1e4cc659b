// Counters of the steps of one executor.
#pragma once

#include <cstdint>

namespace kvasir::worker {

// Counts over all steps on this rank since the executor was made.
struct ExecutorTotals {
  // Operations that lift and rotate keys where they are read, and that lift
  // latents for prompts.
  double reconstruction_flops = 0;
  double prompt_lift_flops = 0;  // included in reconstruction_flops
  // Codes written with the static range of their channel, and how many of those
  // the range clamped.
  int64_t static_codes = 0;
  int64_t clamped_codes = 0;
  // Tokens whose attention was added to the scores of slots, by ScoringKind. A
  // token counts once in each page group that evicts by scores.
  int64_t scored_by_weights = 0;
  int64_t scored_again = 0;
  int64_t scored_without_room = 0;
  // Time for choosing slots and moving them. Counted only on a CPU, where a
  // launch has done its work when it returns.
  double eviction_seconds = 0;
  // Steps that were captured as graphs, and steps that were enqueued by one.
  int64_t captured_steps = 0;
  int64_t replayed_steps = 0;
};

}  // namespace kvasir::worker
