#include "kernels/testing/op_test_util.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "kernels/testing/granule_device.h"

namespace kvasir::kernels {

std::vector<float> RandomFloats(int64_t count, uint32_t seed, float scale) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

StoredArray::StoredArray(const std::vector<float>& values, DType dtype)
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

void* StoredArray::data() {
  const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
  return bytes_.data() + (64 - address % 64) % 64;
}

float StoredArray::at(int64_t index) {
  return VisitDType(dtype_, [&](auto type) {
    return ToFloat(static_cast<const decltype(type)*>(data())[index]);
  });
}

TestStream::TestStream(int threads, CpuBackend backend, size_t workspace_bytes)
    : pool_(threads),
      device_(std::make_unique<CpuDevice>(&pool_, backend)),
      stream_(device_->MakeStream()),
      memory_(workspace_bytes, kPoisons[0]),
      workspace_(OnDevice(memory_.data()), memory_.size()) {}

TestStream::~TestStream() = default;

std::unique_ptr<TestStream> TestStream::InGranules(int64_t granule_bytes) {
  auto test = std::make_unique<TestStream>(1, CpuBackend::kReference);
  test->device_ = std::make_unique<GranuleDevice>(&test->pool_, granule_bytes);
  test->stream_ = test->device_->MakeStream();
  return test;
}

Workspace& TestStream::workspace() {
  const size_t used = workspace_.peak_bytes() + Workspace::kAlignmentBytes;
  std::fill_n(memory_.begin(),
              static_cast<int64_t>(std::min(used, memory_.size())),
              kPoisons[calls_++ % 2]);
  return workspace_;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() ||
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void UseSimdTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace kvasir::kernels
