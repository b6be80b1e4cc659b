#include "worker/ranks/plan_check.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using ::testing::AllOf;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;

constexpr int64_t kTokens = 100;

std::vector<int32_t> Text(int64_t tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  std::iota(ids.begin(), ids.end(), 3);
  return ids;
}

RankOptions Checked(int64_t tokens, absl::Duration limit = absl::Minutes(5)) {
  RankOptions options = TinyOptions();
  options.plan_check = {.token_ids = Text(tokens), .time_limit = limit};
  return options;
}

kvasir::v1::KvPlan PlanOf(const std::string& preset) {
  return *plan::MakePresetPlan(
      preset, model::AttentionShapeOf(*model::SpecOfShape(TinyShape())));
}

std::unique_ptr<Rank> RankOf(const kvasir::v1::KvPlan& plan,
                             const RankOptions& options) {
  const model::ModelShape shape = TinyShape();
  const model::DecoderSpec spec = *model::SpecOfShape(shape);
  const auto source = *RandomSource::Create(shape, spec, Resolved(plan, spec),
                                            /*seed=*/7, kernels::DType::kBf16);
  auto rank = Rank::Create(spec, plan, source.get(), options);
  KVASIR_EXPECT_OK(rank);
  return rank.ok() ? *std::move(rank) : nullptr;
}

std::unique_ptr<Rank> RankOf(const std::string& preset,
                             const RankOptions& options) {
  return RankOf(PlanOf(preset), options);
}

// The greedy tokens of a prompt.
std::vector<int32_t> Answer(Rank* rank) {
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  const std::vector<int32_t> prompt = Text(20);
  std::vector<int32_t> answer;
  for (int i = 0; i < 12; ++i) {
    DirectStep step = {.sequence_id = 1, .sample = GreedySample()};
    if (i == 0) step.token_ids = prompt;
    const auto result = runner.Run(absl::MakeConstSpan(&step, 1));
    KVASIR_EXPECT_OK(result);
    if (!result.ok()) break;
    answer.push_back(result->sequences(0).token_id());
  }
  return answer;
}

TEST(PlanCheckTest, FewerBitsHaveAGreaterDivergence) {
  const auto kl = [](const std::string& preset) {
    const PlanCheck check = RankOf(preset, Checked(kTokens))->plan_check();
    EXPECT_THAT(check.skipped, IsEmpty());
    EXPECT_EQ(check.tokens, kTokens / 2);
    return check.kl;
  };
  const double eight = kl("dense-8bit");
  EXPECT_GT(eight, 0);
  EXPECT_THAT(kl("rotated-3bit"), AllOf(Gt(2 * eight), Lt(0.5)));
}

TEST(PlanCheckTest, TheModelIsTheSameAfterTheCheck) {
  for (const std::string preset :
       {"dense-8bit", "rotated-4bit", "palu-50-g1"}) {
    const auto unchecked = RankOf(preset, TinyOptions());
    const auto checked = RankOf(preset, Checked(kTokens));
    EXPECT_EQ(Answer(checked.get()), Answer(unchecked.get())) << preset;
    EXPECT_EQ(checked->cache_id(), unchecked->cache_id()) << preset;
  }
}

TEST(PlanCheckTest, ADensePlanIsNotCompared) {
  const PlanCheck check =
      RankOf(plan::kDensePreset, Checked(kTokens))->plan_check();
  EXPECT_TRUE(check.is_dense);
  EXPECT_EQ(check.tokens, 0);
}

TEST(PlanCheckTest, APlanWithWeightsOfItsOwnIsNotCompared) {
  EXPECT_THAT(RankOf("palu-50-g1", Checked(kTokens))->plan_check().skipped,
              HasSubstr("weights of its own"));
}

TEST(PlanCheckTest, ATextThatWouldTakeTooLongIsNotCompared) {
  const auto rank =
      RankOf("rotated-4bit", Checked(kTokens, absl::ZeroDuration()));
  EXPECT_THAT(rank->plan_check().skipped, HasSubstr("it would take "));
  EXPECT_THAT(rank->plan_check().key, IsEmpty());
  // The dense program is no longer in use.
  EXPECT_EQ(Answer(rank.get()),
            Answer(RankOf("rotated-4bit", TinyOptions()).get()));
}

TEST(PlanCheckTest, AnEarlierResultWithTheSameKeyIsUsed) {
  const PlanCheck first = RankOf("dense-8bit", Checked(kTokens))->plan_check();
  std::vector<std::string> keys;
  const auto again = [&](const std::string& preset, int64_t tokens) {
    RankOptions options = Checked(tokens);
    options.plan_check->known =
        [&](const std::string& key) -> std::optional<PlanCheck> {
      keys.push_back(key);
      if (key != first.key) return std::nullopt;
      return PlanCheck{.kl = 7, .tokens = 1};
    };
    return RankOf(preset, options)->plan_check().kl;
  };
  EXPECT_EQ(again("dense-8bit", kTokens), 7);
  EXPECT_LT(again("rotated-4bit", kTokens), 1);
  EXPECT_LT(again("dense-8bit", kTokens - 1), 1) << "for a shorter text";
  EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), 3);
}

TEST(PlanCheckTest, EvictionsAreLeftOut) {
  const std::string preset = "dense-8bit";
  kvasir::v1::KvPlan evicts = PlanOf(preset);
  for (auto& layer : *evicts.mutable_layers()) {
    auto* eviction = layer.mutable_eviction();
    for (uint32_t head = 0; head < 4; ++head) {
      if (head == 0) eviction->add_units();
      eviction->mutable_units(0)->add_heads(head);
    }
    eviction->set_budget(32);
    eviction->set_recent(8);
    eviction->set_every_tokens(16);
    eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
  }
  EXPECT_EQ(RankOf(evicts, Checked(kTokens))->plan_check().kl,
            RankOf(preset, Checked(kTokens))->plan_check().kl);
}

TEST(PlanCheckTest, AModelWithoutATextIsNotCompared) {
  EXPECT_THAT(RankOf("dense-8bit", Checked(0))->plan_check().skipped,
              HasSubstr("there is no text"));
}

TEST(PlanCheckTest, TheTextIsCutToTheLongestLengthOfTheModel) {
  EXPECT_EQ(RankOf("dense-8bit", Checked(500))->plan_check().tokens, 64);
  EXPECT_EQ(RankOf("dense-8bit", Checked(1))->plan_check().tokens, 1);
}

}  // namespace
}  // namespace kvasir::worker
