// Measures the time of each part of a step on any device, by the CPU's clock or
// by marks in the device's stream.
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

// Measures the time of each part of a step.
// Threads: used only by the thread that uses the stream.
class StepTimer : public worker::StepProfile {
 public:
  using Seconds = worker::CpuStepProfile::Seconds;
  // Forgets earlier measurements. The time before the first mark counts as
  // StepPart::kRest.
  virtual absl::Status Start(kernels::Stream& stream) = 0;
  // Returns the time of each part since Start. Waits for enqueued work and
  // returns its errors.
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

// Measures the time between marks in a device's stream, and the device's
// highest rates of copies and products.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  virtual absl::Status Mark(kernels::Stream& stream) = 0;
  // Waits for all marks since the last call of Take, and returns the seconds
  // between consecutive marks.
  virtual absl::StatusOr<std::vector<double>> Take(kernels::Stream& stream) = 0;
  // Enqueues the device's own fastest copy.
  virtual absl::Status Copy(kernels::Stream& stream,
                            kernels::DevicePtr<void> to,
                            kernels::DevicePtr<const void> from,
                            size_t bytes) = 0;
  // Enqueues `steps` products of bf16 matrices for each warp, on data in
  // registers, at the highest rate of mma.sync. Returns the number of
  // floating-point operations. `out` must have MultipliedBytes bytes.
  virtual absl::StatusOr<double> Multiply(kernels::Stream& stream,
                                          kernels::DevicePtr<float> out,
                                          uint32_t steps) = 0;
  virtual size_t MultipliedBytes(kernels::Stream& stream) const = 0;
};
// Makes a clock that works for every device, because it reads the host's clock.
// It waits for the device at every mark, and does its copies and matrix
// products on the host. It is only for tests: its times say nothing about the
// device.
std::unique_ptr<DeviceClock> MakeHostClock();
// Makes a clock for CUDA devices, which uses events of the calling thread's
// device (cuda.cc, only in builds with nvcc).
std::unique_ptr<DeviceClock> MakeCudaClock();

// A StepTimer that uses a DeviceClock. Stop returns the errors of marks.
class DeviceStepTimer final : public StepTimer {
 public:
  // `clock` must outlive the timer.
  explicit DeviceStepTimer(DeviceClock* clock) : clock_(clock) {}

  absl::Status Start(kernels::Stream& stream) override;
  absl::StatusOr<Seconds> Stop(kernels::Stream& stream) override;
  worker::StepPart Enter(kernels::Stream& stream,
                         worker::StepPart part) override;

 private:
  DeviceClock* const clock_;
  absl::Status status_;
  // parts_[i] is the part of the step that begins at mark i. Start discards
  // earlier marks, which come from runs that only determine the workspace.
  std::vector<worker::StepPart> parts_ = {worker::StepPart::kRest};
};

}  // namespace kvasir::bench
