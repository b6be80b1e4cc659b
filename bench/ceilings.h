// Measures the limits of this machine (read bandwidth and FLOP/s), with which
// benchmark results of the same run are compared.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"

namespace kvasir::kernels {

// Measures the read bandwidth: all threads read a large buffer, each its own
// contiguous part. Create it once, because that touches the whole buffer. Call
// BytesPerSecond just before or after every sample of a benchmark.
class ReadBandwidthProbe {
 public:
  // `footprint_bytes` must be at least four times the last-level cache, so that
  // no cache keeps data of the previous pass. RESOURCE_EXHAUSTED if the system
  // refuses the memory. `pool` must outlive the probe.
  static absl::StatusOr<std::unique_ptr<ReadBandwidthProbe>> Create(
      base::ThreadPool* pool, int64_t footprint_bytes);
  ~ReadBandwidthProbe();
  ReadBandwidthProbe(const ReadBandwidthProbe&) = delete;
  ReadBandwidthProbe& operator=(const ReadBandwidthProbe&) = delete;

  int64_t footprint_bytes() const { return footprint_bytes_; }

  // Measures one pass over the buffer.
  double BytesPerSecond() const;

 private:
  ReadBandwidthProbe(base::ThreadPool* pool, int64_t footprint_bytes,
                     void* memory)
      : pool_(pool), footprint_bytes_(footprint_bytes), memory_(memory) {}

  base::ThreadPool* const pool_;
  const int64_t footprint_bytes_;
  void* const memory_;
};

// Measures float32 multiply-adds of all threads on data in registers, in
// operations per second (a multiply-add is two). Takes about `milliseconds`.
double MeasureFlops(base::ThreadPool* pool, int milliseconds = 50);

}  // namespace kvasir::kernels
