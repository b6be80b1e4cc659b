// The main function of programs that run kernel tests on the first GPU. Without
// a GPU, each test is skipped with the reason, or fails if the environment
// variable KVASIR_REQUIRE_GPU is set.
#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_device.h"
#include "kernels/emulation/testing/test_device.h"

#ifndef KVASIR_GPU_DETERMINISTIC
#define KVASIR_GPU_DETERMINISTIC 1
#endif

namespace kvasir::kernels {
namespace {

constexpr CudaDeviceOptions kOptions = {.deterministic =
                                            KVASIR_GPU_DETERMINISTIC};

class SkipAll final : public ::testing::EmptyTestEventListener {
 public:
  explicit SkipAll(std::string why) : why_(std::move(why)) {}
  // Skips every test: gtest does not run the body of a test that is skipped
  // here.
  void OnTestStart(const ::testing::TestInfo&) override {
    GTEST_SKIP() << "needs a GPU: " << why_;
  }

 private:
  const std::string why_;
};

std::unique_ptr<Device> MakeOrEnd() {
  auto device = MakeCudaDevice(kOptions);
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().ToString().c_str());
    std::abort();
  }
  return *std::move(device);
}

int Run() {
  const auto first = MakeCudaDevice(kOptions);
  if (first.ok()) {
    const auto& properties =
        static_cast<const CudaDevice&>(**first).properties();
    std::printf("on %s, sm_%d%d\n", properties.name.c_str(), properties.major,
                properties.minor);
    // Only the code for sm_90a has bulk copies. GPUs newer than sm_90 run the
    // PTX for compute_80, which has no bulk copies.
    emulation::RunTestsOn({&MakeOrEnd, properties.major == 9});
  } else {
    const std::string why(first.status().message());
    if (std::getenv("KVASIR_REQUIRE_GPU") != nullptr) {
      std::fprintf(stderr, "needs a GPU: %s\n", why.c_str());
      return 1;
    }
    ::testing::UnitTest::GetInstance()->listeners().Append(new SkipAll(why));
  }
  return RUN_ALL_TESTS();
}

}  // namespace
}  // namespace kvasir::kernels

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  return kvasir::kernels::Run();
}
