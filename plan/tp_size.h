// Into how many tensor-parallel ranks a model can be cut. Loader, inspect and
// planners ask here, so that what one takes no other refuses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvasir::plan {

// What every layer deals to the ranks in equal parts.
struct TpDealt {
  int64_t num_kv_heads = 0;
  int64_t num_heads = 0;     // of the queries
  int64_t num_features = 0;  // of the MLP, between its matrices
};

// Query heads and features divide by it; KV heads do, or it divides by them
// (KvHeadsOfRank).
bool TpSizeFits(const TpDealt& dealt, int64_t size);

// All that do, ascending.
std::vector<int64_t> FittingTpSizes(const TpDealt& dealt);

// INVALID_ARGUMENT: the numbers, and which sizes would do.
absl::Status CheckTpSize(const TpDealt& dealt, int64_t size);

// "would do: 1, 2 or 4"; "none would do".
std::string WouldDo(const std::vector<int64_t>& sizes);

}  // namespace kvasir::plan
