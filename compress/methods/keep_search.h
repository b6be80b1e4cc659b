// Finds the kept share for which a plan takes a given number of bytes per
// token. Does not use libtorch.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct KeepSearch {
  double want_bytes = 0;
  // Makes a plan that keeps the share `keep` of the numbers. Returns
  // INVALID_ARGUMENT if the plan's method cannot keep so few.
  std::function<absl::StatusOr<kvasir::v1::KvPlan>(double keep)> plan;
  // Returns the bytes per token of a plan.
  std::function<absl::StatusOr<double>(const kvasir::v1::KvPlan&)> bytes;
};

struct FoundPlan {
  kvasir::v1::KvPlan plan;
  double keep = 0;
  double bytes = 0;  // bytes per token, at most want_bytes
};

// Finds a plan of at most `want_bytes`. Its `keep` is the largest possible one
// to within 0.001, or the plan takes at least 99.8 % of `want_bytes`. The bytes
// must grow with `keep`. If even the smallest plan takes more, returns
// INVALID_ARGUMENT with that plan's bytes.
absl::StatusOr<FoundPlan> PlanForBytes(const KeepSearch& search);

}  // namespace kvasir::compress
