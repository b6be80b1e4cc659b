// The counters that an executor updates in each step.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::worker {

// Counts for this rank, over all steps since the executor was created.
struct ExecutorTotals {
  // Floating-point operations with which attention turns latents into keys and
  // values: lifting and rotating keys, and lifting latents for prompts.
  double reconstruction_flops = 0;
  double prompt_lift_flops = 0;  // included in reconstruction_flops
  // Codes that were written with a channel's static range, and how many of them
  // were clamped to that range.
  int64_t static_codes = 0;
  int64_t clamped_codes = 0;
  // Tokens whose attention weights were added to the scores of slots, for each
  // ScoringKind. Each page group that evicts by scores counts a token once.
  int64_t scored_by_weights = 0;
  int64_t scored_again = 0;
  int64_t scored_without_room = 0;
  // Time for choosing and moving slots in evictions. Measured only on a CPU,
  // where a launch returns when its work is done.
  double eviction_seconds = 0;
  // Steps that were captured as graphs, and steps that were enqueued by
  // replaying a graph.
  int64_t captured_steps = 0;
  int64_t replayed_steps = 0;
  // For each expert, the tokens that it has run, summed over layers. Empty if
  // the model has no experts. All ranks have the same counts.
  std::vector<int64_t> expert_tokens;
};

}  // namespace kvasir::worker
