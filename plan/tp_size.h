// The numbers of tensor-parallel ranks that a model can be split into. Loader,
// inspect and planners all call this, so they accept the same sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvasir::plan {

// The sizes that every layer deals to the ranks in equal parts.
struct TpDealt {
  int64_t num_kv_heads = 0;
  int64_t num_heads = 0;     // query heads
  int64_t num_features = 0;  // features of the MLP between its matrices
};

// Whether `size` ranks are possible: it must divide the query heads and the
// features. It must divide the KV heads, or they must divide it
// (KvHeadsOfRank).
bool TpSizeFits(const TpDealt& dealt, int64_t size);

// All possible sizes, ascending.
std::vector<int64_t> FittingTpSizes(const TpDealt& dealt);

// INVALID_ARGUMENT names the numbers and the sizes that are possible.
absl::Status CheckTpSize(const TpDealt& dealt, int64_t size);

// "would do: 1, 2 or 4"; "none would do".
std::string WouldDo(const std::vector<int64_t>& sizes);

}  // namespace kvasir::plan
