// Which pairs of a head and which complex channels of a group are kept, when it
// is known how many. Pure arithmetic, no libtorch.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// The `count` best of `scores`, as rising indices. Equal scores: lower first.
std::vector<int64_t> BestIndices(const std::vector<double>& scores,
                                 int64_t count);

// Energies of a group's complex channels: [pair][term], falling inside a pair.
using PairEnergies = std::vector<std::vector<double>>;

// Terms that a group keeps at each pair, 0 for none: the `count` largest.
std::vector<int64_t> BestTerms(const PairEnergies& energies, int64_t count);

// How many channels each group gets of `total`, in blocks of `step` (a group's
// last block may be smaller): the blocks of most energy per channel, at least
// one block for each group. CHECK: total pays for those.
std::vector<int64_t> ShareChannels(const std::vector<PairEnergies>& groups,
                                   int64_t step, int64_t total);

}  // namespace kvasir::compress
