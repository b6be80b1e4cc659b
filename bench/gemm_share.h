// Our matmul against the best float32 GEMM at hand, shape by shape, the two in
// turn.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "bench/paired.h"
#include "kernels/device/device.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"

namespace kvasir::bench {

struct GemmShape {
  std::string name;
  int64_t k = 0;
  int64_t n = 0;
};

struct GemmShareOptions {
  int64_t num_rows = 512;
  kernels::DType dtype = kernels::DType::kBf16;  // of our weights
};

// Of one shape, a median over the pairs; rates in operations per second.
struct GemmShareRow {
  GemmShape shape;
  double flops = 0.0;
  double baseline_flops = 0.0;
  PairedRatio share;
};

// Owns: weights in both forms, inputs and outputs.
// Threads: one.
class GemmShare {
 public:
  // Fills everything with random numbers. `pool` outlives it.
  // RESOURCE_EXHAUSTED when memory does not suffice.
  static absl::StatusOr<GemmShare> Create(std::vector<GemmShape> shapes,
                                          const GemmShareOptions& options,
                                          base::ThreadPool* pool);

  // One multiplication of each shape by either, who goes first in turn.
  // UNIMPLEMENTED where the build
  // has no baseline.
  absl::Status MeasurePair();

  // Over all pairs so far. Seconds are those of one multiplication of each
  // shape, by pair.
  std::vector<GemmShareRow> Rows() const;
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<double>& baseline_seconds() const {
    return baseline_seconds_;
  }
  // Operations of one multiplication of each shape.
  double operations() const;

 private:
  struct Case {
    GemmShape shape;
    kernels::DeviceBuffer packed;
    kernels::DeviceBuffer dense;  // [k, n], float32
    std::vector<double> seconds;
    std::vector<double> baseline_seconds;
  };

  GemmShare(const GemmShareOptions& options, base::ThreadPool* pool)
      : options_(options),
        pool_(pool),
        device_(std::make_unique<kernels::CpuDevice>(pool)),
        stream_(device_->MakeStream()) {}
  absl::Status Multiply(const Case& one);
  absl::Status MultiplyByBaseline(const Case& one);
  double OperationsOf(const GemmShape& shape) const;

  GemmShareOptions options_;
  base::ThreadPool* pool_;
  // It moves, and buffers do not outlive it.
  std::unique_ptr<kernels::CpuDevice> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::vector<Case> cases_;
  kernels::DeviceBuffer x_;
  kernels::DeviceBuffer y_;
  kernels::DeviceBuffer workspace_;
  std::vector<double> seconds_;
  std::vector<double> baseline_seconds_;
};

}  // namespace kvasir::bench
