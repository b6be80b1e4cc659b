// Chooses which RoPE pairs of a head, or which complex channels of a group, are
// kept if only a given number may be kept. Does not use libtorch.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Returns the indices of the `count` greatest scores, ascending. Among equal
// scores the lower index is preferred.
std::vector<int64_t> BestIndices(const std::vector<double>& scores,
                                 int64_t count);

// The energies of a group's complex channels: energies[pair][term]. The terms
// of a pair are its complex channels, by falling energy.
using PairEnergies = std::vector<std::vector<double>>;

// Returns how many terms a group keeps at each pair if it keeps the `count`
// terms with the most energy.
std::vector<int64_t> BestTerms(const PairEnergies& energies, int64_t count);

// Distributes `total` channels over the groups and returns the number that
// each gets. Channels are taken in blocks of `step`; the last block of a group
// may be smaller. Each group gets at least one block. Then the blocks with the
// most energy per channel are taken. CHECK: `total` suffices for one block of
// each group.
std::vector<int64_t> ShareChannels(const std::vector<PairEnergies>& groups,
                                   int64_t step, int64_t total);

}  // namespace kvasir::compress
