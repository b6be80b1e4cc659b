#include "kernels/device/allocator.h"

#include <gmock/gmock.h>

#include <cstring>

#include "base/status_matchers.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

TEST(DeviceAllocatorTest, CurrentAndPeakBytesAreCountedForEachMemoryTag) {
  CpuAllocator allocator;
  KVASIR_ASSERT_OK_AND_ASSIGN(auto weights,
                              allocator.Allocate(1000, MemoryTag::kWeights));
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        auto pages,
        allocator.Allocate(3000001, MemoryTag::kKvCache, {.prefault = true}));
    EXPECT_EQ(0u,
              reinterpret_cast<uintptr_t>(pages.data().device_address()) % 64);
    EXPECT_EQ(3001001, allocator.total_use().bytes);
    DeviceBuffer moved = std::move(pages);
    EXPECT_FALSE(pages.data());
    EXPECT_EQ(3000001, allocator.use(MemoryTag::kKvCache).bytes);
    std::memset(moved.data().device_address(), 1, moved.bytes());
  }
  EXPECT_EQ(0, allocator.use(MemoryTag::kKvCache).bytes);
  EXPECT_EQ(3000001, allocator.use(MemoryTag::kKvCache).peak_bytes);
  EXPECT_EQ(1000, allocator.total_use().bytes);
  EXPECT_EQ(3001001, allocator.total_use().peak_bytes);
}

TEST(DeviceAllocatorTest, TheErrorForAnAllocationAboveTheLimitNamesTheSizes) {
  CpuAllocator allocator(5000);
  KVASIR_ASSERT_OK_AND_ASSIGN(auto first,
                              allocator.Allocate(4000, MemoryTag::kWorkspace));
  EXPECT_THAT(
      allocator.Allocate(1001, MemoryTag::kKvCache),
      base::StatusIs(absl::StatusCode::kResourceExhausted,
                     HasSubstr("kv_cache: 1001 bytes are needed, but 4000 of "
                               "the limit of 5000 bytes are in use")));
  KVASIR_EXPECT_OK(allocator.Allocate(1000, MemoryTag::kKvCache));
  KVASIR_ASSERT_OK_AND_ASSIGN(auto empty,
                              allocator.Allocate(0, MemoryTag::kOther));
  EXPECT_FALSE(empty.data());
}

}  // namespace
}  // namespace kvasir::kernels
