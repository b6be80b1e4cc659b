// Finds the kept share that gives a number of bytes per token. Without
// libtorch.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct KeepSearch {
  double want_bytes = 0;
  // Makes a plan that keeps this share of the numbers. It returns
  // INVALID_ARGUMENT if the share is too small for its method.
  std::function<absl::StatusOr<kvasir::v1::KvPlan>(double keep)> plan;
  std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)> bytes;
};

struct FoundPlan {
  kvasir::v1::KvPlan plan;
  double keep = 0;
  double bytes = 0;  // at most want_bytes
};

// Finds the plan of most bytes that does not exceed `want_bytes`, to a
// thousandth of `keep`. Bytes must grow with `keep`. INVALID_ARGUMENT, with its
// bytes, if even the smallest plan takes more.
absl::StatusOr<FoundPlan> PlanForBytes(const KeepSearch& search);

}  // namespace kvasir::compress
