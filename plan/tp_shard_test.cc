#include "plan/tp_shard.h"

#include "base/status_matchers.h"

namespace kvasir::plan {
namespace {

using base::StatusIs;

using ::testing::HasSubstr;

TEST(TpShardTest, EachRankGetsAnEqualNumberOfConsecutiveHeads) {
  EXPECT_EQ(*KvHeadsOfRank({0, 1}, 8), (HeadRange{0, 8}));
  EXPECT_EQ(*KvHeadsOfRank({3, 4}, 8), (HeadRange{6, 2}));
}

TEST(TpShardTest, ConsecutiveRanksShareAHeadIfThereAreMoreRanksThanHeads) {
  EXPECT_EQ(*KvHeadsOfRank({0, 4}, 2), (HeadRange{0, 1}));
  EXPECT_EQ(*KvHeadsOfRank({1, 4}, 2), (HeadRange{0, 1}));
  EXPECT_EQ(*KvHeadsOfRank({2, 4}, 2), (HeadRange{1, 1}));
}

TEST(TpShardTest, RefusesRanksThatDoNotExistOrCannotShareTheHeadsEqually) {
  EXPECT_THAT(KvHeadsOfRank({0, 3}, 8),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("8 KV heads cannot be divided among 3")));
  EXPECT_THAT(KvHeadsOfRank({2, 2}, 8),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("rank 2 is outside a group of size 2")));
  EXPECT_THAT(KvHeadsOfRank({0, 1}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("at least 1 KV head")));
}

TEST(TpShardTest, TheVocabularyIsDividedAmongRanksInWholePanelsOfTokenIds) {
  EXPECT_EQ(IdsOfRank({}, 1237), (IdRange{0, 1237}));
  EXPECT_EQ(IdsOfRank({0, 4}, 128), (IdRange{0, 32}));
  EXPECT_EQ(IdsOfRank({3, 4}, 128), (IdRange{96, 32}));
  // 1237 ids are 39 panels, and the last panel has 21 ids.
  EXPECT_EQ(IdsOfRank({0, 2}, 1237), (IdRange{0, 608}));
  EXPECT_EQ(IdsOfRank({1, 2}, 1237), (IdRange{608, 629}));
  // 40 ids are 2 panels, fewer than the 4 ranks.
  EXPECT_EQ(IdsOfRank({0, 4}, 40), (IdRange{0, 0}));
  EXPECT_EQ(IdsOfRank({1, 4}, 40), (IdRange{0, 32}));
  EXPECT_EQ(IdsOfRank({2, 4}, 40), (IdRange{32, 0}));
  EXPECT_EQ(IdsOfRank({3, 4}, 40), (IdRange{32, 8}));
}

}  // namespace
}  // namespace kvasir::plan
