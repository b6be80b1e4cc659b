#include "base/philox.h"

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

// The next three tests expect values that were published with Philox.
TEST(PhiloxTest, GivesThePublishedResultForZeros) {
  EXPECT_EQ(Philox4x32({0, 0}, {0, 0, 0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(PhiloxTest, GivesThePublishedResultForOnes) {
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox4x32({kOnes, kOnes}, {kOnes, kOnes, kOnes, kOnes}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(PhiloxTest, GivesThePublishedResultForDigitsOfPi) {
  EXPECT_EQ(Philox4x32({0xa4093822, 0x299f31d0},
                       {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, TheKeyAndTheCounterContainAllBitsOfTheSeedAndTheIndices) {
  EXPECT_EQ(PhiloxKeyFromSeed(0x0123456789abcdef),
            (PhiloxKey{0x89abcdef, 0x01234567}));
  EXPECT_EQ(PhiloxCounterOf(0x0123456789abcdef, 0xfedcba9876543210),
            (PhiloxCounter{0x89abcdef, 0x01234567, 0x76543210, 0xfedcba98}));
}

}  // namespace
}  // namespace kvasir::base
