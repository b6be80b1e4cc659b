// What `bench decode --tp` tells of a tensor-parallel rank.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "nlohmann/json.hpp"
#include "worker/collective/collective.h"

namespace kvasir::cli {

// Compute threads of each of `ranks` ranks that share `threads`: as many as go
// into them, one at least.
int ThreadsOfRank(int threads, int64_t ranks);
// In words where all ranks together do not have as many; else empty.
std::string ThreadsNote(int threads, int64_t ranks);

// Hashes of what each rank has sampled. INTERNAL, with the first two values
// that differ.
absl::Status CheckSameResults(absl::Span<const uint64_t> hash_by_rank);

// Some steps of one rank.
struct RankTally {
  int64_t steps = 0;
  double seconds = 0;
  worker::CollectiveTotals collectives;  // of these steps alone

  // `before` and `after`: the rank's totals around `more` steps.
  void Add(const worker::CollectiveTotals& before,
           const worker::CollectiveTotals& after, int64_t more,
           double more_seconds);

  // {collectives_per_step, sent_bytes_per_step, wait_share}. Whole numbers
  // where all steps are alike.
  nlohmann::ordered_json ToJson() const;
};

}  // namespace kvasir::cli
