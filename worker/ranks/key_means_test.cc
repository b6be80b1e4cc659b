#include "worker/ranks/key_means.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/dtype.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/collective/in_process_group.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"

namespace kvasir::worker {
namespace {

using ::testing::Each;
using ::testing::IsNull;
using ::testing::NotNull;

constexpr uint64_t kSeed = 7;

std::vector<int32_t> Text(int64_t tokens, int32_t first = 3) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

kvasir::v1::KvPlan PlanOf(const std::string& preset,
                          const model::ModelShape& shape) {
  return *plan::MakePresetPlan(
      preset, model::AttentionShapeOf(*model::SpecOfShape(shape)));
}

// Returns options to measure means with these tokens, and to compare the plan
// with a dense cache on a different text.
RankOptions Options(std::vector<int32_t> key_mean_tokens) {
  RankOptions options = TinyOptions();
  options.key_mean_tokens = std::move(key_mean_tokens);
  options.plan_check = {.token_ids = Text(60, 50),
                        .time_limit = absl::Minutes(5)};
  return options;
}

std::unique_ptr<Rank> RankOf(const std::string& preset,
                             const RankOptions& options,
                             const model::ModelShape& shape = TinyShape()) {
  RandomSource source(shape, kSeed, kernels::DType::kBf16);
  auto rank = Rank::Create(*model::SpecOfShape(shape), PlanOf(preset, shape),
                           &source, options);
  KVASIR_EXPECT_OK(rank);
  return rank.ok() ? *std::move(rank) : nullptr;
}

using Means = std::vector<std::shared_ptr<const std::vector<float>>>;

Means MeansOf(std::unique_ptr<Rank> rank) {
  const ModelWeights weights = std::move(rank->executor()).TakeWeights();
  Means means;
  for (const LayerWeights& layer : weights.layers) {
    means.push_back(layer.key_mean);
  }
  return means;
}

// Returns a source that replaces the first column of each tensor by
// `number(name, row)`. NaN leaves a number as it is.
ChangedSource WithFirstColumn(
    WeightSource* source,
    std::function<float(const std::string& name, int64_t row)> number) {
  return ChangedSource(
      source, [number = std::move(number)](const std::string& name,
                                           const WeightBlock& block,
                                           WeightSource::Consumer consume) {
        if (block.first_column != 0) return consume(block);
        const auto* const from = static_cast<const float*>(block.data);
        std::vector<float> changed(from, from + block.num_rows * block.columns);
        for (int64_t i = 0; i < block.num_rows; ++i) {
          const float to = number(name, block.first_row + i);
          if (!std::isnan(to))
            changed[static_cast<size_t>(i * block.columns)] = to;
        }
        WeightBlock other = block;
        other.data = changed.data();
        return consume(other);
      });
}

// Returns the plan's divergence from a dense cache. The first number of every
// token's embedding is 3, and moves the numbers of its keys far from 0.
double DivergenceWithLargeMeans(const kvasir::v1::KvPlan& plan,
                                std::vector<int32_t> key_mean_tokens,
                                const model::ModelShape& shape = TinyShape()) {
  const model::DecoderSpec spec = *model::SpecOfShape(shape);
  const auto random = *RandomSource::Create(shape, spec, Resolved(plan, spec),
                                            kSeed, kernels::DType::kF32);
  ChangedSource source =
      WithFirstColumn(random.get(), [](const std::string& name, int64_t row) {
        if (name == "model.embed_tokens.weight") return 3.0f;
        if (!absl::EndsWith(name, "k_proj.weight")) return std::nanf("");
        return row % 3 == 0 ? 2.0f : -1.0f;
      });
  const auto rank =
      Rank::Create(spec, plan, &source, Options(std::move(key_mean_tokens)));
  KVASIR_EXPECT_OK(rank);
  return rank.ok() ? (*rank)->plan_checks().back().kl : 0;
}

TEST(KeyMeansTest, QuantizedKeysDivergeFarLessIfTheirLargeMeanIsLeftOut) {
  const std::map<std::string, model::ModelShape> shapes = {
      {"Llama", TinyShape()},
      {"biases", TinyBiasedShape()},
      {"part rotates", TinyNeoxShape()},
      {"nothing rotates", TinyOptShape()},
      {"window", TinyWindowShape(24)},
      {"experts", TinyMixtralShape()}};
  for (const auto& [name, shape] : shapes) {
    for (const char* preset : {"rotated-3bit", "rotated-4bit", "dense-8bit"}) {
      const auto plan = PlanOf(preset, shape);
      const double with = DivergenceWithLargeMeans(plan, {}, shape);
      EXPECT_GT(with, 0) << name << " " << preset;
      EXPECT_LT(DivergenceWithLargeMeans(plan, Text(40), shape), 0.3 * with)
          << name << " " << preset;
    }
  }
}

TEST(KeyMeansTest, LeavingOutTheMeansIncreasesTheDivergenceOfNoPlan) {
  const model::DecoderSpec spec = *model::SpecOfShape(TinyShape());
  int different = 0;
  for (const PlanCase& plan_case : PlanCases()) {
    const kvasir::v1::KvPlan plan = PlanOf(plan_case, spec);
    const double with = DivergenceWithLargeMeans(plan, {});
    const double without = DivergenceWithLargeMeans(plan, Text(40));
    EXPECT_LE(without, with + 1e-6) << plan_case.name;
    different += without != with ? 1 : 0;
  }
  EXPECT_GT(different, 1);
}

TEST(KeyMeansTest,
     LeavingOutTheMeansHalvesTheDivergenceOfKeysThatAreStoredBeforeRope) {
  kvasir::v1::KvPlan plan = PlanOf("dense-8bit", TinyShape());
  for (auto& layer : *plan.mutable_layers()) {
    layer.mutable_key()->mutable_parts(0)->set_stored(kvasir::v1::PRE_ROPE);
  }
  const double with = DivergenceWithLargeMeans(plan, {});
  EXPECT_GT(with, 0);
  EXPECT_LT(DivergenceWithLargeMeans(plan, Text(40)), 0.5 * with);
}

TEST(KeyMeansTest, TheMeanOfTheFirstLayerIncludesTheBias) {
  const model::ModelShape shape = TinyBiasedShape();
  const auto means = [&](float added) {
    RandomSource random(shape, kSeed, kernels::DType::kF32);
    ChangedSource source =
        WithFirstColumn(&random, [added](const std::string& name, int64_t row) {
          if (!absl::EndsWith(name, "k_proj.bias")) return std::nanf("");
          return added + static_cast<float>(row);
        });
    auto rank =
        Rank::Create(*model::SpecOfShape(shape), PlanOf("rotated-4bit", shape),
                     &source, Options(Text(40)));
    KVASIR_EXPECT_OK(rank);
    return rank.ok() ? MeansOf(*std::move(rank)) : Means();
  };
  const Means small = means(0);
  const Means large = means(100);
  ASSERT_EQ(small.size(), 2u);
  ASSERT_THAT(small[0], NotNull());
  ASSERT_EQ(small[0]->size(), 4u * 8u);  // 4 KV heads of 8 numbers
  for (size_t i = 0; i < small[0]->size(); ++i) {
    // The means are rounded to bf16, so one above 128 may be off by 0.5.
    EXPECT_NEAR((*large[0])[i] - (*small[0])[i], 100, 1) << i;
  }
}

TEST(KeyMeansTest, MeasuringMeansChangesTheCacheIdOnlyOfPlansThatLeaveThemOut) {
  const auto id = [](const std::string& preset, std::vector<int32_t> tokens,
                     const model::ModelShape& shape = TinyShape()) {
    return RankOf(preset, Options(std::move(tokens)), shape)->cache_id();
  };
  EXPECT_EQ(std::set<std::string>(
                {id("rotated-4bit", {}), id("rotated-4bit", Text(40)),
                 id("rotated-4bit", Text(41)), id("rotated-3bit", Text(40))})
                .size(),
            4u);
  EXPECT_EQ(id("dense-bf16", Text(40)), id("dense-bf16", {}));
  // This model normalizes keys after the projection, so it leaves out no mean.
  EXPECT_EQ(id("rotated-4bit", Text(40), TinyQwen3Shape()),
            id("rotated-4bit", {}, TinyQwen3Shape()));
}

TEST(KeyMeansTest, NoMeansAreMeasuredIfTheTextHasOnlyTokensToSkip) {
  EXPECT_EQ(RankOf("rotated-4bit", Options(Text(4)))->cache_id(),
            RankOf("rotated-4bit", Options({}))->cache_id());
  EXPECT_THAT(MeansOf(RankOf("rotated-4bit", Options(Text(4)))),
              Each(IsNull()));
}

TEST(KeyMeansTest, NoMeansAreMeasuredIfATokenIsNotInTheVocabulary) {
  const auto last = static_cast<int32_t>(TinyShape().vocab_size) - 1;
  EXPECT_THAT(MeansOf(RankOf("rotated-4bit", Options(Text(10, last - 9)))),
              Each(NotNull()));
  EXPECT_THAT(MeansOf(RankOf("rotated-4bit", Options(Text(10, last - 8)))),
              Each(IsNull()));
}

TEST(KeyMeansTest, NoMeansAreMeasuredForADensePlan) {
  EXPECT_THAT(MeansOf(RankOf("dense-bf16", Options(Text(40)))), Each(IsNull()));
}

TEST(KeyMeansTest, RanksOfAGroupMeasureTheirOwnHeads) {
  const Means single = MeansOf(RankOf("rotated-4bit", Options(Text(40))));
  std::vector<Means> means(2);
  const auto group = InProcessGroup::Create(2);
  OnRanks(2, [&](int64_t index) {
    const auto r = static_cast<size_t>(index);
    const model::DecoderSpec spec = *model::SpecOfShape(TinyShape());
    RandomSource source(TinyShape(), kSeed, kernels::DType::kBf16);
    auto rank = Rank::Create(spec, PlanOf("rotated-4bit", TinyShape()), &source,
                             Options(Text(40)), group[r].get());
    KVASIR_EXPECT_OK(rank);
    if (rank.ok()) means[r] = MeansOf(*std::move(rank));
  });
  for (size_t layer = 0; layer < single.size(); ++layer) {
    std::vector<float> both = *means[0][layer];
    both.insert(both.end(), means[1][layer]->begin(), means[1][layer]->end());
    ASSERT_EQ(both.size(), single[layer]->size());
    for (size_t i = 0; i < both.size(); ++i) {
      // The group rounds sums differently, so bf16 may round to another number.
      EXPECT_NEAR(both[i], (*single[layer])[i],
                  0.01 * std::abs((*single[layer])[i]) + 1e-3)
          << layer << " " << i;
    }
  }
}

}  // namespace
}  // namespace kvasir::worker
