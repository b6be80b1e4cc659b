// Limits of sampling parameters. The engine refuses requests that exceed them,
// and the executor refuses such step plans.
#pragma once

namespace kvasir::worker {

// A repetition penalty outside this range would turn ordinary logits infinite.
inline constexpr float kMinRepetitionPenalty = 0.01f;
inline constexpr float kMaxRepetitionPenalty = 100.0f;

}  // namespace kvasir::worker
