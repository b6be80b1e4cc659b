#include "proto/token_bytes.h"

#include <limits>
#include <utility>
#include <vector>

#include "base/status_matchers.h"

namespace kvasir::proto {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(TokenBytesTest, TokenIdsAreStoredInLittleEndianOrder) {
  const TokenBytes tokens = TokenBytes::FromIds({0x01020304, 7});
  EXPECT_EQ(tokens.bytes(), absl::string_view("\4\3\2\1\7\0\0\0", 8));
  EXPECT_THAT(tokens.ToIds(), ElementsAre(0x01020304, 7));
}

TEST(TokenBytesTest, EveryInt32ValueIsStoredUnchangedAsATokenId) {
  const int32_t max = std::numeric_limits<int32_t>::max();
  EXPECT_THAT(TokenBytes::FromIds({0, max, -1}).ToIds(),
              ElementsAre(0, max, -1));
}

TEST(TokenBytesTest, CopiesOfTokenBytesShareOneBuffer) {
  const TokenBytes a = TokenBytes::FromIds({1, 2, 3});
  const TokenBytes b = a;
  EXPECT_EQ(a.bytes().data(), b.bytes().data());
  EXPECT_EQ(b.owner().use_count(), 2);
}

TEST(TokenBytesTest, AdoptingAVectorOfTokenIdsDoesNotCopyIt) {
  std::vector<int32_t> ids = {0x01020304, 7};
  const void* const where = ids.data();
  const TokenBytes tokens = TokenBytes::Adopt(std::move(ids));
  EXPECT_EQ(tokens.bytes(), absl::string_view("\4\3\2\1\7\0\0\0", 8));
  EXPECT_EQ(static_cast<const void*>(tokens.bytes().data()), where);
}

TEST(TokenBytesTest, AppendToUsesTheSpareCapacityOfTheVector) {
  std::vector<int32_t> ids = {5};
  ids.reserve(3);
  const void* const where = ids.data();
  ids = TokenBytes::FromIds({6, -1}).AppendTo(std::move(ids));
  EXPECT_THAT(ids, ElementsAre(5, 6, -1));
  EXPECT_EQ(static_cast<const void*>(ids.data()), where);
  EXPECT_THAT(TokenBytes().AppendTo({5}), ElementsAre(5));
}

TEST(TokenBytesTest, TokenBytesWithoutIdsAreEmpty) {
  EXPECT_TRUE(TokenBytes().empty());
  EXPECT_TRUE(TokenBytes::FromIds({}).empty());
}

TEST(TokenBytesTest, RefusesBytesWhoseNumberIsNotAMultipleOfFour) {
  EXPECT_THAT(TokenBytes::FromBytes("12345"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("5 bytes, but must have a multiple of 4")));
}

TEST(TokenBytesTest, IdsAppendedInSeveralCallsParseAsOneList) {
  std::string emitted;
  AppendTokenBytes({5}, &emitted);
  AppendTokenBytes({6, 7}, &emitted);
  KVASIR_ASSERT_OK_AND_ASSIGN(const TokenBytes tokens,
                              TokenBytes::FromBytes(std::move(emitted)));
  EXPECT_THAT(tokens.ToIds(), ElementsAre(5, 6, 7));
}

}  // namespace
}  // namespace kvasir::proto
