#include "compress/train/crop_sampler.h"

#include <set>

#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

TEST(CropSamplerTest, AnEpochVisitsEachWindowExactlyOnce) {
  CropSampler sampler(1000, 10, 3);
  std::set<int64_t> begins;
  for (int64_t i = 0; i < 99; ++i) {
    const int64_t begin = sampler.CropBegin(i);
    EXPECT_GE(begin, 0);
    EXPECT_LE(begin + 10, 1000);
    begins.insert(begin);
  }
  ASSERT_EQ(begins.size(), 99U);
  // The 99 crops of 10 tokens have no overlap and no gap, so the last one
  // begins 98 * 10 tokens after the first.
  EXPECT_EQ(*begins.rbegin() - *begins.begin(), 980);
}

TEST(CropSamplerTest, TheOrderOfCropsDiffersBetweenEpochsAndBetweenSeeds) {
  CropSampler sampler(1000, 10, 3);
  CropSampler other(1000, 10, 4);
  int same_epoch = 0;
  int same_seed = 0;
  for (int64_t i = 0; i < 99; ++i) {
    const int64_t begin = sampler.CropBegin(i);
    same_seed += begin == other.CropBegin(i) ? 1 : 0;
    same_epoch += begin == CropSampler(1000, 10, 3).CropBegin(i + 99) ? 1 : 0;
  }
  EXPECT_LT(same_seed, 20);
  EXPECT_LT(same_epoch, 20);
}

TEST(CropSamplerTest, ACropDependsOnlyOnItsIndex) {
  CropSampler in_order(500, 7, 1);
  for (int64_t i = 0; i < 300; ++i) {
    EXPECT_EQ(CropSampler(500, 7, 1).CropBegin(i), in_order.CropBegin(i));
  }
}

TEST(CropSamplerTest, AStreamAsShortAsOneCropIsAllowed) {
  CropSampler sampler(8, 8, 1);
  EXPECT_EQ(sampler.CropBegin(0), 0);
  EXPECT_EQ(sampler.CropBegin(5), 0);
}

}  // namespace
}  // namespace kvasir::compress
