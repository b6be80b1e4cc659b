// Test support: EmulatedTest has a device and a stream for a test of kernels,
// and helpers that copy numbers to and from the device.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/device/dtype.h"
#include "kernels/device/read_back.h"
#include "kernels/device/workspace.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/emulation/testing/test_device.h"
#include "kernels/op_table/op_table.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels::emulation {

#if defined(__SANITIZE_THREAD__)  // gcc
inline constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
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
  // Returns the device's emulator. If tests run on a GPU, skips the rest of the
  // test instead.
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
  static Workspace WorkspaceOf(const DeviceBuffer& memory) {
    return Workspace(memory.data(), memory.bytes());
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

  // PutNumbers copies numbers to the device as activations of `dtype`;
  // GetNumbers copies them back.
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

// Returns `numbers`, rounded to `dtype`.
inline std::vector<float> Rounded(std::vector<float> numbers, DType dtype) {
  VisitDType(dtype, [&](auto type) {
    for (float& number : numbers) {
      number = ToFloat(FromFloat<decltype(type)>(number));
    }
  });
  return numbers;
}

// Returns the L2 norm of got - want, divided by the L2 norm of want.
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

// Returns the largest error of any row of `columns` numbers. A row's error is
// the larger of two: its RelativeNorm, and the largest error of one of its
// numbers. The latter is relative to the sum of the number's size and the row's
// root mean square.
inline double WorstError(const std::vector<float>& want,
                         const std::vector<float>& got, int64_t columns) {
  if (want.size() != got.size()) return INFINITY;
  const auto n = static_cast<size_t>(columns);
  double worst = 0.0;
  const auto take = [&](double error) {
    // An error of NaN counts as the worst.
    if (std::isnan(error) || error > worst) worst = error;
  };
  for (size_t row = 0; row < want.size(); row += n) {
    double square = 0.0;
    for (size_t i = row; i < row + n; ++i) {
      square += static_cast<double>(want[i]) * static_cast<double>(want[i]);
    }
    const double size = std::sqrt(square / static_cast<double>(n));
    double errors = 0.0;
    for (size_t i = row; i < row + n; ++i) {
      const double w = static_cast<double>(want[i]);
      const double d = static_cast<double>(got[i]) - w;
      if (d == 0.0) continue;
      errors += d * d;
      take(std::abs(d) / (std::abs(w) + size));
    }
    if (errors != 0.0) take(std::sqrt(errors / square));
  }
  return worst;
}

inline double ToleranceOf(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 1e-3 : 1e-2;
}

}  // namespace kvasir::kernels::emulation
