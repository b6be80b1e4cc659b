// Chooses which pairs of a head and which complex channels of a group are kept
// when their number is known. Pure arithmetic without libtorch.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// The indices of the `count` greatest of `scores`, ascending. The lower index
// is preferred among equal scores.
std::vector<int64_t> BestIndices(const std::vector<double>& scores,
                                 int64_t count);

// Energies of a group's complex channels: [pair][term], falling inside a pair.
using PairEnergies = std::vector<std::vector<double>>;

// Number of terms that a group keeps at each pair, when it keeps its `count`
// largest ones.
std::vector<int64_t> BestTerms(const PairEnergies& energies, int64_t count);

// Number of channels of each group when all get `total` channels, in blocks of
// `step` (the last block of a group may be smaller). The blocks of most energy
// per channel are taken, and at least one block of each group. CHECK: `total`
// suffices for that.
std::vector<int64_t> ShareChannels(const std::vector<PairEnergies>& groups,
                                   int64_t step, int64_t total);

}  // namespace kvasir::compress
