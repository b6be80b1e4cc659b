// Limits of sampling parameters. The engine refuses requests and the executor
// refuses step plans by the same numbers.
#pragma once

namespace kvasir::worker {

// A repetition penalty outside this range turns ordinary logits into infinite
// ones.
inline constexpr float kMinRepetitionPenalty = 0.01f;
inline constexpr float kMaxRepetitionPenalty = 100.0f;

}  // namespace kvasir::worker
