#include "kernels/latents/copy_pages.h"

#include <gmock/gmock.h>

#include <cstring>
#include <string>

#include "kernels/device/read_back.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

TEST(CopyPagesTest, CopiesWholePagesAndNothingElse) {
  std::string arena = "aabbccddee";
  const PagePair pairs[] = {{0, 3}, {4, 1}};
  TestStream test;
  const CopyPagesArgs params = {arena.data(), arena.data(), 2, pairs, 2};
  KVASIR_ASSERT_OK(
      CopyPages(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ("aaeeccaaee", arena);
}

TEST(CopyPagesTest, CopiesBetweenArenasEvenIfThePageIdsAreEqual) {
  const std::string from = "aabbcc";
  std::string to = "........";
  const PagePair pairs[] = {{1, 1}, {0, 3}};
  TestStream test;
  const CopyPagesArgs params = {from.data(), to.data(), 2, pairs, 2};
  KVASIR_ASSERT_OK(
      CopyPages(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ("..bb..aa", to);
}

// The pages of padding pairs are far outside the arena, so the test would crash
// if the op accessed them.
TEST(CopyPagesTest, APagePairThatIsPaddingCopiesNothing) {
  std::string arena = "aabb";
  constexpr int32_t kFar = 1 << 30;
  const PagePair pairs[] = {{-1, kFar}, {0, 1}, {-kFar, -kFar}};
  TestStream test;
  const CopyPagesArgs params = {arena.data(), arena.data(), 2, pairs, 3};
  KVASIR_ASSERT_OK(
      CopyPages(test.stream(), OnDevice(params), test.workspace()));
  EXPECT_EQ("aaaa", arena);
}

TEST(CopyPagesTest, ANegativeNumberOfPagePairsIsRefused) {
  TestStream test;
  CopyPagesParams params;
  params.page_bytes = 2;
  params.num_pairs = -1;
  EXPECT_THAT(
      CopyPages(test.stream(), params, test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("pairs: must be at least 0, but is -1")));
}

TEST(ReadBackTest, UploadedBytesAreReadBackUnchanged) {
  const std::string host = "tokens";
  char device[6];
  char back[6];
  TestStream test;
  KVASIR_ASSERT_OK(
      Upload(test.stream(), OnDevice(device), host.data(), host.size()));
  KVASIR_ASSERT_OK(
      ReadBack(test.stream(), back, OnDevice(device), host.size()));
  EXPECT_EQ(host, std::string(back, 6));
  KVASIR_EXPECT_OK(ReadBack(test.stream(), nullptr, nullptr, 0));
}

}  // namespace
}  // namespace kvasir::kernels
