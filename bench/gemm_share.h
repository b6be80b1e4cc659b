// Compares the speed of our matmul with that of the best available float32 GEMM
// for several shapes. The two are measured in turn.
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
  // the type of our weights; the baseline uses float32
  kernels::DType dtype = kernels::DType::kBf16;
};

// The result for one shape: medians over the pairs, with rates in operations
// per second.
struct GemmShareRow {
  GemmShape shape;
  double flops = 0.0;
  double baseline_flops = 0.0;
  PairedRatio share;
};

// Runs the comparison. Owns: the weights in the forms of both GEMMs, inputs and
// outputs.
class GemmShare {
 public:
  // Allocates all matrices and fills them with random numbers. `pool` must
  // outlive the object. RESOURCE_EXHAUSTED if there is too little memory.
  static absl::StatusOr<GemmShare> Create(std::vector<GemmShape> shapes,
                                          const GemmShareOptions& options,
                                          base::ThreadPool* pool);

  // Multiplies each shape once with each of the two GEMMs, in alternating
  // order. UNIMPLEMENTED if the build has no baseline.
  absl::Status MeasurePair();

  // The results over all pairs so far, one row for each shape.
  std::vector<GemmShareRow> Rows() const;
  // For each pair, the seconds in which our matmul (or the baseline) multiplied
  // every shape once.
  const std::vector<double>& seconds() const { return seconds_; }
  const std::vector<double>& baseline_seconds() const {
    return baseline_seconds_;
  }
  // The number of floating-point operations of one multiplication of every
  // shape.
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
  // On the heap, because GemmShare is movable and its buffers point to the
  // device.
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
