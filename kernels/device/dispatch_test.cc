#include "kernels/device/dispatch.h"

#include <gmock/gmock.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

template <typename T>
concept HasOperatorStar = requires(T pointer) {
  *pointer;
};
template <typename T>
concept HasSubscript = requires(T pointer) {
  pointer[0];
};
static_assert(!HasOperatorStar<DevicePtr<float>>);
static_assert(!HasSubscript<DevicePtr<float>>);
static_assert(!std::is_convertible_v<float*, DevicePtr<float>>);
static_assert(!std::is_convertible_v<DevicePtr<float>, float*>);
static_assert(std::is_convertible_v<DevicePtr<float>, DevicePtr<const float>>);
static_assert(std::is_convertible_v<DevicePtr<float>, DevicePtr<void>>);
static_assert(!std::is_convertible_v<DevicePtr<const float>, DevicePtr<float>>);
static_assert(sizeof(DevicePtr<float>) == sizeof(float*));

TEST(DevicePtrTest, OffsetsCountElementsButDoNotMoveANullPointer) {
  float numbers[4];
  EXPECT_EQ((DevicePtr<float>(numbers) + 3).device_address(), numbers + 3);
  EXPECT_FALSE(DevicePtr<float>() + 3);
}

class FakeCudaStream final : public LaunchStream, public Launcher {
 public:
  explicit FakeCudaStream(const DeviceOps& ops = {}) : LaunchStream(ops) {}
  Launcher& launcher() override { return *this; }
  void Enqueue(const KernelLaunch&) override { ++enqueued_; }
  int multiprocessors() const override { return 1; }
  absl::StatusOr<void*> LibraryHandle() override { return nullptr; }
  absl::StatusOr<std::unique_ptr<StreamMark>> MakeMark() override {
    return nullptr;
  }
  absl::Status Record(StreamMark*) override { return absl::OkStatus(); }
  absl::Status TakeLaunchError() override {
    return std::exchange(error_, absl::OkStatus());
  }
  void CheckMemory(const char*, const void* address) const override {
    checked_.push_back(address);
  }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status CopyToDevice(DevicePtr<void>, const void*, size_t) override {
    return absl::OkStatus();
  }
  absl::Status CopyToHost(void*, DevicePtr<const void>, size_t) override {
    return absl::OkStatus();
  }

  int enqueued_ = 0;
  absl::Status error_;
  mutable std::vector<const void*> checked_;
};

TEST(DispatchTest, TheErrorForADeviceWithoutABackEndNamesTheOp) {
  FakeCudaStream stream;
  Workspace none(nullptr, 0);
  EXPECT_THAT(SiluMul(stream, {nullptr, nullptr, 1, 1}, none),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("silu_mul: ")));
}

// The memory of a list of ops is counted before the list runs, so a missing op
// is reported at that time.
TEST(DispatchTest,
     AnOpWithoutAKernelIsRefusedAlsoWhenOnlyItsWorkspaceIsCounted) {
  FakeCudaStream stream;
  Workspace counter = Workspace::Counting();
  const auto expect_refused = [](const absl::Status& status, const char* op) {
    EXPECT_THAT(
        status,
        base::StatusIs(absl::StatusCode::kUnimplemented,
                       absl::StrCat(op, ": the device has no kernel for it")));
  };
  expect_refused(SiluMul(stream, {nullptr, nullptr, 1, 1}, counter),
                 "silu_mul");
  expect_refused(GatherRows(stream, {}, counter), "gather_rows");
  expect_refused(AddRows(stream, {}, counter), "add_rows");
  const DeviceOp ops[] = {
      MakeDeviceOp<SiluMulParams>("silu_mul", [](const auto&, Launcher&) {})};
  FakeCudaStream has_it({ops, 1});
  KVASIR_EXPECT_OK(SiluMul(has_it, {nullptr, nullptr, 1, 1}, counter));
  EXPECT_EQ(has_it.enqueued_, 0);
}

void OnCpu(const SiluMulArgs& args, CpuStream&) { args.out[0] = 1.0f; }
void OnCuda(const SiluMulArgs& args, Launcher& launcher) {
  args.out[0] = 2.0f;
  launcher.Enqueue({});
}

TEST(DispatchTest, EachDeviceRunsItsOwnKernelFunctionWithPlainPointers) {
  constexpr OpKernels<SiluMulParams> kKernels = {"toy", &OnCpu, &OnCpu};
  const DeviceOp ops[] = {MakeDeviceOp<SiluMulParams>("toy", &OnCuda)};
  float out = 0.0f;
  const SiluMulParams params = {nullptr, DevicePtr<float>(&out), 1, 1};
  FakeCudaStream cuda({ops, 1});
  KVASIR_EXPECT_OK(Launch(kKernels, cuda, params));
  EXPECT_EQ(out, 2.0f);
  EXPECT_EQ(cuda.enqueued_, 1);
  EXPECT_THAT(cuda.checked_, ::testing::ElementsAre(nullptr, &out));
  cuda.error_ = absl::InternalError("no such image");
  EXPECT_THAT(
      Launch(kKernels, cuda, params),
      base::StatusIs(absl::StatusCode::kInternal, HasSubstr("no such image")));
  base::ThreadPool pool(1);
  CpuDevice cpu(&pool);
  KVASIR_EXPECT_OK(Launch(kKernels, *cpu.MakeStream(), params));
  EXPECT_EQ(out, 1.0f);
}

void OnCudaOfAnotherType(const NormArgs&, Launcher&) {}

TEST(DispatchDeathTest, AKernelFunctionOfTheWrongTypeEndsTheProcess) {
  constexpr OpKernels<SiluMulParams> kKernels = {"toy", &OnCpu, &OnCpu};
  const DeviceOp ops[] = {
      MakeDeviceOp<NormParams>("toy", &OnCudaOfAnotherType)};
  FakeCudaStream cuda({ops, 1});
  EXPECT_DEATH((void)Launch(kKernels, cuda, SiluMulParams()), "strcmp");
}

TEST(DispatchTest, TheErrorForActivationsThatTheCpuDoesNotSupportNamesTheOp) {
  base::ThreadPool pool(1);
  CpuDevice cpu(&pool);
  Workspace none(nullptr, 0);
  const SiluMulParams params = {nullptr, nullptr, 1, 1, DType::kBf16};
  EXPECT_THAT(
      SiluMul(*cpu.MakeStream(), params, none),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("silu_mul: the activations must be float32 on the CPU")));
}

}  // namespace
}  // namespace kvasir::kernels
