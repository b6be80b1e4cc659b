#include "compress/evaluate/eviction_spec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/evaluate/baselines.h"
#include "compress/testing/test_decoder.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

constexpr plan::EvictionSettings kTiny = {
    .sinks = 1, .recent = 2, .every_tokens = 2};

EvictionSpec Spec(const std::string& name, const std::string& budget,
                  const plan::EvictionSettings& settings = kTiny) {
  absl::StatusOr<EvictionSpec> spec =
      ParseEvictionSpec(name, budget, settings, 7);
  KVASIR_EXPECT_OK(spec);
  return spec.ok() ? *spec : EvictionSpec();
}

at::Tensor Ids(int64_t tokens) {
  at::manual_seed(1);
  return at::randint(0, 31, {2, tokens}, at::kLong);
}

// Records which positions are kept. A key of the map consists of the layer, the
// sequence, the unit and the number of tokens so far.
class Recorder final : public LayerObserver {
 public:
  using Place = std::array<int64_t, 4>;
  void OnKept(int64_t layer, int64_t batch, int64_t unit, int64_t length,
              const std::vector<int64_t>& positions) override {
    kept[{layer, batch, unit, length}] = positions;
  }
  std::map<Place, std::vector<int64_t>> kept;
};

struct Ran {
  at::Tensor hidden;
  std::map<Recorder::Place, std::vector<int64_t>> kept;
};

Ran Execute(const Candidate& candidate) {
  const at::NoGradGuard no_grad;
  Recorder recorder;
  const auto hidden = candidate.decoder->LastHidden(
      Ids(24), {.observer = &recorder,
                .eviction = candidate.eviction,
                .transform = candidate.transform});
  KVASIR_EXPECT_OK(hidden);
  return {hidden.ok() ? *hidden : at::Tensor(), std::move(recorder.kept)};
}

