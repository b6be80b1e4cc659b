#include "worker/ranks/plan_check.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/device.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::Optional;

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

// Returns the tokens that the rank decodes greedily after a prompt.
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

TEST(PlanCheckTest, APlanWithFewerBitsHasAGreaterDivergence) {
  const auto kl = [](const std::string& preset) {
    const PlanCheck check =
        RankOf(preset, Checked(kTokens))->plan_checks().back();
    EXPECT_THAT(check.skipped, IsEmpty());
    EXPECT_EQ(check.tokens, kTokens / 2);
    return check.kl;
  };
  const double eight = kl("dense-8bit");
  EXPECT_GT(eight, 0);
  EXPECT_THAT(kl("rotated-3bit"), AllOf(Gt(2 * eight), Lt(0.5)));
}

TEST(PlanCheckTest, TheCheckDoesNotChangeTheModelsOutput) {
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
      RankOf(plan::kDensePreset, Checked(kTokens))->plan_checks().back();
  EXPECT_TRUE(check.is_dense);
  EXPECT_EQ(check.tokens, 0);
}

TEST(PlanCheckTest, APlanWithWeightsOfItsOwnIsNotCompared) {
  EXPECT_THAT(
      RankOf("palu-50-g1", Checked(kTokens))->plan_checks().back().skipped,
      HasSubstr("weights of its own"));
}

TEST(PlanCheckTest, AComparisonThatWouldTakeTooLongIsSkipped) {
  const auto rank =
      RankOf("rotated-4bit", Checked(kTokens, absl::ZeroDuration()));
  EXPECT_THAT(rank->plan_checks().back().skipped, HasSubstr("it would take "));
  EXPECT_THAT(rank->plan_checks().back().key, IsEmpty());
  // The rank uses the plan's own program again, not that of the dense cache.
  EXPECT_EQ(Answer(rank.get()),
            Answer(RankOf("rotated-4bit", TinyOptions()).get()));
}

TEST(PlanCheckTest, AnEarlierResultWithTheSameKeyIsUsed) {
  const PlanCheck first =
      RankOf("dense-8bit", Checked(kTokens))->plan_checks().back();
  std::vector<std::string> keys;
  const auto again = [&](const std::string& preset, int64_t tokens) {
    RankOptions options = Checked(tokens);
    options.plan_check->known =
        [&](const std::string& key) -> std::optional<PlanCheck> {
      keys.push_back(key);
      if (key != first.key) return std::nullopt;
      return PlanCheck{.kl = 7, .tokens = 1};
    };
    return RankOf(preset, options)->plan_checks().back().kl;
  };
  EXPECT_EQ(again("dense-8bit", kTokens), 7);
  EXPECT_LT(again("rotated-4bit", kTokens), 1);
  EXPECT_LT(again("dense-8bit", kTokens - 1), 1) << "for a shorter text";
  EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), 3);
}

TEST(PlanCheckTest, TheCheckIgnoresEvictions) {
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
  EXPECT_EQ(RankOf(evicts, Checked(kTokens))->plan_checks().back().kl,
            RankOf(preset, Checked(kTokens))->plan_checks().back().kl);
}

TEST(PlanCheckTest, WithoutATextNoPlanIsCompared) {
  EXPECT_THAT(RankOf("dense-8bit", Checked(0))->plan_checks().back().skipped,
              HasSubstr("there is no text"));
}

TEST(PlanCheckTest, TheCheckFailsIfOneOfItsStepsFails) {
  const model::ModelShape shape = TinyShape();
  const model::DecoderSpec spec = *model::SpecOfShape(shape);
  const auto plan = PlanOf("rotated-4bit");
  const auto source = *RandomSource::Create(shape, spec, Resolved(plan, spec),
                                            /*seed=*/7, kernels::DType::kBf16);
  RankOptions options = Checked(kTokens);
  // The second step has a token that the model does not have.
  options.plan_check->token_ids[40] = static_cast<int32_t>(shape.vocab_size);
  EXPECT_THAT(
      Rank::Create(spec, plan, source.get(), options),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("plan check: the step with tokens 32 to 99"),
                     HasSubstr("token"))));
}

// Returns options that let the rank choose one of these plans.
RankOptions ChoosesFrom(const std::vector<std::string>& presets,
                        double most_kl) {
  RankOptions options = Checked(kTokens);
  const model::DecoderSpec spec = *model::SpecOfShape(TinyShape());
  for (const std::string& preset : presets) {
    options.plan_check->instead.push_back(
        *ServePlan(PlanOf(preset), model::AttentionShapeOf(spec), {}));
  }
  options.plan_check->most_kl = most_kl;
  return options;
}

