#include "compress/methods/rope_choice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

using ::testing::ElementsAre;

TEST(RopeChoiceTest, TheIndicesOfTheBestScoresAreReturnedInRisingOrder) {
  EXPECT_THAT(BestIndices({0.5, 3.0, 1.0, 2.0}, 2), ElementsAre(1, 3));
  EXPECT_THAT(BestIndices({0.5, 3.0, 1.0, 2.0}, 4), ElementsAre(0, 1, 2, 3));
}

TEST(RopeChoiceTest, AmongEqualScoresTheLowerIndexIsKept) {
  EXPECT_THAT(BestIndices({1.0, 2.0, 1.0, 1.0}, 2), ElementsAre(0, 1));
}

TEST(RopeChoiceTest, TheBestTermsAreChosenOverAllPairsTogether) {
  const PairEnergies energies = {{9.0, 1.0}, {5.0, 4.0}, {0.5, 0.1}};
  EXPECT_THAT(BestTerms(energies, 1), ElementsAre(1, 0, 0));
  EXPECT_THAT(BestTerms(energies, 3), ElementsAre(1, 2, 0));
  EXPECT_THAT(BestTerms(energies, 4), ElementsAre(2, 2, 0));
  EXPECT_THAT(BestTerms(energies, 6), ElementsAre(2, 2, 2));
}

TEST(RopeChoiceTest, ChannelsGoToTheGroupWithMoreEnergy) {
  const std::vector<PairEnergies> groups = {{{8.0}, {7.0}, {6.0}},
                                            {{5.0}, {0.2}, {0.1}}};
  EXPECT_THAT(ShareChannels(groups, 1, 2), ElementsAre(1, 1));
  EXPECT_THAT(ShareChannels(groups, 1, 4), ElementsAre(3, 1));
  EXPECT_THAT(ShareChannels(groups, 1, 5), ElementsAre(3, 2));
  EXPECT_THAT(ShareChannels(groups, 1, 6), ElementsAre(3, 3));
}

TEST(RopeChoiceTest, ChannelsAreDistributedInBlocksOfWhichTheLastMayBeSmaller) {
  // Channels are taken in blocks of two. The first group has the blocks {8, 7}
  // and {6}, the second has {5, 4} and {3}.
  const std::vector<PairEnergies> groups = {{{8.0}, {7.0}, {6.0}},
                                            {{5.0}, {4.0}, {3.0}}};
  EXPECT_THAT(ShareChannels(groups, 2, 4), ElementsAre(2, 2));
  EXPECT_THAT(ShareChannels(groups, 2, 5), ElementsAre(3, 2));
  EXPECT_THAT(ShareChannels(groups, 2, 6), ElementsAre(3, 3));
}

}  // namespace
}  // namespace kvasir::compress
