// Compares the time of a launch with the machine's limits and with a baseline.
#pragma once

#include <algorithm>
#include <vector>

#include "bench/paired.h"

namespace kvasir::bench {

// The machine's limits, measured just before or after a launch.
struct Ceilings {
  double bytes_per_second = 0.0;
  double flops = 0.0;  // floating-point operations per second
};

// The least work that a launch must do: bytes that it must read and
// floating-point operations.
struct LaunchCost {
  double bytes = 0.0;
  double flops = 0.0;
};

inline double ByteFloorSeconds(const LaunchCost& cost,
                               const Ceilings& ceilings) {
  return cost.bytes / ceilings.bytes_per_second;
}
inline double FlopFloorSeconds(const LaunchCost& cost,
                               const Ceilings& ceilings) {
  return cost.flops / ceilings.flops;
}
// The least time in which the machine can do a launch of this cost.
inline double FloorSeconds(const LaunchCost& cost, const Ceilings& ceilings) {
  return std::max(ByteFloorSeconds(cost, ceilings),
                  FlopFloorSeconds(cost, ceilings));
}

// The measurements of a series of launches. Element i of each list belongs to
// launch i; the baseline and the limits were measured just before or after that
// launch.
struct FloorSamples {
  std::vector<double> seconds;
  std::vector<double> baseline_seconds;
  std::vector<Ceilings> ceilings;

  void Add(double took, double baseline, const Ceilings& most) {
    seconds.push_back(took);
    baseline_seconds.push_back(baseline);
    ceilings.push_back(most);
  }
};

// The time of each launch divided by its floor, which is computed from the
// limits that were measured with it.
inline PairedRatio FloorRatio(const FloorSamples& samples,
                              const LaunchCost& cost) {
  std::vector<double> floors;
  for (const Ceilings& most : samples.ceilings) {
    floors.push_back(FloorSeconds(cost, most));
  }
  return RatioOf(samples.seconds, floors);
}

// For each launch, its bytes per second as a share of the read bandwidth that
// was measured with it.
inline PairedRatio BandwidthShare(const FloorSamples& samples,
                                  const LaunchCost& cost) {
  std::vector<double> floors;
  for (const Ceilings& most : samples.ceilings) {
    floors.push_back(ByteFloorSeconds(cost, most));
  }
  return RatioOf(floors, samples.seconds);
}

// True if, by the limits of most launches, the floating-point operations take
// longer than the reads.
inline bool IsComputeBound(const FloorSamples& samples,
                           const LaunchCost& cost) {
  size_t bound = 0;
  for (const Ceilings& most : samples.ceilings) {
    if (FlopFloorSeconds(cost, most) > ByteFloorSeconds(cost, most)) ++bound;
  }
  return 2 * bound > samples.ceilings.size();
}

}  // namespace kvasir::bench
