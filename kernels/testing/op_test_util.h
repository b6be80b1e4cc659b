// Helpers of the op tests: seeded data, poisoned outputs, the back ends and the
// vector targets of this machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/device/device.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/testing/granule_device.h"

namespace kvasir::kernels {

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// Fresh numbers for a seed; `scale` is their standard deviation.
inline std::vector<float> RandomFloats(int64_t count, uint32_t seed,
                                       float scale = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// The stored form of `values`, 64-byte aligned.
class StoredArray {
 public:
  StoredArray(const std::vector<float>& values, DType dtype)
      : dtype_(dtype),
        bytes_(values.size() * static_cast<size_t>(DTypeBytes(dtype)) + 64) {
    VisitDType(dtype, [&](auto type) {
      using T = decltype(type);
      auto* out = static_cast<T*>(data());
      for (size_t i = 0; i < values.size(); ++i) {
        const T stored = FromFloat<T>(values[i]);
        std::memcpy(out + i, &stored, sizeof(T));
      }
    });
  }

  void* data() {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (64 - address % 64) % 64;
  }
  float at(int64_t index) {
    return VisitDType(dtype_, [&](auto type) {
      return ToFloat(static_cast<const decltype(type)*>(data())[index]);
    });
  }

 private:
  DType dtype_;
  std::vector<char> bytes_;
};

// Memory of a test, as that of the CPU's device; parameters of it likewise.
template <typename T>
DevicePtr<T> OnDevice(T* pointer) {
  return DevicePtr<T>(pointer);
}
template <template <template <typename> class> class S>
S<DevicePtr> OnDevice(const S<LaunchPtr>& params) {
  return std::bit_cast<S<DevicePtr>>(params);
}

// A device of test memory: its stream, its threads, and memory for workspace.
class TestStream {
 public:
  explicit TestStream(int threads = 1, CpuBackend backend = CpuBackend::kSimd,
                      size_t workspace_bytes = size_t{16} << 20)
      : pool_(threads),
        device_(std::make_unique<CpuDevice>(&pool_, backend)),
        stream_(device_->MakeStream()),
        memory_(workspace_bytes, kPoisons[0]),
        workspace_(OnDevice(memory_.data()), memory_.size()) {}
  // Of one thread, the reference, on pages in granules.
  static std::unique_ptr<TestStream> InGranules(int64_t granule_bytes) {
    auto test = std::make_unique<TestStream>(1, CpuBackend::kReference);
    test->device_ =
        std::make_unique<GranuleDevice>(&test->pool_, granule_bytes);
    test->stream_ = test->device_->MakeStream();
    return test;
  }

  CpuDevice& device() { return *device_; }
  Stream& stream() { return *stream_; }
  // For one op, which finds what it has not written yet full of NaN or, in the
  // next call, of small numbers.
  Workspace& workspace() {
    const size_t used = workspace_.peak_bytes() + Workspace::kAlignmentBytes;
    std::fill_n(memory_.begin(),
                static_cast<int64_t>(std::min(used, memory_.size())),
                kPoisons[calls_++ % 2]);
    return workspace_;
  }

 private:
  static constexpr char kPoisons[2] = {'\xff', '\x3c'};

  base::ThreadPool pool_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<char> memory_;
  Workspace workspace_;
  size_t calls_ = 0;
};

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() ||
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Every op runs `target` from now on; 0: the best that this machine has.
inline void UseSimdTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Calls test() once for every vector target that this machine can run, and
// restores automatic choice afterwards.
template <typename Test>
void ForEachSimdTarget(Test&& test) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    UseSimdTarget(target);
    SCOPED_TRACE(hwy::TargetName(target));
    test();
  }
  UseSimdTarget(0);
}

}  // namespace kvasir::kernels
