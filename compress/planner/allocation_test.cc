#include "compress/planner/allocation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace kvasir::compress {
namespace {

// Makes a part with random losses that fall as the number of bits grows.
PartChannels RandomPart(std::mt19937& random, std::vector<int64_t> channels,
                        int64_t latents, int64_t grain) {
  std::uniform_real_distribution<double> draw(0.0, 1.0);
  PartChannels part{.latents = latents, .grain_bytes = grain};
  for (const int64_t count : channels) {
    ChannelGroup group{.channels = count};
    for (double& loss : group.loss) loss = draw(random);
    std::sort(group.loss.begin(), group.loss.end());
    part.groups.push_back(group);
  }
  return part;
}

// Calls `visit` with every list of widths in which no width is larger than the
// one before. Widths are given as indices of kCodeWidths.
void ForFallingWidths(
    size_t groups,
    const std::function<void(const std::vector<size_t>&)>& visit) {
  std::vector<size_t> widths;
  std::function<void()> extend = [&] {
    if (widths.size() == groups) return visit(widths);
    for (size_t w = widths.empty() ? 0 : widths.back(); w < kCodeWidths.size();
         ++w) {
      widths.push_back(w);
      extend();
      widths.pop_back();
    }
  };
  extend();
}

int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

int64_t BytesOf(const PartChannels& part, const std::vector<size_t>& widths) {
  int64_t bits = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    bits += part.groups[i].channels * kCodeWidths[widths[i]];
  }
  return part.latents * (RoundUp((bits + 7) / 8, part.grain_bytes) +
                         RoundUp(part.param_bytes, part.grain_bytes));
}

double LossOf(const PartChannels& part, const std::vector<size_t>& widths) {
  double loss = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    loss += part.groups[i].loss[widths[i]];
    if (kCodeWidths[widths[i]] == 0) continue;
    loss +=
        part.loss_per_channel * static_cast<double>(part.groups[i].channels);
  }
  return loss;
}

// Computes the result of LossByBytes by exhaustive search.
std::vector<double> SearchedLoss(const PartChannels& part) {
  std::vector<double> least(LossByBytes(part).size(), kImpossible);
  ForFallingWidths(part.groups.size(), [&](const std::vector<size_t>& widths) {
    if (kCodeWidths[widths[0]] == 0) return;
    const auto from =
        static_cast<size_t>(BytesOf(part, widths) / part.grain_bytes);
    const double loss = LossOf(part, widths);
    for (size_t i = from; i < least.size(); ++i) {
      least[i] = std::min(least[i], loss);
    }
  });
  return least;
}

TEST(AllocationTest,
     TheLossForANumberOfBytesIsTheLeastOverAllFallingBitWidths) {
  std::mt19937 random(7);
  for (const int64_t grain : {1, 2, 16}) {
    for (const int64_t latents : {1, 3}) {
      for (const auto& channels : std::vector<std::vector<int64_t>>{
               {8}, {8, 8, 8, 8}, {8, 8, 4}, {3, 3, 2}}) {
        PartChannels part = RandomPart(random, channels, latents, grain);
        part.loss_per_channel = 0.01;
        part.param_bytes = grain == 1 ? 2 : 0;
        const std::vector<double> want = SearchedLoss(part);
        const std::vector<double> have = LossByBytes(part);
        ASSERT_EQ(have.size(), want.size());
        for (size_t i = 0; i < want.size(); ++i) {
          if (want[i] == kImpossible || have[i] == kImpossible) {
            EXPECT_EQ(have[i], want[i]) << i;
          } else {
            EXPECT_NEAR(have[i], want[i], 1e-12) << i;
          }
        }
      }
    }
  }
}

