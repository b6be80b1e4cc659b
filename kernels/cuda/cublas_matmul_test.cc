// Tests the matmul op on a device that uses cuBLASLt: without a GPU, with a
// fake library that checks its arguments; on a GPU, with NVIDIA's library.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_cublaslt.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/linear/ops.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels {
namespace {

using emulation::Rounded;
using emulation::ToleranceOf;
using ::testing::IsEmpty;
using ::testing::SizeIs;

struct Case {
  DType x = DType::kBf16;
  DType w = DType::kBf16;
  DType y = DType::kBf16;
  int64_t rows = 1;
  int64_t k = 16;
  int64_t n = 8;
  bool bias = false;
  int64_t x_gap = 0;
  int64_t y_gap = 0;
  int64_t x_offset = 0;  // how many numbers precede x in its memory
};

class CublasMatmulTest : public ::testing::Test {
 protected:
  CublasMatmulTest() {
    if (emulation::OnGpu()) {
      device_ = emulation::MakeTestDevice({});
    } else {
      runtime_.OnRun(
          [this](const KernelLaunch& launch) { emulator_.Run(launch); });
      device_ = OverFakes({});
    }
    stream_ = device_->MakeStream();
  }

  std::unique_ptr<Device> OverFakes(const CudaDeviceOptions& options) {
    auto device = CudaDevice::Make(options, &runtime_, emulated::Ops(), [this] {
      return absl::StatusOr<cuda::CublasLt*>(&library_);
    });
    KVASIR_EXPECT_OK(device.status());
    return *std::move(device);
  }

  DeviceBuffer Put(const std::vector<float>& numbers, DType dtype) {
    return VisitDType(dtype, [&](auto type) {
      using T = decltype(type);
      std::vector<T> stored;
      for (const float number : numbers) stored.push_back(FromFloat<T>(number));
      auto buffer = device_->allocator().Allocate(stored.size() * sizeof(T),
                                                  MemoryTag::kOther);
      KVASIR_EXPECT_OK(buffer.status());
      KVASIR_EXPECT_OK(
          device_->Write(buffer->data(), stored.data(), buffer->bytes()));
      return *std::move(buffer);
    });
  }

  // Returns y, including the gaps between its rows.
  std::vector<float> Multiply(const Case& c) {
    std::vector<float> x(
        static_cast<size_t>(c.x_offset + c.rows * (c.k + c.x_gap)), kPoison);
    const auto numbers = Rounded(RandomFloats(c.rows * c.k, 1), c.x);
    for (int64_t t = 0; t < c.rows; ++t) {
      std::copy_n(numbers.begin() + t * c.k, c.k,
                  x.begin() + c.x_offset + t * (c.k + c.x_gap));
    }
    const DeviceBuffer x_memory = Put(x, c.x);
    const DeviceBuffer w = Put(RandomFloats(c.n * c.k, 2), c.w);
    const DeviceBuffer bias = Put(RandomFloats(c.n, 3), DType::kF32);
    std::vector<float> y(static_cast<size_t>(c.rows * (c.n + c.y_gap)),
                         kPoison);
    const DeviceBuffer y_memory = Put(y, c.y);
    MatmulParams params;
    params.x =
        (x_memory.as<char>() + c.x_offset * DTypeBytes(c.x)).as<const float>();
    params.x_row_stride = c.k + c.x_gap;
    params.num_rows = c.rows;
    params.weight = {w.data(), c.k, c.n, c.w, WeightLayout::kRows};
    if (c.bias) params.bias = bias.as<float>();
    params.y = y_memory.as<float>();
    params.y_row_stride = c.n + c.y_gap;
    params.dtype = c.x;
    params.y_dtype = c.y;
    Workspace counter = Workspace::Counting();
    KVASIR_EXPECT_OK(Matmul(*stream_, params, counter));
    scratch_bytes_ = counter.peak_bytes();
    auto scratch = device_->allocator().Allocate(
        scratch_bytes_ + Workspace::kAlignmentBytes, MemoryTag::kOther);
    KVASIR_EXPECT_OK(scratch.status());
    // After other ops have taken memory, the workspace may begin at an address
    // that is not a multiple of 256.
    Workspace workspace(scratch->data().as<char>() + 64, scratch_bytes_);
    KVASIR_EXPECT_OK(Matmul(*stream_, params, workspace));
    VisitDType(c.y, [&](auto type) {
      std::vector<decltype(type)> stored(y.size());
      KVASIR_EXPECT_OK(
          ReadBack(*stream_, stored.data(), y_memory.data(), y_memory.bytes()));
      for (size_t i = 0; i < y.size(); ++i) y[i] = ToFloat(stored[i]);
    });
    return y;
  }

  // Compares matmul with a product in float64. Each row has its own tolerance.
  void ExpectProduct(const Case& c) {
    SCOPED_TRACE(testing::Message()
                 << c.rows << " x " << c.k << " x " << c.n << ", "
                 << DTypeName(c.x) << " by " << DTypeName(c.w) << " to "
                 << DTypeName(c.y));
    const std::vector<float> got = Multiply(c);
    const auto x = Rounded(RandomFloats(c.rows * c.k, 1), c.x);
    const auto w = Rounded(RandomFloats(c.n * c.k, 2), c.w);
    const auto bias = RandomFloats(c.n, 3);
    for (int64_t t = 0; t < c.rows; ++t) {
      std::vector<float> want, row;
      for (int64_t n = 0; n < c.n; ++n) {
        double sum =
            c.bias ? static_cast<double>(bias[static_cast<size_t>(n)]) : 0.0;
        for (int64_t k = 0; k < c.k; ++k) {
          sum += static_cast<double>(x[static_cast<size_t>(t * c.k + k)]) *
                 static_cast<double>(w[static_cast<size_t>(n * c.k + k)]);
        }
        want.push_back(static_cast<float>(sum));
        row.push_back(got[static_cast<size_t>(t * (c.n + c.y_gap) + n)]);
      }
      ASSERT_LE(emulation::RelativeNorm(want, row), ToleranceOf(c.y)) << t;
      for (int64_t i = c.n; i < c.n + c.y_gap; ++i) {
        ASSERT_TRUE(
            std::isnan(got[static_cast<size_t>(t * (c.n + c.y_gap) + i)]))
            << t << ", column " << i << " after the end of the row";
      }
    }
  }

