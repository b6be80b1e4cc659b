#include "base/error_byte.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

TEST(ErrorByteTest, ALargerErrorNeverGetsASmallerByte) {
  EXPECT_EQ(EncodeError(0.0f), 0);
  EXPECT_EQ(DecodeError(0), 0.0f);
  EXPECT_EQ(EncodeError(std::numeric_limits<float>::denorm_min()), 1);
  EXPECT_EQ(EncodeError(std::numeric_limits<float>::infinity()), 255);
  EXPECT_EQ(EncodeError(std::numeric_limits<float>::quiet_NaN()), 255);
  uint8_t last = 1;
  for (float error = 1e-9f; error < 1e7f; error = error * 1.003f) {
    const uint8_t code = EncodeError(error);
    EXPECT_GE(code, last) << error;
    last = code;
  }
  EXPECT_EQ(last, 255);
  for (int code = 1; code < 256; ++code) {
    EXPECT_EQ(EncodeError(DecodeError(static_cast<uint8_t>(code))), code);
  }
}

TEST(ErrorByteTest,
     ADecodedErrorIsWithinSixPercentOfTheEncodedOneInTheRangeOfFloat16) {
  for (float error = 0x1p-24f; error <= 65504.0f; error = error * 1.0007f) {
    const float ratio = DecodeError(EncodeError(error)) / error;
    EXPECT_LT(std::abs(std::log2(ratio)), 1.0f / 12.0f + 1e-5f) << error;
  }
}

}  // namespace
}  // namespace kvasir::base
