#include "bench/gpu/gpu_options.h"

#include <gmock/gmock.h>

#include "base/status_matchers.h"

namespace kvasir::bench {
namespace {

TEST(GpuOptionsTest, OnlyADeviceWithItsOwnProductsIsDeterministic) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto attention,
                              GpuOptions("cuda:3", Products::kOwn));
  EXPECT_TRUE(attention.deterministic);
  EXPECT_EQ(attention.ordinal, 3);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto steps,
                              GpuOptions("cuda", Products::kLibrary));
  EXPECT_FALSE(steps.deterministic);
  EXPECT_EQ(steps.ordinal, 0);
}

TEST(GpuOptionsTest, AnUnknownDeviceNameIsRefused) {
  for (const char* const name : {"gpu", "cuda:", "cuda:x", ""}) {
    EXPECT_THAT(
        GpuOptions(name, Products::kOwn),
        base::StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("want cuda, cuda:N or emulated")))
        << name;
  }
}

}  // namespace
}  // namespace kvasir::bench
