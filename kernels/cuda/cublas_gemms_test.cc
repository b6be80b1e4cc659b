// Tests how CublasGemms uses cuBLASLt, with a fake library and without a GPU.
#include "kernels/cuda/cublas_gemms.h"

#include <gmock/gmock.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/testing/fake_cublaslt.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/device/read_back.h"

namespace kvasir::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kNotSupported = static_cast<CublasResult>(15);

class CublasGemmsTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<CudaDevice>> MakeDevice(
      const CudaDeviceOptions& options = {}) {
    return CudaDevice::Make(options, &runtime_, {}, [this] {
      ++opened_;
      return absl::StatusOr<CublasLt*>(&library_);
    });
  }
  void Make(const CudaDeviceOptions& options = {}) {
    auto device = MakeDevice(options);
    KVASIR_ASSERT_OK(device.status());
    device_ = *std::move(device);
    stream_ = device_->MakeStream();
    auto memory = device_->allocator().Allocate(kMatrices + (size_t{32} << 20),
                                                MemoryTag::kOther);
    KVASIR_ASSERT_OK(memory.status());
    memory_ = *std::move(memory);
    // Fills the memory of all matrices with ones in bfloat16.
    const std::vector<uint16_t> ones(kMatrices / 2, 0x3f80);
    KVASIR_ASSERT_OK(device_->Write(memory_.data(), ones.data(), kMatrices));
  }
  LaunchStream& launches() { return static_cast<LaunchStream&>(*stream_); }
  GemmLibrary* gemms() { return launches().launcher().gemms(); }

  // The bytes of x, W, bias and y together. They lie one after the other in
  // memory_, followed by the workspace.
  static constexpr size_t kMatrices = 64 << 10;
  Gemm Product(int64_t rows, int64_t n = 8, int64_t k = 16) {
    auto* const begin = static_cast<char*>(memory_.data().device_address());
    Gemm gemm;
    gemm.x = begin;
    gemm.x_row_stride = k;
    gemm.weight = begin + (16 << 10);
    gemm.bias = begin + (32 << 10);
    gemm.y = begin + (48 << 10);
    gemm.y_row_stride = n;
    gemm.rows = rows;
    gemm.n = n;
    gemm.k = k;
    gemm.workspace = begin + kMatrices;
    return gemm;
  }
  absl::Status Multiply(const Gemm& gemm) {
    gemms()->Enqueue(gemm);
    return launches().TakeLaunchError();
  }

  FakeRuntime runtime_;
  FakeCublasLt library_{&runtime_};
  int opened_ = 0;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<Stream> stream_;
  DeviceBuffer memory_;
};

TEST_F(CublasGemmsTest, MatrixProductsRunInTheOrderOfTheStream) {
  Make();
  KVASIR_ASSERT_OK(Multiply(Product(2)));
  EXPECT_EQ(runtime_.waiting(), 1u);
  std::vector<uint16_t> y(2 * 8);
  KVASIR_ASSERT_OK(ReadBack(*stream_, y.data(),
                            memory_.data().as<char>() + (48 << 10),
                            y.size() * 2));
  for (const uint16_t bits : y) {
    // The sum of 16 products 1 * 1, plus the bias 1.
    EXPECT_EQ(ToFloat(Bf16{bits}), 17.0f);
  }
}

TEST_F(CublasGemmsTest, AnAlgorithmIsChosenOnlyOncePerMatrixShape) {
  Make();
  for (int i = 0; i < 3; ++i) KVASIR_ASSERT_OK(Multiply(Product(2)));
  EXPECT_EQ(library_.calls("Choose"), 1);
  // Each product from here on has another shape, so an algorithm must be
  // chosen for it. FakeCublasLt fails the test if an algorithm of another
  // shape is used.
  Gemm gemm = Product(2);
  gemm.bias = nullptr;
  KVASIR_ASSERT_OK(Multiply(gemm));
  gemm.x_row_stride = 24;
  KVASIR_ASSERT_OK(Multiply(gemm));
  gemm.y_row_stride = 16;
  KVASIR_ASSERT_OK(Multiply(gemm));
  gemm.y_dtype = DType::kF32;
  KVASIR_ASSERT_OK(Multiply(gemm));
  gemm.dtype = DType::kF16;
  KVASIR_ASSERT_OK(Multiply(gemm));
  KVASIR_ASSERT_OK(Multiply(Product(3)));
  KVASIR_ASSERT_OK(Multiply(Product(2, 16)));
  KVASIR_ASSERT_OK(Multiply(Product(2, 8, 24)));
  EXPECT_EQ(library_.calls("Choose"), 9);
  KVASIR_ASSERT_OK(Multiply(Product(2)));
  EXPECT_EQ(library_.calls("Choose"), 9);
}

TEST_F(CublasGemmsTest, AllThreadsShareTheAlgorithmsThatWereChosen) {
  Make();
  // Threads share only the chosen algorithms: each product writes to memory of
  // its own stream.
  const auto workspace_bytes = static_cast<size_t>(gemms()->workspace_bytes());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this, workspace_bytes] {
      const auto stream = device_->MakeStream();
      auto& launches = static_cast<LaunchStream&>(*stream);
      auto written = device_->allocator().Allocate(workspace_bytes + kMatrices,
                                                   MemoryTag::kOther);
      KVASIR_ASSERT_OK(written.status());
      for (int64_t rows = 1; rows <= 8; ++rows) {
        Gemm gemm = Product(rows);
        gemm.workspace = written->data().device_address();
        gemm.y = static_cast<char*>(gemm.workspace) + workspace_bytes;
        launches.launcher().gemms()->Enqueue(gemm);
        KVASIR_EXPECT_OK(launches.TakeLaunchError());
      }
      KVASIR_EXPECT_OK(stream->Synchronize());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(library_.calls("Choose"), 8);
  EXPECT_EQ(library_.calls("Multiply"), 32);
}

