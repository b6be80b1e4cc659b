// Computes the mean of the differences between paired measurements, with its
// confidence interval.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Returns the `p` quantile of the t distribution with `degrees` degrees of
// freedom, for 0.5 < p < 1 and degrees >= 1.
double TQuantile(double p, int64_t degrees);

struct PairedInterval {
  double mean = 0.0;
  // 95 % confidence interval of the mean; infinite for fewer than two numbers.
  double low = 0.0;
  double high = 0.0;
};

PairedInterval MeanWithInterval(const std::vector<double>& differences);

}  // namespace kvasir::compress
