#include "compress/methods/rank_allocation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::compress {
namespace {

// Because of rounding errors, a share that is below a whole rank by at most
// this much counts as the whole rank.
constexpr double kRoundingSlack = 1e-6;

absl::Status CheckPool(const RankPool& pool) {
  if (pool.multiple < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank allocation: the rank multiple must be at least 1, is ",
        pool.multiple));
  }
  int64_t least = 0;
  for (size_t i = 0; i < pool.units.size(); ++i) {
    const RankUnit& unit = pool.units[i];
    if (unit.max_rank < 1 || unit.copies < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank allocation: the greatest rank and the number of copies of "
          "unit ",
          i, " must be at least 1, are ", unit.max_rank, " and ", unit.copies));
    }
    if (!std::isfinite(unit.score) || unit.score < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank allocation: the score of unit ", i,
                       " must be finite and >= 0, is ", unit.score));
    }
    least += unit.copies * LeastRank(pool, unit);
  }
  if (pool.target < least) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank allocation: the budget is ", pool.target,
        " numbers per token, but the least ranks of all latents, "
        "with a rank multiple of ",
        pool.multiple, ", take ", least,
        ": lower --rank-multiple or raise the budget (such as --keep)"));
  }
  return absl::OkStatus();
}

// Returns the greatest rank of the unit that does not exceed `share`.
int64_t FloorRank(const RankPool& pool, const RankUnit& unit, double share) {
  if (share + kRoundingSlack >= static_cast<double>(unit.max_rank)) {
    return unit.max_rank;
  }
  const auto steps = static_cast<int64_t>(std::floor(
      (share + kRoundingSlack) / static_cast<double>(pool.multiple)));
  return std::max(steps * pool.multiple, LeastRank(pool, unit));
}

double ClampShare(const RankPool& pool, const RankUnit& unit, double share) {
  return std::clamp(share, static_cast<double>(LeastRank(pool, unit)),
                    static_cast<double>(unit.max_rank));
}

// Returns the sum of the units' shares if each share is `factor` times the
// unit's score, clamped to the unit's bounds. The sum grows with `factor`.
double TotalShare(const RankPool& pool, double factor) {
  double total = 0;
  for (const RankUnit& unit : pool.units) {
    total += static_cast<double>(unit.copies) *
             ClampShare(pool, unit, factor * unit.score);
  }
  return total;
}

}  // namespace

int64_t LeastRank(const RankPool& pool, const RankUnit& unit) {
  return std::min(pool.multiple, unit.max_rank);
}

int64_t TotalRank(const RankPool& pool, const std::vector<int64_t>& ranks) {
  int64_t total = 0;
  for (size_t i = 0; i < pool.units.size(); ++i) {
    total += pool.units[i].copies * ranks[i];
  }
  return total;
}

absl::StatusOr<std::vector<int64_t>> RoundRanks(
    const RankPool& pool, const std::vector<double>& shares) {
  KVASIR_RETURN_IF_ERROR(CheckPool(pool));
  if (shares.size() != pool.units.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank allocation: there are ", shares.size(), " shares for ",
        pool.units.size(), " units, but each unit must have one share"));
  }
  std::vector<int64_t> ranks;
  // The remainders are integers, in units of kRoundingSlack, so that rounding
  // errors do not decide between equal remainders.
  std::vector<int64_t> remainders;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double share = ClampShare(pool, pool.units[i], shares[i]);
    ranks.push_back(FloorRank(pool, pool.units[i], share));
    remainders.push_back(std::llround(
        (share - static_cast<double>(ranks.back())) / kRoundingSlack));
  }
  int64_t left = pool.target - TotalRank(pool, ranks);
  if (left < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank allocation: the ranks for the given shares take ", -left,
        " numbers per token more than the budget of ", pool.target));
  }
  std::vector<size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return remainders[a] > remainders[b];
  });
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i : order) {
      const RankUnit& unit = pool.units[i];
      const int64_t step = std::min(pool.multiple, unit.max_rank - ranks[i]);
      if (step == 0 || unit.copies * step > left) continue;
      ranks[i] += step;
      left -= unit.copies * step;
      changed = true;
    }
  }
  return ranks;
}

absl::StatusOr<std::vector<int64_t>> AllocateRanks(const RankPool& pool) {
  KVASIR_RETURN_IF_ERROR(CheckPool(pool));
  double least_score = 0;  // the least score above 0
  int64_t most = 0;        // the sum of copies * max_rank
  int64_t greatest = 0;
  for (const RankUnit& unit : pool.units) {
    if (unit.score > 0 && (least_score == 0 || unit.score < least_score)) {
      least_score = unit.score;
    }
    most += unit.copies * unit.max_rank;
    greatest = std::max(greatest, unit.max_rank);
  }
  if (least_score == 0 && !pool.units.empty()) {
    return absl::InvalidArgumentError(
        "rank allocation: the score of every unit is zero");
  }
  const auto target = static_cast<double>(std::min(pool.target, most));
  double low = 0;
  // With this factor all units with a score above 0 reach their maximum.
  double high = std::min(static_cast<double>(greatest) / least_score,
                         std::numeric_limits<double>::max());
  // Bisects until there is no number of type double between the bounds.
  for (double middle = high / 2; low < middle && middle < high;
       middle = low + (high - low) / 2) {
    (TotalShare(pool, middle) < target ? low : high) = middle;
  }
  std::vector<double> shares;
  for (const RankUnit& unit : pool.units) {
    shares.push_back(high * unit.score);
  }
  return RoundRanks(pool, shares);
}

}  // namespace kvasir::compress