TEST(PlanCheckTest, TheFirstPlanWithASmallDivergenceIsServed) {
  const std::vector<std::string> others = {"dense-8bit", "dense-bf16"};
  const auto kl = [](const std::string& preset) {
    return RankOf(preset, Checked(kTokens))->plan_checks().back().kl;
  };
  const double eight = kl("dense-8bit");
  ASSERT_LT(eight, kl("rotated-4bit"));
  const struct {
    double most_kl;
    size_t compared;
    std::string served;
  } cases[] = {
      {1, 1, "rotated-4bit"}, {eight, 2, "dense-8bit"}, {0, 3, "dense-bf16"}};
  for (const auto& one : cases) {
    const auto rank = RankOf("rotated-4bit", ChoosesFrom(others, one.most_kl));
    ASSERT_EQ(rank->plan_checks().size(), one.compared);
    // The rank must equal one that was created with only this plan.
    const auto wanted = RankOf(one.served, Checked(kTokens));
    EXPECT_EQ(rank->plan_checks().back().kl, wanted->plan_checks().back().kl);
    EXPECT_EQ(rank->plan().source.method(), wanted->plan().source.method());
    EXPECT_EQ(rank->cache_id(), wanted->cache_id());
    EXPECT_EQ(rank->pages(), wanted->pages());
    EXPECT_EQ(Answer(rank.get()), Answer(wanted.get())) << one.served;
  }
}

TEST(PlanCheckTest, TheWeightsAreReadOnceForAllPlans) {
  const auto one = RankOf("rotated-3bit", TinyOptions());
  const auto chosen = RankOf(
      "rotated-3bit", ChoosesFrom({"rotated-4bit", "dense-bf16"}, /*most=*/0));
  EXPECT_EQ(chosen->read_bytes(), one->read_bytes());
  EXPECT_EQ(chosen->allocator().use(kernels::MemoryTag::kWeights).bytes,
            one->allocator().use(kernels::MemoryTag::kWeights).bytes);
}

TEST(PlanCheckTest, WithoutAComparisonTheLastPlanIsServed) {
  RankOptions options = ChoosesFrom({"dense-8bit", "dense-bf16"}, 1);
  options.plan_check->time_limit = absl::ZeroDuration();
  const auto rank = RankOf("rotated-4bit", options);
  EXPECT_EQ(rank->plan_checks().size(), 2);
  EXPECT_TRUE(rank->plan_checks().back().is_dense);
  EXPECT_EQ(Answer(rank.get()),
            Answer(RankOf("dense-bf16", TinyOptions()).get()));
}

TEST(PlanCheckTest, ThePoolsAreSizedForTheServedPlan) {
  RankOptions options = ChoosesFrom({"dense-bf16"}, 0);
  std::vector<std::string> plans;
  options.choose_pools = [&](const plan::ResolvedPlan& plan,
                             const cache::PageLayout& layout) {
    plans.push_back(plan.source.method());
    return PoolBytes{.pool = 3 * layout.BytesAtLength(64, 16)};
  };
  const auto rank = RankOf("rotated-4bit", options);
  EXPECT_EQ(plans.size(), 2);
  EXPECT_EQ(plans.back(), rank->plan().source.method());
  EXPECT_EQ(rank->allocator().use(kernels::MemoryTag::kKvCache).bytes,
            3 * rank->layout().BytesAtLength(64, 16));
}

TEST(PlanCheckTest, AllRanksOfAGroupServeTheSamePlan) {
  const double single =
      RankOf("rotated-4bit", Checked(kTokens))->plan_checks().back().kl;
  for (const double most_kl : {1.0, 0.0}) {
    std::vector<std::vector<PlanCheck>> checks(2);
    std::vector<std::string> served(2);
    const auto group = InProcessGroup::Create(2);
    OnRanks(2, [&](int64_t index) {
      const auto r = static_cast<size_t>(index);
      Collective* const own = group[r].get();
      const model::ModelShape shape = TinyShape();
      const model::DecoderSpec spec = *model::SpecOfShape(shape);
      const auto serve = [&](const std::string& preset) {
        return *ServePlan(PlanOf(preset), model::AttentionShapeOf(spec), {},
                          own->shard());
      };
      RankOptions options = Checked(kTokens);
      options.plan_check->instead = {serve("dense-bf16")};
      options.plan_check->most_kl = most_kl;
      options.plan_check->known = [](const std::string&) {
        ADD_FAILURE() << "ranks of a group may know different results";
        return std::nullopt;
      };
      const auto plan = serve("rotated-4bit");
      const auto source =
          *RandomSource::Create(shape, spec, *plan->resolved,
                                /*seed=*/7, kernels::DType::kBf16);
      const auto rank = Rank::Create(spec, plan, source.get(), options, own);
      KVASIR_EXPECT_OK(rank);
      if (!rank.ok()) return;
      checks[r] = (*rank)->plan_checks();
      served[r] = (*rank)->plan().source.method();
    });
    EXPECT_EQ(served[0], served[1]);
    EXPECT_EQ(served[0],
              PlanOf(most_kl > 0 ? "rotated-4bit" : "dense-bf16").method());
    ASSERT_FALSE(checks[0].empty());
    EXPECT_EQ(checks[0].front().kl, checks[1].front().kl);
    EXPECT_EQ(checks[0].front().key, "");
    // A group of several ranks rounds sums differently than a single rank.
    EXPECT_NEAR(checks[0].front().kl, single, 0.02 * single);
  }
}

