// Computes and rounds levels, the numbers that codes stand for. These levels
// suit latents whose channels are nearly normally distributed, for example
// after a random rotation or a Hadamard transform.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvasir::plan {

// Returns the 2^bits levels, ascending, that round a standard normal number
// with the least mean square error (Lloyd 1982, Max 1960). `bits` is in [1, 8].
std::vector<double> LloydMaxLevels(int64_t bits);

// Rounds each level to a multiple of one step, from -127 to 127 steps, so that
// attention can multiply codes as integers. The step is the largest magnitude
// divided by 127, rounded down to 16 significant bits so that products are
// exact. The level with the largest magnitude becomes 127 or -127 steps. Levels
// that are already rounded do not change.
std::vector<float> RoundedLevels(absl::Span<const double> levels);

}  // namespace kvasir::plan
