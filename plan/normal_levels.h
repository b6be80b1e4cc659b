// Levels for the codes of numbers that are nearly normal: a latent behind a
// random rotation or a Hadamard matrix.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::plan {

// The 2^bits numbers that a standard normal number is rounded to with the least
// mean square error (Lloyd 1982, Max 1960), ascending. `bits` in [1, 8].
std::vector<double> LloydMaxLevels(int64_t bits);

}  // namespace kvasir::plan