TEST(AllocationTest, WidthsForReachesTheLossThatLossByBytesGives) {
  std::mt19937 random(8);
  const PartChannels part = RandomPart(random, {8, 8, 8, 4}, 2, 2);
  const std::vector<double> loss = LossByBytes(part);
  for (size_t grains = 0; grains < loss.size(); ++grains) {
    if (loss[grains] == kImpossible) continue;
    std::vector<size_t> widths;
    for (const int width : WidthsFor(part, static_cast<int64_t>(grains))) {
      widths.push_back(static_cast<size_t>(
          std::find(kCodeWidths.begin(), kCodeWidths.end(), width) -
          kCodeWidths.begin()));
    }
    EXPECT_TRUE(std::is_sorted(widths.begin(), widths.end()));
    EXPECT_LE(BytesOf(part, widths), static_cast<int64_t>(grains) * 2);
    EXPECT_NEAR(LossOf(part, widths), loss[grains], 1e-12);
  }
}

// There are two layers. Each has either one part for keys and one for values,
// or a joint part.
TEST(AllocationTest, TheChoiceOverLayersHasTheLeastLossOfAllChoices) {
  std::mt19937 random(9);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<std::vector<double>> loss;
    std::vector<ByteChoice> leaves;
    for (int leaf = 0; leaf < 8; ++leaf) {
      const int64_t latents = leaf % 4 == 1 ? 2 : 1;
      const auto groups = static_cast<size_t>(1 + leaf % 2);
      loss.push_back(LossByBytes(
          RandomPart(random, std::vector<int64_t>(groups, 8), latents, 2)));
      leaves.push_back(ByteChoice::Leaf(leaf, loss.back()));
    }
    constexpr int64_t kMost = 24;
    std::vector<ByteChoice> layers;
    for (size_t l = 0; l < 8; l += 4) {
      layers.push_back(ByteChoice::Either(
          {leaves[l], ByteChoice::Together(
                          {ByteChoice::Either({leaves[l + 1], leaves[l + 2]}),
                           leaves[l + 3]},
                          kMost)}));
    }
    const ByteChoice all = ByteChoice::Together(layers, kMost);
    // Each entry is a set of leaves that together store a layer's keys and
    // values.
    const std::vector<std::vector<size_t>> ways = {{0}, {1, 3}, {2, 3}};
    std::vector<double> want(kMost + 1, kImpossible);
    const std::function<void(const std::vector<size_t>&, size_t, size_t,
                             double)>
        spend = [&](const std::vector<size_t>& set, size_t at, size_t used,
                    double sum) {
          if (at == set.size()) {
            for (size_t i = used; i < want.size(); ++i) {
              want[i] = std::min(want[i], sum);
            }
            return;
          }
          for (size_t i = 0; i < loss[set[at]].size(); ++i) {
            if (used + i >= want.size()) break;
            if (loss[set[at]][i] == kImpossible) continue;
            spend(set, at + 1, used + i, sum + loss[set[at]][i]);
          }
        };
    for (const auto& first : ways) {
      for (const auto& second : ways) {
        std::vector<size_t> set = first;
        for (const size_t leaf : second) set.push_back(leaf + 4);
        spend(set, 0, 0, 0.0);
      }
    }
    for (size_t i = 0; i < all.loss().size(); ++i) {
      if (want[i] == kImpossible) {
        EXPECT_EQ(all.loss()[i], kImpossible);
        continue;
      }
      EXPECT_NEAR(all.loss()[i], want[i], 1e-12);
      double sum = 0;
      int64_t grains = 0;
      for (const ByteChoice::Take& take : all.Choose(static_cast<int64_t>(i))) {
        sum += loss[static_cast<size_t>(take.leaf)]
                   [static_cast<size_t>(take.grains)];
        grains += take.grains;
      }
      EXPECT_LE(grains, static_cast<int64_t>(i));
      EXPECT_NEAR(sum, all.loss()[i], 1e-12);
    }
  }
}

TEST(AllocationTest, ThereIsNoChoiceForFewerBytesThanThePartsNeed) {
  std::mt19937 random(10);
  const ByteChoice part =
      ByteChoice::Leaf(0, LossByBytes(RandomPart(random, {8, 8}, 1, 2)));
  EXPECT_EQ(part.least_grains(), 1);
  const ByteChoice both = ByteChoice::Together({part, part}, 1);
  EXPECT_EQ(both.least_grains(), -1);
}

}  // namespace
}  // namespace kvasir::compress
