// Fits kappa, the factor between predicted and measured divergence, to plans
// that were measured.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// The predicted and the measured divergence of a plan.
struct PlanTrial {
  double bytes = 0;      // per token
  double predicted = 0;  // divergence in nats per token, without kappa
  double measured = 0;
};

struct FittedKappa {
  double median = 1;  // median of measured / predicted over all trials
  // 16th and 84th percentile of measured / predicted.
  double low = 1;
  double high = 1;
  // Rank correlation of measured and predicted; only for five or more trials.
  std::optional<double> spearman;
  std::vector<PlanTrial> trials;
};

// Fits kappa to the trials. INVALID_ARGUMENT if there is no trial, or if a
// divergence is not both finite and positive.
absl::StatusOr<FittedKappa> FitKappa(std::vector<PlanTrial> trials);

// Returns the rank correlation of `a` and `b`, which must have the same number
// of entries, at least one. Equal numbers get their mean rank. The result is 0
// if all numbers of `a` or all numbers of `b` are equal.
double SpearmanCorrelation(const std::vector<double>& a,
                           const std::vector<double>& b);

// Returns the `share` quantile of the numbers (0.5: the median), interpolated
// between neighbours.
double Quantile(std::vector<double> numbers, double share);

}  // namespace kvasir::compress
