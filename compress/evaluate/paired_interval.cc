#include "compress/evaluate/paired_interval.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace kvasir::compress {
namespace {

// Returns the integral of cos(a)^exponent from 0 to `angle` by Simpson's rule.
// The substitution t = sqrt(v) tan(a) turns the density of a t distribution
// with v degrees of freedom into a multiple of cos(a)^(v - 1).
double CosinePowerIntegral(double angle, double exponent) {
  constexpr int kSteps = 4000;  // Simpson's rule needs an even number
  const double width = angle / kSteps;
  const auto at = [&](int i) {
    return std::pow(std::cos(i * width), exponent);
  };
  double sum = at(0) + at(kSteps);
  for (int i = 1; i < kSteps; ++i) sum += (i % 2 == 1 ? 4.0 : 2.0) * at(i);
  return sum * width / 3.0;
}

}  // namespace

double TQuantile(double p, int64_t degrees) {
  const auto v = static_cast<double>(degrees);
  const double constant =
      std::exp(std::lgamma((v + 1.0) / 2.0) - std::lgamma(v / 2.0)) /
      std::sqrt(std::numbers::pi);
  double low = 0.0;
  double high = std::numbers::pi / 2.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    const double below = 0.5 + constant * CosinePowerIntegral(middle, v - 1.0);
    (below < p ? low : high) = middle;
  }
  return std::sqrt(v) * std::tan(0.5 * (low + high));
}

PairedInterval MeanWithInterval(const std::vector<double>& differences) {
  const auto count = static_cast<double>(differences.size());
  PairedInterval interval;
  for (const double d : differences) interval.mean += d / count;
  if (differences.size() < 2) {
    interval.high = std::numeric_limits<double>::infinity();
    interval.low = -interval.high;
    return interval;
  }
  double square = 0.0;
  for (const double d : differences) {
    square += (d - interval.mean) * (d - interval.mean);
  }
  const double error = std::sqrt(square / (count - 1.0) / count);
  const double half =
      error * TQuantile(0.975, static_cast<int64_t>(differences.size()) - 1);
  interval.low = interval.mean - half;
  interval.high = interval.mean + half;
  return interval;
}

}  // namespace kvasir::compress
