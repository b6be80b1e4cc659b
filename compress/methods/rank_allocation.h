// Shares a budget of ranks out to groups: in proportion to their scores, in
// multiples, and with the budget met after the rounding. No libtorch.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// One rank to decide. It goes to `copies` groups alike: those of a module, or
// the same group on every tensor-parallel rank.
struct RankUnit {
  double score = 0;  // of one copy; finite, >= 0
  int64_t max_rank = 0;
  int64_t copies = 1;
};

// A unit's rank is a multiple of `multiple` or its max_rank, and never 0.
struct RankPool {
  std::vector<RankUnit> units;
  int64_t target = 0;  // of copies * rank, summed over units
  int64_t multiple = 1;
};

// Ranks of the units. Shares are proportional to the scores but for those that
// reach their least or greatest rank (what they leave goes to the others, in
// proportion again). Shares are rounded down; what is left over goes out in
// steps of one multiple, largest remainder first, as long as a step fits. So
// the sum is never above the target, and no unit below its maximum could still
// take its next step. Ties go to the earlier unit. Equal scores and maxima: at
// most one step apart. Errors: INVALID_ARGUMENT for scores that are no scores
// or all zero, and for a target below the least ranks.
absl::StatusOr<std::vector<int64_t>> AllocateRanks(const RankPool& pool);

// The rounding alone, for shares found elsewhere (scores are not read). Shares
// are clamped to the units' least and greatest ranks, the sum of the clamped
// ones must not be above the target by more than the rounding of a double.
absl::StatusOr<std::vector<int64_t>> RoundRanks(
    const RankPool& pool, const std::vector<double>& shares);

// copies * rank, summed.
int64_t TotalRank(const RankPool& pool, const std::vector<int64_t>& ranks);

// The least rank of a unit: one multiple, or its maximum if that is less.
int64_t LeastRank(const RankPool& pool, const RankUnit& unit);

}  // namespace kvasir::compress
