// Determines into how many tensor-parallel ranks a model can be split. Loader,
// inspect and planners all use it, so that they accept the same numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvasir::plan {

// The sizes of a layer that are divided equally among the ranks.
struct TpDealt {
  int64_t num_kv_heads = 0;
  int64_t num_heads = 0;     // query heads
  int64_t num_features = 0;  // features of the MLP's hidden layer
  // The reason why the model cannot be split among ranks; null if it can.
  const char* whole_because = nullptr;
};

// True if CheckTpSize accepts `size`: the model can be split at all (or `size`
// is 1), query heads and features divide by it, and KvHeadsOfRank accepts it.
bool TpSizeFits(const TpDealt& dealt, int64_t size);

// All possible numbers of ranks, ascending.
std::vector<int64_t> FittingTpSizes(const TpDealt& dealt);

// INVALID_ARGUMENT if the sizes do not divide among `size` ranks, UNIMPLEMENTED
// because of `whole_because`. The error states the possible numbers of ranks.
absl::Status CheckTpSize(const TpDealt& dealt, int64_t size);

// Returns the end of an error text like CheckTpSize's: "possible numbers of
// ranks: 1, 2 or 4", or "no number of ranks is possible".
std::string WouldDo(const std::vector<int64_t>& sizes);

}  // namespace kvasir::plan
