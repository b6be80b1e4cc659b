// Statistics of two things measured in turn, so that other load affects both.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

namespace kvasir::bench {

// The ratio of two times, measured in pairs. `median` is the median over the
// pairs. `spread` is the range of the middle half of the pairs, divided by the
// median.
struct PairedRatio {
  double median = 0.0;
  double spread = 0.0;
  size_t pairs = 0;
  // The fewest pairs with which median and spread are meaningful.
  static constexpr size_t kFewestPairs = 7;
  bool too_few_pairs() const { return pairs < kFewestPairs; }
  // True if the result is not reliable, because there are too few pairs or the
  // machine was too busy (a large spread).
  bool undecided() const { return spread > 0.15 || too_few_pairs(); }
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
  result.pairs = ratios.size();
  result.median = Quantile(ratios, 0.5);
  result.spread =
      (Quantile(ratios, 0.75) - Quantile(ratios, 0.25)) / result.median;
  return result;
}

// The median of the differences a - b over all pairs. A difference is small
// compared with the two times, so the differences of single pairs vary widely.
// Therefore the run is divided into seven parts, and the spread is that of the
// parts' medians.
inline PairedRatio DifferenceOf(const std::vector<double>& a,
                                const std::vector<double>& b) {
  std::vector<double> differences;
  for (size_t i = 0; i < a.size(); ++i) differences.push_back(a[i] - b[i]);
  PairedRatio result;
  result.pairs = differences.size();
  result.median = Quantile(differences, 0.5);
  const size_t parts = std::min(PairedRatio::kFewestPairs, differences.size());
  std::vector<double> medians;
  for (size_t part = 0; part < parts; ++part) {
    const auto at = [&](size_t index) {
      return differences.begin() +
             static_cast<std::ptrdiff_t>(index * differences.size() / parts);
    };
    medians.push_back(
        Quantile(std::vector<double>(at(part), at(part + 1)), 0.5));
  }
  result.spread = (Quantile(medians, 0.75) - Quantile(medians, 0.25)) /
                  std::abs(result.median);
  return result;
}

}  // namespace kvasir::bench
