// Tells whether and by how much two sets of numbers differ that were measured
// in pairs.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// The value t such that a t distribution of `degrees` >= 1 is below t with
// probability `p` (0.5 < p < 1).
double TQuantile(double p, int64_t degrees);

struct PairedInterval {
  double mean = 0.0;
  // 95 % confidence interval of the mean; infinite for fewer than two numbers.
  double low = 0.0;
  double high = 0.0;
};

PairedInterval MeanWithInterval(const std::vector<double>& differences);

}  // namespace kvasir::compress
