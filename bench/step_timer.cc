#include "bench/step_timer.h"

#include <chrono>
#include <cstddef>

#include "base/status_macros.h"
#include "kernels/device/read_back.h"

namespace kvasir::bench {
namespace {

class HostClock final : public DeviceClock {
 public:
  absl::Status Mark(kernels::Stream& stream) override {
    KVASIR_RETURN_IF_ERROR(stream.Synchronize());
    marks_.push_back(std::chrono::steady_clock::now());
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<double>> Take(kernels::Stream&) override {
    std::vector<double> seconds;
    for (size_t i = 1; i < marks_.size(); ++i) {
      const std::chrono::duration<double> took = marks_[i] - marks_[i - 1];
      seconds.push_back(took.count());
    }
    marks_.clear();
    return seconds;
  }
  absl::Status Copy(kernels::Stream& stream, kernels::DevicePtr<void> to,
                    kernels::DevicePtr<const void> from,
                    size_t bytes) override {
    std::vector<char> host(bytes);
    KVASIR_RETURN_IF_ERROR(kernels::ReadBack(stream, host.data(), from, bytes));
    return kernels::Upload(stream, to, host.data(), bytes);
  }
  absl::StatusOr<double> Multiply(kernels::Stream& stream,
                                  kernels::DevicePtr<float> out,
                                  uint32_t steps) override {
    constexpr uint32_t kProducts = 4096;
    float sum = 0.0f;
    for (uint32_t i = 0; i < steps * kProducts; ++i) {
      sum = sum * 0.5f + 1.0f;
    }
    KVASIR_RETURN_IF_ERROR(kernels::Upload(stream, out, &sum, sizeof(sum)));
    return 2.0 * kProducts * steps;
  }
  size_t MultipliedBytes(kernels::Stream&) const override {
    return sizeof(float);
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> marks_;
};

}  // namespace

std::unique_ptr<DeviceClock> MakeHostClock() {
  return std::make_unique<HostClock>();
}

absl::Status DeviceStepTimer::Start(kernels::Stream& stream) {
  status_ = absl::OkStatus();
  parts_ = {worker::StepPart::kRest};
  KVASIR_RETURN_IF_ERROR(clock_->Take(stream).status());
  return clock_->Mark(stream);
}

worker::StepPart DeviceStepTimer::Enter(kernels::Stream& stream,
                                        worker::StepPart part) {
  const worker::StepPart before = parts_.back();
  status_.Update(clock_->Mark(stream));
  parts_.push_back(part);
  return before;
}

absl::StatusOr<StepTimer::Seconds> DeviceStepTimer::Stop(
    kernels::Stream& stream) {
  KVASIR_RETURN_IF_ERROR(status_);
  KVASIR_RETURN_IF_ERROR(clock_->Mark(stream));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<double> took, clock_->Take(stream));
  Seconds seconds = {};
  for (size_t i = 0; i < parts_.size(); ++i) {
    seconds[static_cast<size_t>(parts_[i])] += took[i];
  }
  return seconds;
}

}  // namespace kvasir::bench
