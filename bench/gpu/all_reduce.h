// Times all-reduces between GPUs, as they occur in steps with tensor
// parallelism.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"

namespace kvasir::bench {

struct AllReduceOptions {
  int64_t bytes = 0;   // bytes of the reduced bf16 vector
  int64_t calls = 1;   // calls in a round, enqueued one after the other
  int64_t rounds = 1;  // timed rounds, after one round that warms up
  // See NcclOptions::libraries.
  std::vector<std::string> libraries;
};

// Returns the seconds per call in each round. Each device is a rank with its
// own thread. Returns the first error of a rank.
absl::StatusOr<std::vector<double>> TimeAllReduces(
    const AllReduceOptions& options,
    absl::Span<const std::unique_ptr<kernels::Device>> devices);

}  // namespace kvasir::bench
