// The results that `bench decode --tp` reports for a tensor-parallel rank.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "nlohmann/json.hpp"
#include "worker/collective/collective.h"

namespace kvasir::cli {

// The number of compute threads of each rank if `ranks` ranks share `threads`
// threads: the quotient, but at least 1.
int ThreadsOfRank(int threads, int64_t ranks);
// A note for the report if all ranks together do not use exactly `threads`
// threads; otherwise empty.
std::string ThreadsNote(int threads, int64_t ranks);

// Checks that all ranks have the same hash of their sampled tokens. Otherwise
// returns INTERNAL, with the first two hashes that differ.
absl::Status CheckSameResults(absl::Span<const uint64_t> hash_by_rank);

// The counts and times of one rank, summed over some steps.
struct RankTally {
  int64_t steps = 0;
  double seconds = 0;
  worker::CollectiveTotals collectives;  // of the counted steps only

  // Adds `more` steps; `before` and `after` are the rank's totals before and
  // after these steps.
  void Add(const worker::CollectiveTotals& before,
           const worker::CollectiveTotals& after, int64_t more,
           double more_seconds);

  // Returns {collectives_per_step, sent_bytes_per_step, wait_share}. Counts are
  // whole numbers if all steps are alike.
  nlohmann::ordered_json ToJson() const;
};

}  // namespace kvasir::cli
