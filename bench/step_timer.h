// Times of the parts of a step on any device: by the CPU's clock, or by marks
// in the device's stream.
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
  // Forgets earlier measurements. Time before the first mark counts as the
  // rest.
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

// Marks moments in a device's stream.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  virtual absl::Status Mark(kernels::Stream& stream) = 0;
  // Returns the seconds between consecutive marks since the last call; waits
  // for them.
  virtual absl::StatusOr<std::vector<double>> Take(kernels::Stream& stream) = 0;
  // Enqueues the device's own fastest copy.
  virtual absl::Status Copy(kernels::Stream& stream,
                            kernels::DevicePtr<void> to,
                            kernels::DevicePtr<const void> from,
                            size_t bytes) = 0;
  // Enqueues products of bf16 matrices in registers at the highest rate of
  // mma.sync, `steps` for each warp. Returns the number of operations. `out`
  // has MultipliedBytes.
  virtual absl::StatusOr<double> Multiply(kernels::Stream& stream,
                                          kernels::DevicePtr<float> out,
                                          uint32_t steps) = 0;
  virtual size_t MultipliedBytes(kernels::Stream& stream) const = 0;
};
// A clock for any device, by the host's clock. It waits at every mark, and
// copies and multiplies on the host. It shows that everything runs; its times
// mean little.
std::unique_ptr<DeviceClock> MakeHostClock();
// A clock for CUDA devices, by events of the calling thread's device (cuda.cc,
// only in builds with nvcc).
std::unique_ptr<DeviceClock> MakeCudaClock();

// Stop returns the errors of marks.
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
  // The part that follows each mark. Marks outside of Start and Stop (launches
  // that only count workspace) are forgotten.
  std::vector<worker::StepPart> parts_ = {worker::StepPart::kRest};
};

}  // namespace kvasir::bench
