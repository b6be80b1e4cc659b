// Finds how much to keep for a number of bytes per token. No libtorch.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct KeepSearch {
  double want_bytes = 0;
  // A plan that keeps this share of the numbers. INVALID_ARGUMENT: too little
  // for its method.
  std::function<absl::StatusOr<kvasir::v1::KvPlan>(double keep)> plan;
  std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)> bytes;
};

struct FoundPlan {
  kvasir::v1::KvPlan plan;
  double keep = 0;
  double bytes = 0;  // at most want_bytes
};

// The plan of most bytes that are not above what is wanted, to one part in a
// thousand of `keep`; bytes grow with it. INVALID_ARGUMENT when even the least
// plan takes more, with its bytes.
absl::StatusOr<FoundPlan> PlanForBytes(const KeepSearch& search);

}  // namespace kvasir::compress
