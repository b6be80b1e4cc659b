// Whether two sets of numbers measured in pairs differ, and by how much.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// The t with probability `p` (0.5 < p < 1) below it, for a t distribution of
// `degrees` >= 1.
double TQuantile(double p, int64_t degrees);

struct PairedInterval {
  double mean = 0.0;
  // 95 % interval of the mean; infinite from fewer than two numbers.
  double low = 0.0;
  double high = 0.0;
};

PairedInterval MeanWithInterval(const std::vector<double>& differences);

}  // namespace kvasir::compress
