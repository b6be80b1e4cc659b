// Two things measured in turn, so that what else the machine does meets both.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace kvasir::bench {

// Ratio of two times over pairs: the median, and how far the middle half of
// the pairs lies apart, relative to it.
struct PairedRatio {
  double median = 0.0;
  double spread = 0.0;
  // Beyond this the machine was too busy to say anything.
  bool undecided() const { return spread > 0.15; }
};

inline double SecondsOf(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  return took.count();
}

inline double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1) +
                                    0.5)];
}

inline PairedRatio RatioOf(const std::vector<double>& numerators,
                           const std::vector<double>& denominators) {
  std::vector<double> ratios;
  for (size_t i = 0; i < numerators.size(); ++i) {
    ratios.push_back(numerators[i] / denominators[i]);
  }
  PairedRatio result;
  result.median = Quantile(ratios, 0.5);
  result.spread =
      (Quantile(ratios, 0.75) - Quantile(ratios, 0.25)) / result.median;
  return result;
}

}  // namespace kvasir::bench
