// All-reduces between GPUs, as steps of tensor parallel ask for them.
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
  int64_t bytes = 0;   // of bf16
  int64_t calls = 1;   // of a round, enqueued one behind the other
  int64_t rounds = 1;  // behind one that warms up
  // NcclOptions::libraries.
  std::vector<std::string> libraries;
};

// Seconds of a call, of each round: a thread to a device, which is a rank. The
// first error of a rank.
absl::StatusOr<std::vector<double>> TimeAllReduces(
    const AllReduceOptions& options,
    absl::Span<const std::unique_ptr<kernels::Device>> devices);

}  // namespace kvasir::bench
