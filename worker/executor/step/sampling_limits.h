// Limits of sampling parameters. The engine refuses requests that exceed them,
// and the executor refuses such step plans.
#pragma once

namespace kvasir::worker {

// Repetition penalties far outside this range would turn ordinary logits into
// infinite numbers.
inline constexpr float kMinRepetitionPenalty = 0.01f;
inline constexpr float kMaxRepetitionPenalty = 100.0f;

}  // namespace kvasir::worker
