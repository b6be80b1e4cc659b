// Times of the parts of a step on any device: the CPU's by its clock, others'
// by marks in their stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/stream.h"
#include "worker/executor/step/step_profile.h"

namespace kvasir::bench {

// Threads: the stream's.
class StepTimer : public worker::StepProfile {
 public:
  using Seconds = worker::CpuStepProfile::Seconds;
  // Forgets what was measured. Until the first mark time is the rest's.
  virtual absl::Status Start(kernels::Stream& stream) = 0;
  // Of each part since Start; waits for what is enqueued. Its errors.
  virtual absl::StatusOr<Seconds> Stop(kernels::Stream& stream) = 0;
};

class CpuStepTimer final : public StepTimer {
 public:
  absl::Status Start(kernels::Stream&) override {
    profile_.Start();
    return absl::OkStatus();
  }
  absl::StatusOr<Seconds> Stop(kernels::Stream&) override {
    return profile_.Stop();
  }
  worker::StepPart Enter(kernels::Stream& stream,
                         worker::StepPart part) override {
    return profile_.Enter(stream, part);
  }

 private:
  worker::CpuStepProfile profile_;
};

// Moments of a device's stream.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  virtual absl::Status Mark(kernels::Stream& stream) = 0;
  // Seconds from each mark to the next one since the last call; waits for them.
  virtual absl::StatusOr<std::vector<double>> Take(kernels::Stream& stream) = 0;
  // Enqueues a copy of the device's own, the fastest that it has.
  virtual absl::Status Copy(kernels::Stream& stream,
                            kernels::DevicePtr<void> to,
                            kernels::DevicePtr<const void> from,
                            size_t bytes) = 0;
  // Enqueues products of bf16 matrices in registers, the fastest that mma.sync
  // makes, `steps` of each warp; their operations. `out`: MultipliedBytes.
  virtual absl::StatusOr<double> Multiply(kernels::Stream& stream,
                                          kernels::DevicePtr<float> out,
                                          uint32_t steps) = 0;
  virtual size_t MultipliedBytes(kernels::Stream& stream) const = 0;
};
// Of any device, by the host's clock: waits at every mark, copies through the
// host, and multiplies there. Shows that all of it runs; its times mean little.
std::unique_ptr<DeviceClock> MakeHostClock();
// Of a CUDA device by its events, made on the calling thread's device (cuda.cc,
// which only a build with nvcc has).
std::unique_ptr<DeviceClock> MakeCudaClock();

// Keeps errors of marks for Stop.
class DeviceStepTimer final : public StepTimer {
 public:
  // `clock` outlives it.
  explicit DeviceStepTimer(DeviceClock* clock) : clock_(clock) {}

  absl::Status Start(kernels::Stream& stream) override;
  absl::StatusOr<Seconds> Stop(kernels::Stream& stream) override;
  worker::StepPart Enter(kernels::Stream& stream,
                         worker::StepPart part) override;

 private:
  DeviceClock* const clock_;
  absl::Status status_;
  // From each mark on; marks outside of Start and Stop (a launch that only
  // counts) are forgotten.
  std::vector<worker::StepPart> parts_ = {worker::StepPart::kRest};
};

}  // namespace kvasir::bench
