// Tests for builds with nvcc. They need no GPU.
#include <gmock/gmock.h>

#include <string>

#include "base/status_matchers.h"
#include "kernels/cuda/cublas_gemms.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/gpu_ops.h"
#include "kernels/cuda/real_cublaslt.h"
#include "kernels/cuda/real_runtime.h"
#include "kernels/cuda/testing/fake_runtime.h"
#include "kernels/op_table/op_table.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MakeCudaDeviceTest, WithoutADriverTheErrorNamesTheNeededDriver) {
  int driver = 0;
  ASSERT_EQ(cuda::RealRuntime().DriverVersion(&driver), cuda::Result::kOk);
  if (driver != 0) GTEST_SKIP() << "this host has an NVIDIA driver";
  EXPECT_THAT(MakeCudaDevice({}).status(),
              base::StatusIs(absl::StatusCode::kFailedPrecondition,
                             AllOf(HasSubstr("no NVIDIA driver"),
                                   HasSubstr("CUDA 13.0 or later"))));
}

TEST(RealRuntimeTest, ErrorsAreDescribedByTheirCudaNamesAndTexts) {
  EXPECT_EQ(cuda::RealRuntime().Describe(cuda::Result::kOutOfMemory),
            "cudaErrorMemoryAllocation (2): out of memory");
}

TEST(RealCublasLtTest, TheErrorForAMissingLibraryNamesEveryFileThatWasTried) {
  if (absl::IsUnimplemented(cuda::OpenCublasLt({}).status())) {
    GTEST_SKIP() << "this build has no cublasLt.h";
  }
  EXPECT_THAT(
      cuda::OpenCublasLt({"libnone.so.13", "/none/libnone.so", "libm.so.6"})
          .status(),
      base::StatusIs(
          absl::StatusCode::kNotFound,
          AllOf(HasSubstr("libnone.so.13: cannot open"),
                HasSubstr("/none/libnone.so: cannot open"),
                HasSubstr("libm.so.6: has no cublasLtGetVersion"),
                HasSubstr("LD_LIBRARY_PATH"), HasSubstr("--deterministic"))));
}

// The library itself checks the types and sizes of attributes. It needs no GPU
// for this.
TEST(RealCublasLtTest, CublasAcceptsEveryAttributeThatDescribesAMatrixProduct) {
  const auto library = cuda::RealCublasLt();
  if (!library.ok()) GTEST_SKIP() << library.status();
  EXPECT_EQ((*library)->Version() / 10000, 13);
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const DType y : {dtype, DType::kF32}) {
      for (const bool bias : {false, true}) {
        KVASIR_EXPECT_OK(cuda::DescribesForTesting(
            **library, {5, 48, 40, 40, 48, dtype, y, bias}));
      }
    }
  }
}

TEST(RealCublasLtTest, WithoutADriverTheLibraryReportsThatItCannotStart) {
  int driver = 0;
  ASSERT_EQ(cuda::RealRuntime().DriverVersion(&driver), cuda::Result::kOk);
  if (driver != 0) GTEST_SKIP() << "this host has an NVIDIA driver";
  const auto library = cuda::RealCublasLt();
  if (!library.ok()) GTEST_SKIP() << library.status();
  EXPECT_THAT(cuda::CublasGemms::Make(*library, 9).status(),
              base::StatusIs(absl::StatusCode::kInternal,
                             HasSubstr("cannot be started: "
                                       "CUBLAS_STATUS_NOT_INITIALIZED (1)")));
}

// An op's function is found by the op's name, and the name of the function's
// type is compared. Therefore the host's compiler and nvcc must give the same
// name to a type.
TEST(GpuOpsTest, TheGpuHasTheSameOpsAsTheEmulatedDevice) {
  const DeviceOps gpu = GpuOps(), emulated = emulated::Ops();
  ASSERT_EQ(gpu.count, emulated.count);
  ASSERT_GT(gpu.count, 0u);
  for (size_t i = 0; i < gpu.count; ++i) {
    EXPECT_STREQ(gpu.ops[i].op, emulated.ops[i].op);
    EXPECT_STREQ(gpu.ops[i].type, emulated.ops[i].type) << gpu.ops[i].op;
    EXPECT_NE(gpu.ops[i].function, emulated.ops[i].function);
  }
}

// The launch has no host function (`call`), because nvcc compiled the kernel:
// only CUDA's runtime can run it.
TEST(GpuOpsTest, AnOpEnqueuesItsKernelForTheGpu) {
  cuda::FakeRuntime runtime;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto device,
                              CudaDevice::Make({}, &runtime, GpuOps()));
  const auto stream = device->MakeStream();
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DeviceBuffer memory,
      device->allocator().Allocate(96, MemoryTag::kOther));
  SiluMulParams params;
  params.gate_up = memory.as<float>();
  params.out = memory.as<float>() + 16;
  params.num_rows = 1;
  params.features = 8;
  Workspace none(nullptr, 0);
  KVASIR_ASSERT_OK(SiluMul(*stream, params, none));
  const auto launches = runtime.launches();
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_STREQ(launches[0].launch.name, "silu_mul");
  EXPECT_GE(launches[0].args.size(), sizeof(SiluMulArgs));
}

}  // namespace
}  // namespace kvasir::kernels
