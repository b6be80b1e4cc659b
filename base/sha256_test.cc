#include "base/sha256.h"

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

// The examples of the SHA-256 standard (FIPS 180-2, appendix B), and the
// empty text.
TEST(Sha256Test, GivesTheDigestsThatTheStandardLists) {
  EXPECT_EQ(Sha256Hex("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(
      Sha256Hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Hex(""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(EqualInConstantTimeTest, ComparesEveryByteAndTheLength) {
  EXPECT_TRUE(EqualInConstantTime("", ""));
  EXPECT_TRUE(EqualInConstantTime("abc", "abc"));
  for (const char* other : {"xbc", "axc", "abx", "ab", "abcd", ""}) {
    EXPECT_FALSE(EqualInConstantTime("abc", other)) << other;
  }
}

}  // namespace
}  // namespace kvasir::base
