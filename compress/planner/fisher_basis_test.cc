#include "compress/planner/fisher_basis.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "compress/planner/channel_codes.h"
#include "compress/planner/layer_moments.h"

namespace kvasir::compress {
namespace {

at::Tensor Random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::kDouble);
}

// Returns a positive definite matrix with eigenvalues of different sizes.
at::Tensor RandomMoment(int64_t n, uint64_t seed) {
  const at::Tensor root = Random({n, n}, seed) * Random({n}, seed + 1).exp();
  return root.mm(root.t());
}

double Distance(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

at::Tensor One(int64_t n) { return at::eye(n, at::kDouble); }

TEST(FisherBasisTest, WithIdentityInformationTheBasisIsThePrincipalBasis) {
  const at::Tensor moment = RandomMoment(12, 1);
  const FisherBasis basis = FindFisherBasis(moment, One(12), 5);
  const auto [values, vectors] = at::linalg_eigh(moment);
  EXPECT_LT(Distance(basis.variances, values.flip(0).slice(0, 0, 5)), 1e-9);
  const at::Tensor leading = vectors.flip(1).slice(1, 0, 5);
  EXPECT_LT(Distance(basis.decode.mm(basis.encode), leading.mm(leading.t())),
            1e-9);
  EXPECT_LT(Distance(basis.encode, basis.decode.t()), 1e-9);
}

// The planner predicts the loss of codes from this mean, and codes leave the
// bias out.
TEST(MeanInLevelsTest, AKeyBiasThatTheCacheLeavesOutIsNotInTheMean) {
  model::DecoderSpec spec;
  spec.num_kv_heads = 2;
  spec.head_dim = 12;
  spec.rope.rotary_dim = 12;
  spec.rope.frequencies = {1, 0.5, 0.25, 0.1, 0.05, 1e-5};
  const at::Tensor mean = Random({48}, 1);
  AttentionWeights weights;
  EXPECT_TRUE(at::equal(MeanInLevels(spec, weights, mean), mean));
  // Pair 2 turns fast and has the smallest bias, so its bias remains in the
  // codes. All other biases are left out.
  at::Tensor bias = at::full({2, 12}, 100.0, at::kDouble);
  bias.select(1, 2).fill_(3.0);
  bias.select(1, 8).zero_();
  weights.key_bias = bias.flatten().to(at::kFloat);
  at::Tensor biased = mean.clone();
  biased.narrow(0, 0, 24).add_(bias.flatten());
  at::Tensor want = mean.clone();
  for (const int64_t head : {0, 12}) want[head + 2] += 3.0;
  EXPECT_LT(Distance(MeanInLevels(spec, weights, biased), want), 0.1);
  spec.qk_norm = model::QkNorm::kHeads;
  EXPECT_TRUE(at::equal(MeanInLevels(spec, weights, biased), biased));
}

TEST(FisherBasisTest, ABasisOfFullRankLosesNothing) {
  const FisherBasis basis =
      FindFisherBasis(RandomMoment(12, 2), RandomMoment(12, 4), 12);
  EXPECT_LT(Distance(basis.decode.mm(basis.encode), One(12)), 1e-7);
}

TEST(FisherBasisTest, SquaredErrorsOfUncorrelatedChannelsGiveTheLoss) {
  const at::Tensor moment = RandomMoment(12, 5);
  const at::Tensor information = RandomMoment(12, 7);
  const FisherBasis basis = FindFisherBasis(moment, information, 12);
  const at::Tensor channels = basis.encode.mm(moment).mm(basis.encode.t());
  const double scale = channels.abs().max().item<double>();
  EXPECT_LT(Distance(channels, at::diag(basis.variances)), 1e-9 * scale);
  // Checks that |z|^2 = xt F x for every x.
  EXPECT_LT(Distance(basis.encode.t().mm(basis.encode), information),
            1e-9 * information.abs().max().item<double>());
}

// Returns the pairs of three heads, each with 4 pairs in half-split order.
std::vector<PairOfGroup> Pairs() {
  std::vector<PairOfGroup> pairs(4);
  for (int64_t p = 0; p < 4; ++p) {
    for (int64_t head = 0; head < 3; ++head) {
      pairs[static_cast<size_t>(p)].first.push_back(8 * head + p);
      pairs[static_cast<size_t>(p)].second.push_back(8 * head + 4 + p);
    }
  }
  return pairs;
}

// Returns keys [N, 24] in which pair f is rotated by angles[f].
at::Tensor Turned(const at::Tensor& keys, const std::vector<double>& angles) {
  at::Tensor turned = keys.clone();
  const std::vector<PairOfGroup> pairs = Pairs();
  for (size_t p = 0; p < pairs.size(); ++p) {
    const double cos = std::cos(angles[p]);
    const double sin = std::sin(angles[p]);
    for (size_t j = 0; j < 3; ++j) {
      const at::Tensor a = keys.select(1, pairs[p].first[j]);
      const at::Tensor b = keys.select(1, pairs[p].second[j]);
      turned.select(1, pairs[p].first[j]).copy_(a * cos - b * sin);
      turned.select(1, pairs[p].second[j]).copy_(a * sin + b * cos);
    }
  }
  return turned;
}

TEST(FisherBasisTest, CommutingMapsCommuteWithTheRotation) {
  const CommutingBasis basis =
      FindCommutingBasis(RandomMoment(24, 9), RandomMoment(24, 11), Pairs());
  const at::Tensor encode = RealEncoder(basis, Pairs(), 24);
  const at::Tensor decode = RealDecoder(basis, Pairs(), 24);
  EXPECT_LT(Distance(decode.mm(encode), One(24)), 1e-7);

  model::RopeSpec rope;
  rope.frequencies = {1.0, 0.3, 0.09, 0.027};
  const at::Tensor keys = Random({1, 24}, 13);
  constexpr double kPosition = 11;
  std::vector<double> angles;
  for (const double frequency : rope.frequencies) {
    angles.push_back(kPosition * frequency);
  }
  const at::Tensor turned_first = Turned(keys, angles).mm(encode.t());
  const at::Tensor turned_last =
      TurnedChannels(keys.mm(encode.t()), rope, basis.pairs,
                     at::tensor({static_cast<int64_t>(kPosition)}));
  EXPECT_LT(Distance(turned_first, turned_last), 1e-9);
}

TEST(FisherBasisTest, SquaredErrorsOfSortedCommutingChannelsGiveTheLoss) {
  const at::Tensor moment = RandomMoment(24, 15);
  const at::Tensor information = RandomMoment(24, 17);
  const CommutingBasis basis = FindCommutingBasis(moment, information, Pairs());
  EXPECT_GE((basis.variances.slice(0, 0, 11) - basis.variances.slice(0, 1))
                .min()
                .item<double>(),
            0.0);
  // Averaged over many rotations, |z|^2 equals kt F k.
  const at::Tensor encode = RealEncoder(basis, Pairs(), 24);
  const at::Tensor key = Random({1, 24}, 19);
  const double want = key.mm(encode.t()).square().sum().item<double>();
  double sum = 0;
  constexpr int kTurns = 12;
  // Each pair rotates in steps of a twelfth of a turn, at its own speed.
  // Products of different pairs then average to 0, as they do over many
  // positions of a text.
  for (int a = 0; a < kTurns; ++a) {
    for (int b = 0; b < kTurns; ++b) {
      for (int c = 0; c < kTurns; ++c) {
        const double step = 2 * M_PI / kTurns;
        const at::Tensor turned = Turned(
            key, {a * step, b * step, c * step, (a + 2 * b + 4 * c) * step});
        sum += turned.mm(information).mul(turned).sum().item<double>();
      }
    }
  }
  EXPECT_NEAR(sum / (kTurns * kTurns * kTurns), want, 0.02 * want);
}

TEST(ChannelCodesTest, CodesAreRoundedToEvenAndClamped) {
  const ChannelRanges ranges = {at::tensor({-1.0f}), at::tensor({0.5f})};
  const at::Tensor rows =
      at::tensor({-9.0f, -0.75f, -0.25f, 0.3f, 0.49f, 9.0f}).view({6, 1});
  const at::Tensor want =
      at::tensor({-1.0f, -1.0f, 0.0f, 0.5f, 0.5f, 0.5f}).view({6, 1});
  EXPECT_TRUE(at::equal(CodedRows(rows, ranges, 2), want));
}

TEST(ChannelCodesTest, ChannelsWithoutBitsAreDecodedAsTheirMean) {
  const at::Tensor rows = Random({50, 3}, 21).to(at::kFloat) + 4;
  const ChannelRanges ranges = FitRanges(rows, 0);
  EXPECT_LT(Distance(ranges.minimum, rows.mean(0)), 1e-5);
  EXPECT_EQ(ranges.scale.abs().max().item<float>(), 0.0f);
  EXPECT_LT(Distance(CodeErrors(rows, ranges, 0),
                     rows.to(at::kDouble).var(0, /*unbiased=*/false)),
            1e-4);
}

TEST(ChannelCodesTest,
     TheErrorOnGaussianDataIsNearTheTableOfMax1960ForEachBitWidth) {
  const at::Tensor rows = Random({20000, 2}, 23).to(at::kFloat) * 3 + 1;
  // The expected errors are from Max 1960, table 2.
  const std::vector<double> want = {1.0,     0.3634,  0.1188,
                                    0.03744, 0.01154, 0.003495};
  for (size_t bits = 0; bits < want.size(); ++bits) {
    const int width = static_cast<int>(bits);
    const ChannelRanges ranges = FitRanges(rows, width);
    const double error =
        CodeErrors(rows, ranges, width).mean().item<double>() / 9;
    EXPECT_NEAR(error, want[bits], 0.05 * want[bits]) << bits;
  }
}

TEST(ChannelCodesTest, OutliersWidenARangeOnlyIfThatLowersTheError) {
  at::Tensor rows = Random({4000, 1}, 25).to(at::kFloat);
  rows[0][0] = 60.0f;
  const ChannelRanges ranges = FitRanges(rows, 3);
  const ChannelRanges whole = {rows.min().view({1}),
                               (rows.max() - rows.min()).view({1}) / 7};
  EXPECT_LT(CodeErrors(rows, ranges, 3).item<double>(),
            0.5 * CodeErrors(rows, whole, 3).item<double>());
  EXPECT_NEAR(ClampRates(rows, ranges, 3).item<double>(), 0.01, 0.02);
  EXPECT_EQ(ClampRates(rows, whole, 3).item<double>(), 0.0);
}

}  // namespace
}  // namespace kvasir::compress
