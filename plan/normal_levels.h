// Computes the levels for codes of nearly normal numbers, like a latent after a
// random rotation or a Hadamard transform.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::plan {

// Returns the 2^bits levels, ascending, that round a standard normal number
// with the least mean square error (Lloyd 1982, Max 1960). `bits` is in [1, 8].
std::vector<double> LloydMaxLevels(int64_t bits);

}  // namespace kvasir::plan
