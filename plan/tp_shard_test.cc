#include "plan/tp_shard.h"

#include "base/status_matchers.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;

using ::testing::HasSubstr;

TEST(TpShardTest, DealsHeadsInEqualRuns) {
  EXPECT_EQ(*KvHeadsOfRank({0, 1}, 8), (HeadRange{0, 8}));
  EXPECT_EQ(*KvHeadsOfRank({3, 4}, 8), (HeadRange{6, 2}));
}

TEST(TpShardTest, NeighboursShareAHeadWhenRanksOutnumberHeads) {
  EXPECT_EQ(*KvHeadsOfRank({0, 4}, 2), (HeadRange{0, 1}));
  EXPECT_EQ(*KvHeadsOfRank({1, 4}, 2), (HeadRange{0, 1}));
  EXPECT_EQ(*KvHeadsOfRank({2, 4}, 2), (HeadRange{1, 1}));
}

TEST(TpShardTest, RefusesWhatDoesNotDivideAndRanksOutsideTheGroup) {
  EXPECT_THAT(KvHeadsOfRank({0, 3}, 8),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("8 KV heads cannot be dealt to 3")));
  EXPECT_THAT(KvHeadsOfRank({2, 2}, 8),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 2 is outside of a group of 2")));
  EXPECT_THAT(KvHeadsOfRank({0, 1}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("at least 1 KV head")));
}

}  // namespace
}  // namespace kvasir::plan
