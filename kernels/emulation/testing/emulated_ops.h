// Test support: memory of the device of a test by its numbers.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/device/dtype.h"
#include "kernels/device/read_back.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/emulation/testing/test_device.h"
#include "kernels/simt/op_table.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels::emulation {

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
#else
inline constexpr bool kThreadSanitizer = false;
#endif

class EmulatedTest {
 public:
  explicit EmulatedTest(uint64_t seed = 1, int multiprocessors = 4,
                        bool count_accesses = false)
      : EmulatedTest(EmulatorOptions{seed, multiprocessors, count_accesses}) {}
  explicit EmulatedTest(const EmulatorOptions& options)
      : device_(MakeTestDevice(options)), stream_(device_->MakeStream()) {}

  Device& device() { return *device_; }
  // On a GPU the test is skipped from here on.
  Emulator& emulator() {
    if (OnGpu()) SkipWithoutEmulator();
    return static_cast<EmulatedDevice&>(*device_).emulator();
  }
  Stream& stream() { return *stream_; }
  Launcher& launcher() {
    return static_cast<LaunchStream&>(*stream_).launcher();
  }

  DeviceBuffer Memory(size_t bytes) {
    auto buffer = device_->allocator().Allocate(bytes, MemoryTag::kOther);
    KVASIR_EXPECT_OK(buffer.status());
    return *std::move(buffer);
  }
  template <typename T>
  DeviceBuffer Put(const std::vector<T>& host) {
    DeviceBuffer buffer = Memory(host.size() * sizeof(T));
    KVASIR_EXPECT_OK(
        device_->Write(buffer.data(), host.data(), buffer.bytes()));
    return buffer;
  }
  template <typename T>
  std::vector<T> Get(const DeviceBuffer& buffer) {
    std::vector<T> host(buffer.bytes() / sizeof(T));
    KVASIR_EXPECT_OK(
        ReadBack(*stream_, host.data(), buffer.data(), buffer.bytes()));
    return host;
  }

  // Numbers as activations of `dtype`, and back.
  DeviceBuffer PutNumbers(const std::vector<float>& numbers, DType dtype) {
    return VisitDType(dtype, [&](auto type) {
      std::vector<decltype(type)> stored;
      stored.reserve(numbers.size());
      for (const float number : numbers) {
        stored.push_back(FromFloat<decltype(type)>(number));
      }
      return Put(stored);
    });
  }
  std::vector<float> GetNumbers(const DeviceBuffer& buffer, DType dtype) {
    return VisitDType(dtype, [&](auto type) {
      std::vector<float> numbers;
      for (const auto stored : Get<decltype(type)>(buffer)) {
        numbers.push_back(ToFloat(stored));
      }
      return numbers;
    });
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

// What is stored of `numbers`.
inline std::vector<float> Rounded(std::vector<float> numbers, DType dtype) {
  VisitDType(dtype, [&](auto type) {
    for (float& number : numbers) {
      number = ToFloat(FromFloat<decltype(type)>(number));
    }
  });
  return numbers;
}

// |got - want| / |want|; 0 where there is nothing.
inline double RelativeNorm(const std::vector<float>& want,
                           const std::vector<float>& got) {
  if (want.size() != got.size()) return INFINITY;
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double w = static_cast<double>(want[i]);
    const double d = static_cast<double>(got[i]) - w;
    error += d * d;
    norm += w * w;
  }
  return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

inline double ToleranceOf(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 1e-3 : 1e-2;
}

}  // namespace kvasir::kernels::emulation