// Ranks may find different divergences if their sums differ in a bit, and must
// still serve one plan.
TEST(PlanCheckTest, AllRanksOfAGroupTakeTheAnswerOfRank0) {
  const model::DecoderSpec spec = *model::SpecOfShape(TinyShape());
  const PlanCheckRequest request = {.token_ids = Text(kTokens)};
  for (const bool answer : {false, true}) {
    const auto group = InProcessGroup::Create(3);
    std::vector<std::optional<bool>> taken(3);
    OnRanks(3, [&](int64_t index) {
      const auto r = static_cast<size_t>(index);
      base::ThreadPool pool(1);
      kernels::CpuDevice device(&pool);
      const auto stream = device.MakeStream();
      PlanComparison comparison({.spec = &spec,
                                 .device = &device,
                                 .stream = stream.get(),
                                 .collective = group[r].get(),
                                 .max_model_len = kTokens},
                                request);
      const auto says = comparison.FirstRankSays(index == 0 ? answer : !answer);
      KVASIR_EXPECT_OK(says);
      if (says.ok()) taken[r] = *says;
    });
    EXPECT_THAT(taken, Each(Optional(answer)));
  }
}

// Multiplies some dimensions of all keys of a model with QK-norm by 64 and
// divides the same dimensions of queries by 64, so that the model computes
// the same.
TEST(PlanCheckTest, LargeDimensionsOfKeysDoNotChangeTheDivergence) {
  const auto kl = [](const std::string& preset, bool is_uneven) {
    const model::ModelShape shape = TinyQwen3Shape();
    const model::DecoderSpec spec = *model::SpecOfShape(shape);
    const auto plan =
        *plan::MakePresetPlan(preset, model::AttentionShapeOf(spec));
    RandomSource random(shape, /*seed=*/7, kernels::DType::kF32);
    ChangedSource source(&random, [&](const std::string& name,
                                      const WeightBlock& block,
                                      WeightSource::Consumer consume) {
      const bool is_query = name.ends_with("self_attn.q_norm.weight");
      const bool is_key = name.ends_with("self_attn.k_norm.weight");
      if (!is_uneven || (!is_query && !is_key)) return consume(block);
      const auto* const from = static_cast<const float*>(block.data);
      std::vector<float> changed(from, from + block.num_rows);
      for (int64_t i = 0; i < block.num_rows; ++i) {
        const int64_t pair = (block.first_row + i) % (spec.rope.rotary_dim / 2);
        const int exponent = pair == 1 ? 6 : 0;
        float& weight = changed[static_cast<size_t>(i)];
        weight = std::ldexp(weight, is_key ? exponent : -exponent);
      }
      WeightBlock other = block;
      other.data = changed.data();
      return consume(other);
    });
    auto rank = Rank::Create(spec, plan, &source, Checked(kTokens));
    KVASIR_EXPECT_OK(rank);
    return rank.ok() ? (*rank)->plan_checks().back().kl : 0;
  };
  for (const std::string preset :
       {"rotated-3bit", "rotated-4bit", "dense-8bit"}) {
    const double even = kl(preset, false);
    EXPECT_GT(even, 0) << preset;
    EXPECT_EQ(kl(preset, true), even) << preset;
  }
}

TEST(PlanCheckTest, OnlyTheLastPredictionsAreComparedIfMoreLogitsDoNotFit) {
  const int64_t row_bytes =
      TinyShape().vocab_size * static_cast<int64_t>(sizeof(float));
  for (const int64_t rows : {7, 1}) {
    RankOptions options = Checked(kTokens);
    options.plan_check->most_bytes = rows * row_bytes + 3;
    const auto rank = RankOf("dense-8bit", options);
    const PlanCheck& check = rank->plan_checks().back();
    EXPECT_EQ(check.tokens, rows);
    EXPECT_GT(check.kl, 0);
  }
}

TEST(PlanCheckTest, ACheckIsSkippedIfTheLogitsOfOneTokenDoNotFit) {
  RankOptions options = Checked(kTokens);
  options.plan_check->most_bytes = 3;
  const auto rank = RankOf("dense-8bit", options);
  EXPECT_THAT(rank->plan_checks().back().skipped,
              ::testing::HasSubstr("bytes, limit 3"));
}

TEST(PlanCheckTest, TheTextIsCutToTheMaximumLengthOfTheModel) {
  EXPECT_EQ(RankOf("dense-8bit", Checked(500))->plan_checks().back().tokens,
            64);
  EXPECT_EQ(RankOf("dense-8bit", Checked(1))->plan_checks().back().tokens, 1);
}

}  // namespace
}  // namespace kvasir::worker