  // Returns how often our own kernel with this name was launched.
  int KernelsCalled(const std::string& name) const {
    int count = 0;
    for (const cuda::FakeLaunch& launch : runtime_.launches()) {
      count += launch.launch.name == name;
    }
    return count;
  }

  emulation::Emulator emulator_{{}};
  cuda::FakeRuntime runtime_;
  cuda::FakeCublasLt library_{&runtime_};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  size_t scratch_bytes_ = 0;
};

TEST_F(CublasMatmulTest, TheMatmulResultIsCorrectForEverySupportedNumberType) {
  size_t products = 0;
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const DType y : {dtype, DType::kF32}) {
      for (const bool bias : {false, true}) {
        ExpectProduct({dtype, dtype, y, 1, 8, 8, bias});
        ExpectProduct({dtype, dtype, y, 5, 40, 48, bias});
        ExpectProduct({dtype, dtype, y, 3, 24, 13, bias, 8, 3});  // N is odd
        ExpectProduct({dtype, dtype, y, 70, 16, 24, bias, 16, 8});
        products += 4;
      }
    }
  }
  if (emulation::OnGpu()) return;
  EXPECT_THAT(library_.multiplied(), SizeIs(products));
  // If y is float32, the library uses the float32 bias as it is. Otherwise our
  // kernel matmul_bias first converts the bias.
  EXPECT_EQ(KernelsCalled("matmul_bias"), 8);
  EXPECT_THAT(runtime_.launches(), SizeIs(8));
}

TEST_F(CublasMatmulTest, KvasirKernelsComputeProductsThatCublasDoesNotSupport) {
  const DType bf16 = DType::kBf16, f32 = DType::kF32;
  const std::pair<Case, const char*> cases[] = {
      // Rows of K = 12 numbers are not aligned.
      {{bf16, bf16, bf16, 3, 12, 8, true}, "matmul_few_rows"},
      // The gaps make rows of x unaligned.
      {{bf16, bf16, bf16, 3, 16, 8, true, 4}, "matmul_few_rows"},
      // Rows of N = 13 numbers are not aligned.
      {{bf16, bf16, bf16, 3, 16, 13, true}, "matmul_few_rows"},
      // The gaps make rows of y unaligned.
      {{bf16, bf16, f32, 3, 16, 8, true, 0, 2}, "matmul_few_rows"},
      {{bf16, bf16, bf16, 3, 16, 8, true, 0, 0, 4}, "matmul_few_rows"},
      {{bf16, f32, bf16, 3, 16, 8, true}, "matmul_chain"},
      {{f32, bf16, f32, 3, 16, 8, true}, "matmul_chain"},
      {{f32, f32, f32, 3, 16, 8, true}, "matmul_chain"}};
  int few = 0, chain = 0;
  for (const auto& [c, kernel] : cases) {
    ExpectProduct(c);
    EXPECT_EQ(scratch_bytes_, 0u);
    if (emulation::OnGpu()) continue;
    ++(std::string(kernel) == "matmul_chain" ? chain : few);
    EXPECT_EQ(KernelsCalled("matmul_few_rows"), few);
    EXPECT_EQ(KernelsCalled("matmul_chain"), chain);
  }
  EXPECT_THAT(library_.multiplied(), IsEmpty());
}

TEST_F(CublasMatmulTest, TheWorkspaceOfCublasIsPartOfTheScratchMemoryOfMatmul) {
  ExpectProduct({.rows = 3, .n = 136, .bias = true});
  if (emulation::OnGpu()) return;
  // 136 numbers of bias take 272 bytes, which are rounded up to 512.
  EXPECT_EQ(scratch_bytes_, 256u + 512u + (32u << 20));
  // This product needs all of the workspace.
  library_.NeedWorkspace(32 << 20);
  ExpectProduct({.rows = 4, .n = 136, .bias = true});
}

TEST_F(CublasMatmulTest, AProductOfZeroRowsDoesNotCallCublas) {
  (void)Multiply({.rows = 0});
  if (emulation::OnGpu()) return;
  EXPECT_EQ(library_.calls("Choose"), 0);
}

TEST_F(CublasMatmulTest, ADeterministicDeviceUsesKvasirKernelsInsteadOfCublas) {
  if (emulation::OnGpu()) GTEST_SKIP() << "the tests share one GPU";
  stream_.reset();
  device_ = OverFakes({.deterministic = true});
  stream_ = device_->MakeStream();
  ExpectProduct({.rows = 5, .k = 40, .n = 48, .bias = true});
  EXPECT_EQ(KernelsCalled("matmul_few_rows"), 1);
  EXPECT_THAT(library_.multiplied(), IsEmpty());
}

}  // namespace
}  // namespace kvasir::kernels