TEST_F(CublasGemmsTest, TheNumberOfCachedAlgorithmsIsLimited) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto gemms,
                              CublasGemms::Make(&library_, 9));
  library_.NeedWorkspace(0);
  StreamHandle stream;
  ASSERT_EQ(runtime_.MakeStream(&stream), Result::kOk);
  constexpr int64_t kMost{CublasGemms::kMostShapes};
  void* memory = nullptr;
  ASSERT_EQ(runtime_.Allocate(&memory, 16), Result::kOk);
  Gemm gemm;
  gemm.x = memory;
  gemm.weight = memory;
  gemm.y = memory;
  gemm.workspace = memory;
  gemm.rows = 1;
  gemm.n = 1;
  gemm.k = 8;
  gemm.y_row_stride = 8;
  for (int64_t i = 1; i <= kMost + 1; ++i) {
    gemm.x_row_stride = 8 * i;
    KVASIR_ASSERT_OK(gemms->Enqueue(gemm, stream));
    ASSERT_LE(gemms->known_shapes(), CublasGemms::kMostShapes);
  }
  EXPECT_EQ(gemms->known_shapes(), 1u);
  runtime_.SynchronizeStream(stream);
  runtime_.DestroyStream(stream);
  runtime_.Free(memory);
}

TEST_F(CublasGemmsTest, AMatrixProductForWhichCublasHasNoAlgorithmIsRefused) {
  Make();
  library_.FailNext("Choose", kNotSupported);
  EXPECT_THAT(
      Multiply(Product(2)),
      base::StatusIs(absl::StatusCode::kUnimplemented,
                     AllOf(HasSubstr("matmul: cuBLASLt 130101: no algorithm"),
                           HasSubstr("2 rows, n 8, k 16, BF16 to BF16 with "
                                     "bias (with --deterministic"),
                           HasSubstr("CUBLAS_STATUS_FAKE (15)"))));
  // The failure must not be remembered for this shape: the next call chooses an
  // algorithm again.
  KVASIR_EXPECT_OK(Multiply(Product(2)));
}

TEST_F(CublasGemmsTest, AFailedMatrixProductIsReportedAsTheErrorOfItsStream) {
  Make();
  library_.FailNext("Multiply", static_cast<CublasResult>(13));
  gemms()->Enqueue(Product(2));
  gemms()->Enqueue(Product(3));  // must not run, because of the earlier error
  EXPECT_EQ(library_.calls("Multiply"), 1);
  EXPECT_THAT(launches().TakeLaunchError(),
              base::StatusIs(absl::StatusCode::kInternal,
                             AllOf(HasSubstr("a product of 2 rows"),
                                   HasSubstr("CUBLAS_STATUS_FAKE (13)"))));
  KVASIR_EXPECT_OK(Multiply(Product(2)));
}

TEST_F(CublasGemmsTest, AFailureToStartCublasIsReported) {
  library_.FailNext("MakeHandle", static_cast<CublasResult>(1));
  EXPECT_THAT(
      MakeDevice().status(),
      base::StatusIs(
          absl::StatusCode::kInternal,
          HasSubstr(
              "cuBLASLt 130101 cannot be started: CUBLAS_STATUS_FAKE (1)")));
}

TEST_F(CublasGemmsTest, ADeterministicDeviceDoesNotOpenCublas) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto device,
                              MakeDevice({.deterministic = true}));
  EXPECT_EQ(opened_, 0);
  EXPECT_EQ(
      static_cast<LaunchStream&>(*device->MakeStream()).launcher().gemms(),
      nullptr);
  EXPECT_EQ(device->numerics(), "cuda-sm90");
  EXPECT_TRUE(device->rows_are_invariant());
}

TEST_F(CublasGemmsTest, CreatingADeviceFailsIfCublasIsMissing) {
  EXPECT_THAT(CudaDevice::Make({}, &runtime_, {},
                               [] {
                                 return absl::StatusOr<CublasLt*>(
                                     absl::NotFoundError("tried nowhere"));
                               })
                  .status(),
              base::StatusIs(absl::StatusCode::kNotFound, "tried nowhere"));
}

TEST_F(CublasGemmsTest, TheNumericsStringOfADeviceHasTheVersionOfCublas) {
  Make();
  EXPECT_EQ(device_->numerics(), "cuda-sm90-lt130101");
  EXPECT_FALSE(device_->rows_are_invariant());
  EXPECT_EQ(gemms()->workspace_bytes(), 32 << 20);
  stream_.reset();
  memory_ = {};
  runtime_.properties.major = 8;
  Make();
  EXPECT_EQ(device_->numerics(), "cuda-sm80-lt130101");
  EXPECT_EQ(gemms()->workspace_bytes(), 8 << 20);
}

}  // namespace
}  // namespace kvasir::kernels::cuda
