// Helpers for the tests of ops: seeded data, poisoned outputs, and this
// machine's back ends and vector targets.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
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

namespace kvasir::kernels {

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

// Returns random numbers that depend only on the seed. `scale` is their
// standard deviation.
std::vector<float> RandomFloats(int64_t count, uint32_t seed,
                                float scale = 1.0f);

// An array of numbers in the type `dtype`, aligned to 64 bytes.
class StoredArray {
 public:
  StoredArray(const std::vector<float>& values, DType dtype);

  void* data();
  float at(int64_t index);

 private:
  DType dtype_;
  std::vector<char> bytes_;
};

// OnDevice treats a test's host memory as memory of the CPU device. Its second
// form converts all pointers in the parameters of an op.
template <typename T>
DevicePtr<T> OnDevice(T* pointer) {
  return DevicePtr<T>(pointer);
}
template <template <template <typename> class> class S>
S<DevicePtr> OnDevice(const S<LaunchPtr>& params) {
  return std::bit_cast<S<DevicePtr>>(params);
}

// A CPU device with a stream, threads and a workspace of its own.
class TestStream {
 public:
  explicit TestStream(int threads = 1, CpuBackend backend = CpuBackend::kSimd,
                      size_t workspace_bytes = size_t{16} << 20);
  ~TestStream();
  // Returns a single-threaded reference device whose pages are divided into
  // granules.
  static std::unique_ptr<TestStream> InGranules(int64_t granule_bytes);

  CpuDevice& device() { return *device_; }
  Stream& stream() { return *stream_; }
  // Returns the workspace; must be called again before every op. Each call
  // fills the workspace, alternately with NaN and with small numbers, so that
  // tests find an op that reads memory which it has not written.
  Workspace& workspace();

 private:
  static constexpr char kPoisons[2] = {'\xff', '\x3c'};

  base::ThreadPool pool_;
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<char> memory_;
  Workspace workspace_;
  size_t calls_ = 0;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b);

// Makes every op use this vector target; 0: the best target of this machine.
void UseSimdTarget(int64_t target);

// Calls test() once for every vector target that this machine can run, and then
// once with the automatic choice, which stays in effect.
template <typename Test>
void ForEachSimdTarget(Test&& test) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    UseSimdTarget(target);
    SCOPED_TRACE(hwy::TargetName(target));
    test();
  }
  // Some files are also compiled for a further target, which only the automatic
  // choice uses.
  UseSimdTarget(0);
  SCOPED_TRACE("the best target");
  test();
}

}  // namespace kvasir::kernels
