#include "kernels/cuda/testing/fake_cublaslt.h"

#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvasir::kernels::cuda {
namespace {

constexpr uint64_t kMark = 0x6b7661736972;  // Choose sets word 1 to this

float NumberAt(const void* numbers, DType dtype, int64_t i) {
  return VisitDType(dtype, [&](auto type) {
    return ToFloat(static_cast<const decltype(type)*>(numbers)[i]);
  });
}

void ExpectSense(const GemmShape& shape) {
  EXPECT_GT(shape.rows, 0);
  EXPECT_GT(shape.n, 0);
  EXPECT_GT(shape.k, 0);
  EXPECT_GE(shape.x_row_stride, shape.k);
  EXPECT_GE(shape.y_row_stride, shape.n);
  EXPECT_NE(shape.dtype, DType::kF32);
  EXPECT_TRUE(shape.y_dtype == DType::kF32 || shape.y_dtype == shape.dtype);
  const auto whole = [](int64_t stride, DType dtype) {
    return stride * DTypeBytes(dtype) % 16 == 0;
  };
  EXPECT_TRUE(whole(shape.k, shape.dtype)) << shape.k;
  EXPECT_TRUE(whole(shape.x_row_stride, shape.dtype)) << shape.x_row_stride;
  EXPECT_TRUE(whole(shape.y_row_stride, shape.y_dtype)) << shape.y_row_stride;
}

void Product(const Gemm& gemm) {
  for (int64_t t = 0; t < gemm.rows; ++t) {
    for (int64_t n = 0; n < gemm.n; ++n) {
      // Adds in reverse order, so that tests can tell these sums from those of
      // our kernels.
      float sum = 0.0f;
      for (int64_t k = gemm.k - 1; k >= 0; --k) {
        sum += NumberAt(gemm.x, gemm.dtype, t * gemm.x_row_stride + k) *
               NumberAt(gemm.weight, gemm.dtype, n * gemm.k + k);
      }
      if (gemm.bias != nullptr) sum += NumberAt(gemm.bias, gemm.y_dtype, n);
      VisitDType(gemm.y_dtype, [&](auto type) {
        using Y = decltype(type);
        static_cast<Y*>(gemm.y)[t * gemm.y_row_stride + n] = FromFloat<Y>(sum);
      });
    }
  }
}

}  // namespace

FakeCublasLt::~FakeCublasLt() {
  base::MutexLock lock(&mutex_);
  EXPECT_EQ(handles_.size(), 0u) << "handles were not destroyed";
}

void FakeCublasLt::NeedWorkspace(size_t bytes) {
  base::MutexLock lock(&mutex_);
  workspace_bytes_ = bytes;
}
void FakeCublasLt::FailNext(const std::string& call, CublasResult result) {
  base::MutexLock lock(&mutex_);
  failures_[call] = result;
}
int64_t FakeCublasLt::calls(const std::string& call) const {
  base::MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}
std::vector<GemmShape> FakeCublasLt::multiplied() const {
  base::MutexLock lock(&mutex_);
  return multiplied_;
}
std::vector<Gemm> FakeCublasLt::gemms() const {
  base::MutexLock lock(&mutex_);
  return gemms_;
}

CublasResult FakeCublasLt::Begin(const std::string& call) {
  ++calls_[call];
  const auto found = failures_.find(call);
  if (found == failures_.end()) return CublasResult::kOk;
  const CublasResult result = found->second;
  failures_.erase(found);
  return result;
}

std::string FakeCublasLt::Describe(CublasResult result) {
  return absl::StrCat("CUBLAS_STATUS_FAKE (", static_cast<int>(result), ")");
}
CublasResult FakeCublasLt::MakeHandle(CublasHandle* handle) {
  base::MutexLock lock(&mutex_);
  const CublasResult result = Begin("MakeHandle");
  if (result != CublasResult::kOk) return result;
  *handle = reinterpret_cast<CublasHandle>(&made_.emplace_back());
  handles_.insert(*handle);
  return result;
}
CublasResult FakeCublasLt::DestroyHandle(CublasHandle handle) {
  base::MutexLock lock(&mutex_);
  EXPECT_EQ(handles_.erase(handle), 1u) << "the handle does not exist";
  return CublasResult::kOk;
}

CublasResult FakeCublasLt::Choose(CublasHandle handle, const GemmShape& shape,
                                  size_t most_workspace_bytes,
                                  GemmAlgorithm* algorithm) {
  base::MutexLock lock(&mutex_);
  EXPECT_EQ(handles_.count(handle), 1u) << "the handle does not exist";
  ExpectSense(shape);
  const CublasResult result = Begin("Choose");
  if (result != CublasResult::kOk) return result;
  EXPECT_LE(workspace_bytes_, most_workspace_bytes);
  algorithm->data[0] = chosen_.size();
  algorithm->data[1] = kMark;
  algorithm->workspace_bytes = workspace_bytes_;
  chosen_.push_back(shape);
  return result;
}

CublasResult FakeCublasLt::Multiply(CublasHandle handle, const GemmShape& shape,
                                    const Gemm& gemm,
                                    const GemmAlgorithm& algorithm,
                                    StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  EXPECT_EQ(handles_.count(handle), 1u) << "the handle does not exist";
  const CublasResult result = Begin("Multiply");
  if (result != CublasResult::kOk) return result;
  const bool known =
      algorithm.data[1] == kMark && algorithm.data[0] < chosen_.size();
  EXPECT_TRUE(known) << "the algorithm was not returned by Choose";
  EXPECT_TRUE(known && chosen_[algorithm.data[0]] == shape)
      << "the algorithm was chosen for another shape";
  EXPECT_TRUE((GemmShape{gemm.rows, gemm.n, gemm.k, gemm.x_row_stride,
                         gemm.y_row_stride, gemm.dtype, gemm.y_dtype,
                         gemm.bias != nullptr} == shape))
      << "the product does not have the shape that was passed";
  bool there = true;
  const auto expect = [&](const char* what, const void* memory, int64_t bytes,
                          uintptr_t alignment) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % alignment, 0u) << what;
    const bool in =
        runtime_->IsDeviceMemory(memory, static_cast<size_t>(bytes));
    EXPECT_TRUE(in) << what << " is not completely in device memory";
    there = there && in;
  };
  const auto extent = [](int64_t rows, int64_t stride, int64_t columns,
                         DType dtype) {
    return ((rows - 1) * stride + columns) * DTypeBytes(dtype);
  };
  expect("x", gemm.x, extent(gemm.rows, gemm.x_row_stride, gemm.k, gemm.dtype),
         16);
  expect("W", gemm.weight, extent(gemm.n, gemm.k, gemm.k, gemm.dtype), 16);
  expect("y", gemm.y,
         extent(gemm.rows, gemm.y_row_stride, gemm.n, gemm.y_dtype), 16);
  if (gemm.bias != nullptr) {
    expect("bias", gemm.bias, gemm.n * DTypeBytes(gemm.y_dtype), 16);
  }
  expect("workspace", gemm.workspace,
         static_cast<int64_t>(algorithm.workspace_bytes), 256);
  multiplied_.push_back(shape);
  gemms_.push_back(gemm);
  if (!there) return result;
  runtime_->Enqueue(stream, [gemm, bytes = algorithm.workspace_bytes] {
    // Overwrites the workspace, so that no caller can rely on its contents.
    std::memset(gemm.workspace, 0xff, bytes);
    Product(gemm);
  });
  return result;
}

}  // namespace kvasir::kernels::cuda
