// Distributes a total rank over groups of heads in proportion to their scores.
// Each rank is rounded to a multiple of a given number. The sum of the rounded
// ranks does not exceed the target. Does not use libtorch.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// One rank to be chosen, for `copies` groups of heads together. These are all
// groups of a projection, or the groups that have the same index on every
// tensor-parallel rank.
struct RankUnit {
  double score = 0;  // score of one of the groups; finite, >= 0
  int64_t max_rank = 0;
  int64_t copies = 1;
};

// Units that share a budget. The rank of a unit is a multiple of `multiple` or
// its max_rank, and never 0.
struct RankPool {
  std::vector<RankUnit> units;
  int64_t target = 0;  // upper limit for the sum of copies * rank
  int64_t multiple = 1;
};

// Returns the rank of each unit. Each unit gets a share of the target in
// proportion to its score, but at least its least rank and at most its
// greatest. If bounds change some shares, the shares of the other units are
// scaled so that the sum stays the same. Shares are rounded down. The remainder
// is given out in steps of one multiple, first to the unit that lost the
// largest fraction in rounding, as long as a step fits. Therefore the sum never
// exceeds the target, and no unit below its maximum could still take its next
// step. Among equal units the earlier one is preferred. Units with equal scores
// and maxima differ by at most one step.
// Errors: INVALID_ARGUMENT for scores that are negative, not finite or all
//   zero, and for a target below the least ranks.
absl::StatusOr<std::vector<int64_t>> AllocateRanks(const RankPool& pool);

// Does only the rounding step of AllocateRanks, for given shares in place of
// scores. Shares are clamped to the units' least and greatest ranks. The sum of
// the clamped shares must not exceed the target by more than a rounding error.
absl::StatusOr<std::vector<int64_t>> RoundRanks(
    const RankPool& pool, const std::vector<double>& shares);

// Returns the sum of copies * rank over all units.
int64_t TotalRank(const RankPool& pool, const std::vector<int64_t>& ranks);

// Returns the least rank of a unit: one multiple, or its maximum if that is
// less.
int64_t LeastRank(const RankPool& pool, const RankUnit& unit);

}  // namespace kvasir::compress
