#include "cache/prefix/tail_policy.h"

#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

constexpr int64_t kPage = 4;

TailPolicy Policy(int64_t num_tokens, int64_t paged_tokens = 0,
                  int64_t found_tokens = 0) {
  return TailPolicy({.page_tokens = kPage,
                     .num_tokens = num_tokens,
                     .paged_tokens = paged_tokens,
                     .found_tokens = found_tokens});
}

TEST(TailPolicyTest, AStepShouldEndAtTheLastPageBoundaryOfThePrompt) {
  EXPECT_EQ(Policy(3).cut_tokens(), 0);
  EXPECT_EQ(Policy(4).cut_tokens(), 4);
  EXPECT_EQ(Policy(11).cut_tokens(), 8);
  EXPECT_EQ(Policy(11, 4, 4).cut_tokens(), 8);
  // all boundaries already have tails, so no new one is needed
  EXPECT_EQ(Policy(11, 8, 8).cut_tokens(), 0);
}

TEST(TailPolicyTest, AStepShouldEndAtAForkPointIfThereIsOne) {
  EXPECT_EQ(Policy(23, 8, 0).cut_tokens(), 8);
  EXPECT_EQ(Policy(23, 16, 8).cut_tokens(), 16);
}

TEST(TailPolicyTest, NewerTailsReplaceTailsOfTheOutputButNotOfThePrompt) {
  const TailPolicy prompt = Policy(11);
  EXPECT_EQ(prompt.At(4), TailKind::kNone);
  EXPECT_EQ(prompt.At(8), TailKind::kStays);
  EXPECT_EQ(prompt.At(9), TailKind::kNone);
  EXPECT_EQ(prompt.At(11), TailKind::kNone);
  EXPECT_EQ(prompt.At(12), TailKind::kGivesWay);
  EXPECT_EQ(prompt.At(13), TailKind::kNone);
  EXPECT_EQ(prompt.At(16), TailKind::kGivesWay);
}

TEST(TailPolicyTest, TailsAtAForkPointAndAtTheLastPageBoundaryAreKept) {
  const TailPolicy prompt = Policy(23, 8, 0);
  EXPECT_EQ(prompt.At(4), TailKind::kNone);
  EXPECT_EQ(prompt.At(8), TailKind::kStays);
  EXPECT_EQ(prompt.At(12), TailKind::kNone);
  // The prompt's last boundary may get a tail, although no step need end there.
  EXPECT_EQ(prompt.At(20), TailKind::kStays);
}

TEST(TailPolicyTest, TheLastBoundaryOfAPromptOfWholePagesIsItsEnd) {
  EXPECT_EQ(Policy(8).At(4), TailKind::kNone);
  EXPECT_EQ(Policy(8).At(8), TailKind::kStays);
  EXPECT_EQ(Policy(8).At(12), TailKind::kGivesWay);
}

TEST(TailPolicyTest, APolicyWithoutAPrefixLookupPublishesNoTail) {
  EXPECT_EQ(TailPolicy().cut_tokens(), 0);
  EXPECT_EQ(TailPolicy().At(4), TailKind::kNone);
}

TEST(TailPolicyTest, TailsMayTakeAQuarterOfThePoolButOneTailIsAlwaysAllowed) {
  EXPECT_EQ(MaxTailPages(400, 3), 100);
  EXPECT_EQ(MaxTailPages(9, 3), 3);
}

}  // namespace
}  // namespace kvasir::cache