TEST(EvictionSpecTest, EvictionNamesAndBudgetsAreParsed) {
  EXPECT_EQ(Spec("q-hitter", "0.2").name, "q-hitter 0.2");
  EXPECT_EQ(Spec("recent", "8").settings.sinks, 0u);
  EXPECT_EQ(Spec("random", "8").random_seed, 7u);
  EXPECT_THAT(ParseEvictionSpec("lru", "8", kTiny, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("want q-hitter, h2o or streaming; an "
                                 "evaluation also accepts recent or random")));
  EXPECT_THAT(ParseEvictionSpec("h2o", "two", kTiny, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not an eviction budget")));
}

TEST(EvictionSpecTest, AnEvictionBudgetOfTheWholeWindowChangesNothing) {
  const ReferenceDecoder decoder = TestDecoder();
  const Candidate whole = *MakeCandidate("whole", decoder);
  const auto evicting = Evicting(whole, Spec("h2o", "24"));
  KVASIR_ASSERT_OK(evicting);
  EXPECT_EQ(evicting->candidate.model, "whole + h2o 24");
  const Ran ran = Execute(evicting->candidate);
  EXPECT_TRUE(ran.kept.empty());
  EXPECT_LT((ran.hidden - Execute(whole).hidden).abs().max().item<double>(),
            1e-4);
}

TEST(EvictionSpecTest, HiddenStatesBeforeTheFirstEvictionDoNotChange) {
  const ReferenceDecoder decoder = TestDecoder();
  const Candidate whole = *MakeCandidate("whole", decoder);
  for (const char* name :
       {"q-hitter", "h2o", "streaming", "recent", "random"}) {
    SCOPED_TRACE(name);
    const auto evicting = Evicting(whole, Spec(name, "6"));
    KVASIR_ASSERT_OK(evicting);
    const Ran ran = Execute(evicting->candidate);
    for (const auto& [place, positions] : ran.kept) {
      EXPECT_EQ(positions.size(), 6u);
    }
    EXPECT_FALSE(ran.kept.empty());
    const at::Tensor off =
        (ran.hidden - Execute(whole).hidden).abs().amax(c10::IntArrayRef{0, 2});
    EXPECT_LT(off.slice(0, 0, 8).max().item<double>(), 1e-4);
    EXPECT_GT(off.slice(0, 8).min().item<double>(), 1e-4);
  }
}

TEST(EvictionSpecTest, TheEvictionNamedRecentKeepsOnlyTheLatestTokens) {
  const ReferenceDecoder decoder = TestDecoder();
  const auto recent =
      Evicting(*MakeCandidate("whole", decoder), Spec("recent", "4"));
  KVASIR_ASSERT_OK(recent);
  const Ran ran = Execute(recent->candidate);
  EXPECT_EQ(ran.kept.at({0, 1, 0, 10}), (std::vector<int64_t>{6, 7, 8, 9}));
}

// If received attention has a weight of 0, Q-Hitter keeps the tokens with the
// smallest quantization errors. Rounding to bf16 does not count as such an
// error. An eviction in the plan gives the same result as one that EvictingPlan
// adds.
TEST(EvictionSpecTest,
     WithALambdaOfZeroTheTokensWithTheSmallestCodeErrorsAreKept) {
  const plan::AttentionShape shape = model::AttentionShapeOf(TestSpec());
  kvasir::v1::KvPlan plan = plan::FullRankPlan(shape, kvasir::v1::BF16);
  for (auto& layer : *plan.mutable_layers()) {
    auto* codec = layer.mutable_key()->mutable_parts(0)->mutable_codec();
    codec->mutable_bits()->add_schedule(2);
    codec->mutable_per_token();
    codec->set_param_dtype(kvasir::v1::F16);
  }
  const ReferenceDecoder coded = TestDecoder(1, plan);
  plan::EvictionSettings settings = kTiny;
  settings.lambda = 0;
  settings.every_tokens = 24;
  settings.recent = 1;
  settings.sinks = 0;
  const EvictionSpec spec = Spec("q-hitter", "9", settings);
  const auto evicting = Evicting(*MakeCandidate("coded", coded), spec);
  KVASIR_ASSERT_OK(evicting);
  // An eviction at the end of the prompt affects only later tokens, so 4 tokens
  // follow the prompt of 20.
  const at::NoGradGuard no_grad;
  (*evicting->rules)[0]->prompt_tokens = 20;
  Recorder recorder;
  KVASIR_ASSERT_OK(coded.LastHidden(
      Ids(24), {.observer = &recorder, .eviction = evicting->rules.get()}));
  const std::vector<int64_t>& have = recorder.kept.at({0, 0, 0, 20});

  struct Latents final : LayerObserver {
    void OnLatent(int64_t layer, plan::Side side, int,
                  const at::Tensor& latent) override {
      if (layer == 0 && side == plan::Side::kKey) seen = latent;
    }
    at::Tensor seen;
  } latents;
  KVASIR_ASSERT_OK(coded.LastHidden(Ids(24), {.observer = &latents}));
  const LatentCodec& codec = coded.program(0).key[0].latents[0].codec;
  const auto& unit = (*evicting->rules)[0]->layer.slots.units[0];
  std::vector<std::pair<double, int64_t>> losses;
  for (int64_t t = 0; t < 19; ++t) {
    double squares = 0;
    for (const int64_t head : unit) {
      const int64_t width = codec.stored_width;
      const at::Tensor x =
          latents.seen[0][t].slice(0, head * width, (head + 1) * width);
      squares +=
          (CodeLatent(codec, x)->values - x).square().sum().item<double>();
    }
    losses.emplace_back(std::sqrt(squares), t);
  }
  std::sort(losses.begin(), losses.end());
  std::vector<int64_t> want = {19};
  for (int i = 0; i < 8; ++i)
    want.push_back(losses[static_cast<size_t>(i)].second);
  std::sort(want.begin(), want.end());
  EXPECT_EQ(have, want);

  kvasir::v1::KvPlan evicts = plan;
  KVASIR_ASSERT_OK(
      plan::ApplyEviction(Spec("q-hitter", "9").settings, shape, &evicts));
  const ReferenceDecoder planned = TestDecoder(1, evicts);
  const auto on_top =
      Evicting(*MakeCandidate("coded", coded), Spec("q-hitter", "9"));
  KVASIR_ASSERT_OK(on_top);
  const Ran by_plan = Execute(*MakeCandidate("planned", planned));
  EXPECT_FALSE(by_plan.kept.empty());
  EXPECT_EQ(by_plan.kept, Execute(on_top->candidate).kept);
}

// Returns a plan that codes whole keys and values and keeps the tokens `exact`
// without codes.
kvasir::v1::KvPlan CodedPlan(const plan::ExactTokens& exact) {
  kvasir::v1::KvPlan plan =
      plan::FullRankPlan(model::AttentionShapeOf(TestSpec()), kvasir::v1::F32);
  for (auto& layer : *plan.mutable_layers()) {
    for (auto* side : {layer.mutable_key(), layer.mutable_value()}) {
      auto* codec = side->mutable_parts(0)->mutable_codec();
      codec->mutable_bits()->add_schedule(4);
      codec->mutable_per_token();
      codec->set_param_dtype(kvasir::v1::F16);
    }
  }
  EXPECT_TRUE(plan::SetExactTokens(exact, &plan));
  return plan;
}

TEST(EvictionSpecTest, TheEvictionNamedRecentKeepsTheSinksThatAPlanKeepsExact) {
  const ReferenceDecoder decoder = TestDecoder(1, CodedPlan({.sinks = 3}));
  const auto recent =
      Evicting(*MakeCandidate("coded", decoder), Spec("recent", "6"));
  KVASIR_ASSERT_OK(recent);
  const Ran ran = Execute(recent->candidate);
  EXPECT_EQ(ran.kept.at({0, 1, 0, 10}),
            (std::vector<int64_t>{0, 1, 2, 7, 8, 9}));
}

// A baseline's exact tokens must have the same effect on eviction as those of a
// plan, so that baselines and plans can be compared.
TEST(EvictionSpecTest, TokensThatABaselineKeepsExactAreNeverEvicted) {
  const ReferenceDecoder decoder = TestDecoder();
  for (const auto& [exact, sinks, recent] :
       {std::tuple("sinks=2,window=8", 4, 64),
        std::tuple("sinks=6,window=80", 6, 80)}) {
    const std::string name = absl::StrCat("per-token:k4,v4,", exact);
    SCOPED_TRACE(name);
    const auto baseline = MakeBaseline({.name = name, .decoder = &decoder});
    KVASIR_ASSERT_OK(baseline);
    const auto& candidate = baseline->candidate;
    const auto evicting = Evicting(candidate, Spec("h2o", "0.5", {}));
    KVASIR_ASSERT_OK(evicting);
    EXPECT_EQ((*evicting->rules)[0]->layer.slots.sinks, sinks);
    EXPECT_EQ((*evicting->rules)[0]->layer.slots.recent, recent);

    const ReferenceDecoder coded = TestDecoder(
        1,
        CodedPlan({.sinks = static_cast<uint32_t>(candidate.exact_sinks),
                   .window = static_cast<uint32_t>(candidate.exact_window)}));
    const auto planned =
        Evicting(*MakeCandidate("coded", coded), Spec("h2o", "0.5", {}));
    KVASIR_ASSERT_OK(planned);
    EXPECT_EQ((*planned->rules)[0]->layer.slots.sinks, sinks);
    EXPECT_EQ((*planned->rules)[0]->layer.slots.recent, recent);
    EXPECT_THAT(Evicting(candidate, Spec("h2o", "0.5", {.recent = 7})).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("recent tokens, but keeps")))
        << name;
  }
}

// Exact rows have their own pages in each layer. The scores of an eviction make
// these pages larger, so both change the fixed bytes.
TEST(EvictionSpecTest,
     AddingEvictionToACandidateGivesTheFixedBytesOfAPlanWithEviction) {
  const plan::ExactTokens exact = {.sinks = 1, .window = 2};
  kvasir::v1::KvPlan evicts = CodedPlan(exact);
  KVASIR_ASSERT_OK(plan::ApplyEviction(Spec("h2o", "0.5").settings,
                                       model::AttentionShapeOf(TestSpec()),
                                       &evicts));
  const ReferenceDecoder own = TestDecoder(1, evicts);
  const ReferenceDecoder coded = TestDecoder(1, CodedPlan(exact));
  const Candidate planned = *MakeCandidate("planned", own);
  const Candidate before = *MakeCandidate("coded", coded);
  const auto evicting = Evicting(before, Spec("h2o", "0.5"));
  KVASIR_ASSERT_OK(evicting);
  EXPECT_EQ(evicting->candidate.fixed_bytes_per_sequence,
            planned.fixed_bytes_per_sequence);
  EXPECT_GT(planned.fixed_bytes_per_sequence, before.fixed_bytes_per_sequence);
}

TEST(EvictionSpecTest, ACandidateWithEvictionReportsItsSettingsAndKeptSlots) {
  plan::EvictionSettings settings = kTiny;
  settings.lambda = 0.25;
  const ReferenceDecoder decoder = TestDecoder();
  const Candidate whole = *MakeCandidate("whole", decoder);
  EXPECT_FALSE(whole.evicts.has_value());
  EXPECT_EQ(SlotsOfPrompt(*whole.layout, 24), 24);
  const auto json = [&](const char* name, const char* budget) {
    const auto evicting = Evicting(whole, Spec(name, budget, settings));
    KVASIR_EXPECT_OK(evicting);
    const nlohmann::ordered_json summary =
        EvictionJson(*evicting->candidate.evicts, 24);
    EXPECT_EQ(SlotsOfPrompt(*evicting->candidate.layout, 24),
              summary["kept_slots"]);
    return summary;
  };
  EXPECT_EQ(json("q-hitter", "0.25"),
            nlohmann::ordered_json::parse(R"({"method": "q-hitter",
                "budget": 0.25, "kept_slots": 6, "sinks": 1, "recent": 2,
                "lambda": 0.25})"));
  EXPECT_EQ(json("random", "9")["method"], "random");
  EXPECT_EQ(json("recent", "9")["sinks"], 0);
  EXPECT_EQ(json("streaming", "9")["kept_slots"], 9);
  // The eviction is part of the plan and not added by EvictingPlan.
  kvasir::v1::KvPlan evicts = CodedPlan({.sinks = 1});
  KVASIR_ASSERT_OK(plan::ApplyEviction(
      Spec("h2o", "9").settings, model::AttentionShapeOf(TestSpec()), &evicts));
  const ReferenceDecoder planned = TestDecoder(1, evicts);
  const Candidate own = *MakeCandidate("own", planned);
  ASSERT_TRUE(own.evicts.has_value());
  EXPECT_EQ(own.evicts->method, "h2o");
  EXPECT_EQ(SlotsOfPrompt(*own.layout, 24), 9);
}

TEST(EvictionSpecTest, EvictionCanBeAddedToABaseline) {
  const ReferenceDecoder decoder = TestDecoder();
  const auto baseline =
      MakeBaseline({.name = "per-token:k2,v2", .decoder = &decoder});
  KVASIR_ASSERT_OK(baseline);
  plan::EvictionSettings by_codes = kTiny;
  by_codes.lambda = 0.25;
  const auto q_hitter =
      Evicting(baseline->candidate, Spec("q-hitter", "8", by_codes));
  const auto h2o = Evicting(baseline->candidate, Spec("h2o", "8"));
  KVASIR_ASSERT_OK(q_hitter);
  KVASIR_ASSERT_OK(h2o);
  // Q-Hitter, unlike H2O, takes quantization errors into account, so it keeps
  // other tokens.
  EXPECT_NE(Execute(q_hitter->candidate).kept, Execute(h2o->candidate).kept);
}

}  // namespace
}  // namespace kvasir::compress
