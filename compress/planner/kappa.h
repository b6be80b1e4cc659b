// What predicted divergences are to be multiplied by: fitted to plans that were
// measured.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"

namespace kvasir::compress {

// A plan that was tried.
struct PlanTrial {
  double bytes = 0;      // of a token
  double predicted = 0;  // nats a token, without kappa
  double measured = 0;
};

struct FittedKappa {
  double median = 1;  // of measured over predicted
  double low = 1;     // 16 % of the trials are below, and above
  double high = 1;
  // Rank correlation of measured and predicted; of five trials or more.
  std::optional<double> spearman;
  std::vector<PlanTrial> trials;
};

// INVALID_ARGUMENT for no trial, and for divergences that are not positive.
absl::StatusOr<FittedKappa> FitKappa(std::vector<PlanTrial> trials);

// Ties have their mean rank; 0 where either side is constant. Equally many, at
// least one.
double SpearmanCorrelation(const std::vector<double>& a,
                           const std::vector<double>& b);

// The number that a share of the sorted ones lies below, interpolated.
double Quantile(std::vector<double> numbers, double share);

}  // namespace kvasir::compress
