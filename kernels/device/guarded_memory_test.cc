#include "kernels/device/guarded_memory.h"

#include <gmock/gmock.h>

#include "base/status_matchers.h"

namespace kvasir::kernels {
namespace {

using Gaps = GuardedMemory::Gaps;
constexpr size_t kReserved = size_t{1} << 20;

void Set(void* at, ptrdiff_t byte) {
  static_cast<volatile char*>(at)[byte] = 1;
}

TEST(GuardedMemoryTest,
     GuardedMemoryIsAccessibleBetweenTheFirstOpenAndTheLastClose) {
  for (const Gaps gaps : {Gaps::kOpen, Gaps::kClosed}) {
    GuardedMemory memory(kReserved, gaps);
    void* const data = memory.Acquire(100, 64);
    EXPECT_DEATH(Set(data, 0), "");
    memory.Open();
    memory.Open();
    memory.Close();
    Set(data, 0);
    // An allocation that is made between Open and Close is accessible at once.
    void* const more = memory.Acquire(5000, 64);
    Set(more, 4999);
    memory.Close();
    EXPECT_DEATH(Set(data, 0), "");
    EXPECT_DEATH(Set(more, 0), "");
  }
}

TEST(GuardedMemoryTest, AccessToTheFirstByteAfterAnAllocationEndsTheProcess) {
  GuardedMemory memory(kReserved, Gaps::kClosed);
  void* const data = memory.Acquire(5120, 256);
  void* const next = memory.Acquire(1, 256);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(next) % 256, 0u);
  memory.Open();
  Set(data, 5119);
  EXPECT_DEATH(Set(data, 5120), "");
  memory.Release(data);
  EXPECT_DEATH(Set(data, 0), "");
  memory.Close();
}

TEST(GuardedMemoryTest, ReservingMoreAddressSpaceThanTheSystemHasIsAnError) {
  KVASIR_EXPECT_OK(GuardedMemory::CheckReservable(kReserved));
  EXPECT_THAT(GuardedMemory::CheckReservable(size_t{1} << 60),
              base::StatusIs(absl::StatusCode::kFailedPrecondition,
                             ::testing::HasSubstr("ulimit -v")));
}

TEST(GuardedMemoryTest, CheckingAnAddressOutsideItsAllocationsEndsTheProcess) {
  GuardedMemory memory(kReserved, Gaps::kClosed);
  void* const data = memory.Acquire(100, 64);
  auto* const bytes = static_cast<char*>(data);
  memory.Check("op", nullptr);
  memory.Check("op", data);
  memory.Check("op", bytes + 99);
  EXPECT_DEATH(memory.Check("op", bytes + 100),
               "op: .* is not in the device's memory");
  EXPECT_DEATH(memory.Check("op", bytes - 1), "is not in the device's memory");
  memory.CheckRange("op", bytes + 90, 10);
  EXPECT_DEATH(memory.CheckRange("op", bytes + 90, 11),
               "op: an access to 11 bytes from byte 90 on exceeds its "
               "allocation of 100 bytes");
  ASSERT_EQ(memory.Live().size(), 1u);
  EXPECT_EQ(memory.Live()[0].begin, bytes);
  EXPECT_EQ(memory.Live()[0].end, bytes + 100);
  memory.Release(data);
  EXPECT_TRUE(memory.Live().empty());
  EXPECT_DEATH(memory.Check("op", data), "is not in the device's memory");
}

TEST(GuardedMemoryTest, AcquireReturnsNullWhenTheAddressSpaceIsUsedUp) {
  GuardedMemory memory(kReserved, Gaps::kOpen);
  EXPECT_EQ(memory.Acquire(kReserved, 64), nullptr);
  EXPECT_NE(memory.Acquire(kReserved / 2, 64), nullptr);
  EXPECT_EQ(memory.Acquire(kReserved / 2, 64), nullptr);
}

}  // namespace
}  // namespace kvasir::kernels
