#include "plan/normal_levels.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvasir::plan {
namespace {

constexpr double kSqrt2 = 1.4142135623730951;
constexpr double kSqrt2Pi = 2.5066282746310002;
// A large number, because Lloyd's iteration moves the outermost of 256
// levels slowly.
constexpr int kLloydRounds = 20000;
constexpr double kLloydTolerance = 1e-10;

double Density(double x) { return std::exp(-0.5 * x * x) / kSqrt2Pi; }
// The probability that a standard normal number is above x.
double Above(double x) { return 0.5 * std::erfc(x / kSqrt2); }

}  // namespace

std::vector<double> LloydMaxLevels(int64_t bits) {
  const auto half = size_t{1} << (bits - 1);
  // Computes only the positive levels; the negative ones mirror them.
  std::vector<double> levels(half);
  for (size_t i = 0; i < half; ++i) {
    levels[i] =
        (static_cast<double>(i) + 0.5) * 4.0 / static_cast<double>(half);
  }
  double moved = 1.0;
  for (int round = 0; round < kLloydRounds && moved > kLloydTolerance;
       ++round) {
    moved = 0.0;
    double low = 0.0;
    for (size_t i = 0; i < half; ++i) {
      const bool last = i + 1 == half;
      const double high = last ? 0.0 : 0.5 * (levels[i] + levels[i + 1]);
      const double mass = Above(low) - (last ? 0.0 : Above(high));
      const double mean = (Density(low) - (last ? 0.0 : Density(high))) / mass;
      moved = std::max(moved, std::abs(mean - levels[i]));
      levels[i] = mean;
      low = high;
    }
  }
  std::vector<double> all(levels.rbegin(), levels.rend());
  for (double& level : all) level = -level;
  all.insert(all.end(), levels.begin(), levels.end());
  return all;
}

std::vector<float> RoundedLevels(absl::Span<const double> levels) {
  constexpr double kMostSteps = 127.0;
  double largest = 0.0;
  for (const double level : levels) {
    largest = std::max(largest, std::abs(level));
  }
  // Clears the lowest 8 of the 24 significant bits of a float.
  const auto step = std::bit_cast<float>(
      std::bit_cast<uint32_t>(static_cast<float>(largest / kMostSteps)) &
      ~uint32_t{0xff});
  std::vector<float> rounded;
  for (const double level : levels) {
    const double steps =
        step > 0.0f ? std::nearbyint(level / static_cast<double>(step)) : 0.0;
    rounded.push_back(
        static_cast<float>(std::clamp(steps, -kMostSteps, kMostSteps)) * step);
  }
  return rounded;
}

}  // namespace kvasir::plan
