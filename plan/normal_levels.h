// Levels for codes: those for nearly normal numbers, like a latent after a
// random rotation or a Hadamard transform, and how levels are rounded.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvasir::plan {

// Returns the 2^bits levels, ascending, that round a standard normal number
// with the least mean square error (Lloyd 1982, Max 1960). `bits` is in [1, 8].
std::vector<double> LloydMaxLevels(int64_t bits);

// Rounds levels to whole multiples, from -127 to 127, of one step, so that
// attention can multiply codes as integers. The step has 16 significant bits,
// so the products are exact. The largest magnitude becomes 127 steps, and the
// step is the largest magnitude / 127, rounded down to these bits. Levels that
// are already rounded do not change.
std::vector<float> RoundedLevels(absl::Span<const double> levels);

}  // namespace kvasir::plan
