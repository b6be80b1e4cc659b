#include "compress/oracle/fake_quant.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "plan/normal_levels.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

kvasir::v1::Codec PerToken(std::vector<uint32_t> schedule, uint32_t group = 0,
                           kvasir::v1::DataType params = kvasir::v1::F16) {
  kvasir::v1::Codec codec;
  for (const uint32_t bits : schedule) codec.mutable_bits()->add_schedule(bits);
  codec.mutable_per_token()->set_group(group);
  codec.set_param_dtype(params);
  return codec;
}

CodedLatent Code(const kvasir::v1::Codec& codec, int64_t rank,
                 const at::Tensor& latent) {
  const auto made = MakeLatentCodec(codec, rank);
  KVASIR_EXPECT_OK(made);
  auto coded = CodeLatent(*made, latent, {.keep_codes = true});
  KVASIR_EXPECT_OK(coded);
  return *std::move(coded);
}

// Returns all finite numbers of a 16-bit type in ascending order, computed from
// the definition of its bits.
std::vector<double> AllNumbers(int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> numbers;
  for (int exponent = 0; exponent < (1 << exponent_bits) - 1; ++exponent) {
    for (int fraction = 0; fraction < (1 << fraction_bits); ++fraction) {
      const double significand =
          std::ldexp(fraction, -fraction_bits) + (exponent == 0 ? 0.0 : 1.0);
      const double value =
          std::ldexp(significand, std::max(exponent, 1) - bias);
      numbers.push_back(value);
      numbers.push_back(-value);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<double> NumbersOf(kvasir::v1::DataType dtype) {
  return dtype == kvasir::v1::F16 ? AllNumbers(5, 10) : AllNumbers(8, 7);
}

TEST(FakeQuantRoundingTest,
     NumbersAreRoundedUpAndDownToTheNeighboursInTheType) {
  for (const auto dtype : {kvasir::v1::F16, kvasir::v1::BF16}) {
    const std::vector<double> numbers = NumbersOf(dtype);
    for (size_t i = 1; i + 1 < numbers.size(); i += 7) {
      const auto x = static_cast<float>(numbers[i]);
      EXPECT_EQ(RoundDown(x, dtype), x);
      EXPECT_EQ(RoundUp(x, dtype), x);
      if (numbers[i] == numbers[i + 1]) continue;  // skips one of the two zeros
      const float above =
          std::nextafter(x, std::numeric_limits<float>::infinity());
      EXPECT_EQ(RoundDown(above, dtype), x);
      EXPECT_EQ(RoundUp(above, dtype), static_cast<float>(numbers[i + 1]));
    }
  }
}

// A simple implementation of the PER_TOKEN rule, which codes one number after
// the other.
struct PlainRow {
  std::vector<float> values;
  std::vector<int> codes;
};

PlainRow PlainCode(const std::vector<float>& row, int bits,
                   const std::vector<double>& numbers) {
  const auto [low, high] = std::minmax_element(row.begin(), row.end());
  const auto minimum = static_cast<float>(
      *std::prev(std::upper_bound(numbers.begin(), numbers.end(), *low)));
  const float levels = static_cast<float>((1 << bits) - 1);
  const float step = (*high - minimum) / levels;
  const auto scale = static_cast<float>(
      *std::lower_bound(numbers.begin(), numbers.end(), step));
  PlainRow plain;
  for (const float x : row) {
    const float code =
        scale == 0.0f
            ? 0.0f
            : std::clamp(std::nearbyint((x - minimum) / scale), 0.0f, levels);
    plain.codes.push_back(static_cast<int>(code));
    plain.values.push_back(code * scale + minimum);
  }
  return plain;
}

// Returns rows of many kinds: random, constant, all zeros, with one sign only,
// far from zero, huge, denormal, with one outlier, and half way between codes.
std::vector<std::vector<float>> Rows(int64_t width) {
  std::vector<std::vector<float>> rows;
  const at::Generator generator = at::detail::createCPUGenerator(7);
  const auto add = [&rows](const at::Tensor& row) {
    const float* data = row.data_ptr<float>();
    rows.emplace_back(data, data + row.numel());
  };
  const auto normal = [&] {
    return at::randn({width}, generator, at::TensorOptions());
  };
  for (int i = 0; i < 20; ++i) add(normal());
  add(at::full({width}, 1000.3));
  add(at::full({width}, -0.0371));
  add(at::zeros({width}));
  add(normal() + 500.0);
  add(normal() - 500.0);
  add(normal() * 10000.0);
  add(normal() * 1e-7);
  add(normal() * 1e-41);
  at::Tensor outlier = normal();
  outlier[width - 1].fill_(700.0);
  add(outlier);
  add(at::arange(width).to(at::kFloat) * 0.5);
  return rows;
}

TEST(FakeQuantTest, PerTokenCodesEqualASimpleImplementationOfTheRule) {
  constexpr int64_t kWidth = 24;
  for (const auto dtype : {kvasir::v1::F16, kvasir::v1::BF16}) {
    const std::vector<double> numbers = NumbersOf(dtype);
    for (const uint32_t bits : {1u, 2u, 3u, 4u, 5u, 6u, 8u}) {
      for (const std::vector<float>& row : Rows(kWidth)) {
        const CodedLatent coded =
            Code(PerToken({bits}, 0, dtype), kWidth, at::tensor(row));
        const PlainRow plain = PlainCode(row, static_cast<int>(bits), numbers);
        for (int64_t i = 0; i < kWidth; ++i) {
          const auto at = static_cast<size_t>(i);
          EXPECT_EQ(coded.values[i].item<float>(), plain.values[at]);
          EXPECT_EQ(coded.codes[i].item<int>(), plain.codes[at]);
        }
      }
    }
  }
}

TEST(FakeQuantTest, TheErrorOfACodeIsAtMostHalfAStep) {
  constexpr int64_t kWidth = 64;
  for (const std::vector<float>& values : Rows(kWidth)) {
    const at::Tensor row = at::tensor(values);
    const CodedLatent coded = Code(PerToken({4}), kWidth, row);
    const double scale = coded.scale.item<double>();
    // The largest error is half a step plus the rounding errors of float32.
    const double most =
        0.5 * scale + 4e-7 * row.abs().max().item<double>() + 1e-30;
    EXPECT_LE((coded.values - row).abs().max().item<double>(), most);
    EXPECT_LE(coded.minimum.item<float>(), row.min().item<float>());
  }
}

TEST(FakeQuantTest, EveryStoredEntryOfABitScheduleHasItsOwnRange) {
  // The schedule has 8 entries of 2 channels each; 5 of the entries have bits
  // and are stored.
  const auto codec = MakeLatentCodec(PerToken({8, 4, 4, 2, 1, 0, 0, 0}), 16);
  KVASIR_ASSERT_OK(codec);
  EXPECT_EQ(codec->stored_width, 10);
  ASSERT_EQ(codec->runs.size(), 5u);
  EXPECT_EQ(codec->runs[1].begin, 2);
  EXPECT_EQ(codec->runs[1].bits, 4);
  EXPECT_EQ(codec->runs[4].begin, 8);
  EXPECT_EQ(codec->runs[4].bits, 1);
  const at::Tensor row = at::arange(10).to(at::kFloat);
  // Each run has two channels, which are the ends of its range, so the only
  // error is that the ends are rounded to 16 bits.
  const auto coded = CodeLatent(*codec, row, {.keep_codes = true});
  KVASIR_ASSERT_OK(coded);
  EXPECT_LT((coded->values - row).abs().max().item<double>(), 2e-3);
  EXPECT_EQ(coded->minimum.numel(), 5);
}

TEST(FakeQuantTest, EachGroupOfChannelsHasItsOwnRange) {
  const at::Tensor row = at::cat({at::randn({4}), at::randn({4}) * 100.0});
  const CodedLatent coded = Code(PerToken({4}, 4), 8, row);
  const CodedLatent first = Code(PerToken({4}), 4, row.slice(0, 0, 4));
  const CodedLatent second = Code(PerToken({4}), 4, row.slice(0, 4, 8));
  EXPECT_TRUE(at::equal(coded.values, at::cat({first.values, second.values})));
}

TEST(FakeQuantTest, NumbersOutsideAStaticRangeAreClampedAndCounted) {
  kvasir::v1::Codec plan;
  plan.mutable_bits()->add_schedule(2);
  plan.mutable_channel_static();
  const auto codec = MakeLatentCodec(plan, 3);
  KVASIR_ASSERT_OK(codec);
  const StaticRange range{at::tensor({0.0f, -1.0f, 5.0f}),
                          at::tensor({1.0f, 0.5f, 0.0f})};
  const at::Tensor latent =
      at::tensor({3.4f, -9.0f, 7.0f, 0.5f, 0.3f, 5.0f}).view({2, 3});
  const auto coded =
      CodeLatent(*codec, latent, {.range = &range, .keep_codes = true});
  KVASIR_ASSERT_OK(coded);
  const at::Tensor want =
      at::tensor({3.0f, -1.0f, 5.0f, 0.0f, 0.5f, 5.0f}).view({2, 3});
  EXPECT_TRUE(at::equal(coded->values, want)) << coded->values;
  EXPECT_EQ(coded->num_clamped, 1);
  EXPECT_THAT(CodeLatent(*codec, latent),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("range")));
  const StaticRange negative{range.minimum, at::tensor({1.0f, -0.5f, 0.0f})};
  EXPECT_THAT(CodeLatent(*codec, latent, {.range = &negative}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("range.scale has a number below 0")));
}

TEST(FakeQuantTest, ChannelsWithoutBitsAreDecodedAsTheirMinimum) {
  kvasir::v1::Codec plan;
  for (const auto& [channels, bits] : {std::pair(2, 5), std::pair(3, 0)}) {
    auto* run = plan.mutable_bits()->add_runs();
    run->set_channels(static_cast<uint32_t>(channels));
    run->set_bits(static_cast<uint32_t>(bits));
  }
  plan.mutable_channel_static();
  const auto codec = MakeLatentCodec(plan, 5);
  KVASIR_ASSERT_OK(codec);
  EXPECT_EQ(codec->stored_width, 5);
  const StaticRange range{at::tensor({0.0f, -1.0f, 0.25f, -3.0f, 7.0f}),
                          at::tensor({0.5f, 0.125f, 0.0f, 1.0f, 0.0f})};
  const auto coded = CodeLatent(
      *codec, at::tensor({40.0f, 1.3f, 100.0f, -2.0f, 7.0f}).view({1, 5}),
      {.range = &range});
  KVASIR_ASSERT_OK(coded);
  EXPECT_TRUE(
      at::equal(coded->values,
                at::tensor({15.5f, 1.25f, 0.25f, -3.0f, 7.0f}).view({1, 5})))
      << coded->values;
  EXPECT_EQ(coded->num_clamped, 1);
}

TEST(FakeQuantTest, NumbersBecomeTheNearestLevelTimesAScaleThatKeepsTheNorm) {
  const std::vector<float> rounded =
      plan::RoundedLevels({-1.5, -0.5, 0.2, 1.25});
  const std::vector<double> levels(rounded.begin(), rounded.end());
  kvasir::v1::Codec plan;
  plan.mutable_bits()->add_schedule(2);
  plan.set_param_dtype(kvasir::v1::F16);
  for (const double level : levels) {
    plan.mutable_per_token_norm()->add_levels(level);
  }
  constexpr int64_t kWidth = 19;
  const at::Tensor rows = at::randn({50, kWidth}) * 3.0;
  const CodedLatent coded = Code(plan, kWidth, rows);
  const at::Tensor unit = rows * (std::sqrt(static_cast<double>(kWidth)) /
                                  rows.norm(2, -1, /*keepdim=*/true));
  for (int64_t r = 0; r < rows.size(0); ++r) {
    for (int64_t c = 0; c < kWidth; ++c) {
      const double x = unit[r][c].item<double>();
      const double mine = levels[coded.codes[r][c].item<uint8_t>()];
      for (const double other : levels) {
        EXPECT_LE(std::abs(x - mine), std::abs(x - other) + 1e-6);
      }
      EXPECT_FLOAT_EQ(coded.values[r][c].item<float>(),
                      static_cast<float>(mine) * coded.scale[r].item<float>());
    }
  }
  EXPECT_LT((coded.values.norm(2, -1) / rows.norm(2, -1) - 1.0)
                .abs()
                .max()
                .item<double>(),
            1e-3);
  // A row of zeros is decoded as zeros. A row is refused if its length (norm)
  // does not fit into a float16.
  EXPECT_TRUE(at::equal(Code(plan, kWidth, at::zeros({1, kWidth})).values,
                        at::zeros({1, kWidth})));
  const auto codec = MakeLatentCodec(plan, kWidth);
  KVASIR_ASSERT_OK(codec);
  EXPECT_THAT(CodeLatent(*codec, at::full({1, kWidth}, 1e6)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("too large for a scale of type F16")));
}

TEST(FakeQuantTest, NumbersAreRoundedToTheStoredType) {
  kvasir::v1::Codec codec;
  codec.set_dtype(kvasir::v1::F16);
  const at::Tensor row = at::tensor({0.1f, 1.0f, -65504.0f, 1e-9f});
  EXPECT_TRUE(
      at::equal(Code(codec, 4, row).values, row.to(at::kHalf).to(at::kFloat)));
  codec.set_dtype(kvasir::v1::BF16);
  EXPECT_TRUE(at::equal(Code(codec, 4, row).values,
                        row.to(at::kBFloat16).to(at::kFloat)));
}

TEST(FakeQuantTest,
     NumbersThatOverflowOrAreNotFiniteAreAnErrorThatNamesTheirPlace) {
  const auto refuses = [](const kvasir::v1::Codec& plan, float number,
                          const char* why) {
    const auto codec = MakeLatentCodec(plan, 4);
    KVASIR_ASSERT_OK(codec);
    at::Tensor latent = at::zeros({2, 4});
    latent[1][2].fill_(number);
    EXPECT_THAT(CodeLatent(*codec, latent),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  refuses(PerToken({4}), nan, "row 1 channel 2 is nan");
  refuses(PerToken({4}), -infinity, "row 1 channel 2 is -inf");
  refuses(PerToken({4}), -70000.0f, "too large");
  refuses(PerToken({1}), 70000.0f, "too large");
  // Rows are refused if all of their numbers are below or above the range of
  // the type.
  const auto codec = MakeLatentCodec(PerToken({4}), 4);
  KVASIR_ASSERT_OK(codec);
  for (const float number : {-70000.0f, 70000.0f, 65510.0f}) {
    EXPECT_THAT(
        CodeLatent(*codec, at::full({1, 4}, number)),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("too large")))
        << number;
  }
  kvasir::v1::Codec half;
  half.set_dtype(kvasir::v1::F16);
  refuses(half, 70000.0f, "row 1 channel 2 is 70000: too large");
  refuses(half, nan, "nan");
}

TEST(FakeQuantTest, HadamardOnlineCodesTheProductWithTheHadamardMatrix) {
  kvasir::v1::Codec plan = PerToken({8});
  plan.mutable_hadamard_online();
  const auto codec = MakeLatentCodec(plan, 12);
  KVASIR_ASSERT_OK(codec);
  const at::Tensor row = at::randn({3, 12});
  const auto coded = CodeLatent(*codec, row, {.keep_codes = true});
  KVASIR_ASSERT_OK(coded);
  EXPECT_LT((coded->values - row).abs().max().item<double>(), 0.05);
  const CodedLatent rotated =
      Code(PerToken({8}), 12, at::matmul(row, codec->hadamard.t()));
  EXPECT_TRUE(at::equal(rotated.codes, coded->codes));
}

TEST(FakeQuantTest, GradientsPassThroughCodesUnchanged) {
  const auto codec = MakeLatentCodec(PerToken({2}), 4);
  KVASIR_ASSERT_OK(codec);
  const at::Tensor latent = at::randn({3, 4}).requires_grad_(true);
  const auto coded = CodeLatent(*codec, latent);
  KVASIR_ASSERT_OK(coded);
  coded->values.sum().backward();
  EXPECT_TRUE(at::equal(latent.grad(), at::ones({3, 4})));
}

}  // namespace
}  // namespace kvasir::compress
