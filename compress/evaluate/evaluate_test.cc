#include "compress/evaluate/evaluate.h"

#include <cmath>
#include <vector>

#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "compress/evaluate/baselines.h"
#include "compress/testing/test_decoder.h"
#include "gmock/gmock.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

EvaluationText Text(int64_t tokens, int32_t vocab = 31) {
  EvaluationText text;
  text.name = "some text";
  for (int64_t i = 0; i < tokens; ++i) {
    text.ids.push_back(static_cast<int32_t>((i * i + 3 * i / 2) % vocab));
    text.bytes.push_back(1 + static_cast<int32_t>(i % 3));
  }
  text.bos = 0;
  return text;
}

EvaluateOptions Options() {
  return {.window_tokens = 12,
          .min_windows = 5,
          .repeat = {.tests = 2, .passage_tokens = 6, .filler_tokens = 7}};
}

struct Bench {
  ReferenceDecoder decoder = TestDecoder();
  Candidate teacher = *MakeCandidate("teacher", decoder);
};

absl::StatusOr<std::unique_ptr<Evaluator>> Make(const Bench& bench,
                                                EvaluationText text,
                                                EvaluateOptions options) {
  return Evaluator::Create(bench.teacher, std::move(text), options);
}

// Returns the mean loss of ids[first..] in one sequence, computed from the
// logits.
double PlainLoss(const ReferenceDecoder& decoder, std::vector<int64_t> ids,
                 int64_t first) {
  const at::Tensor all = at::tensor(ids);
  const auto logits = decoder.Logits(all.slice(0, 0, -1).unsqueeze(0));
  KVASIR_EXPECT_OK(logits);
  const at::Tensor log_probabilities =
      at::log_softmax((*logits)[0].to(at::kDouble), -1);
  double nats = 0.0;
  for (int64_t t = first; t < all.size(0); ++t) {
    nats -= log_probabilities[t - 1][all[t].item<int64_t>()].item<double>();
  }
  return nats / static_cast<double>(all.size(0) - first);
}

TEST(EvaluateTest, TheLossOfAWindowCountsAllItsTokensAfterTheStartToken) {
  const Bench bench;
  const EvaluationText text = Text(60);
  const auto evaluator = Make(bench, text, Options());
  KVASIR_ASSERT_OK(evaluator);
  const auto row = (*evaluator)->Evaluate(bench.teacher);
  KVASIR_ASSERT_OK(row);
  ASSERT_EQ(row->window_nats.size(), 5u);
  double nats = 0.0;
  int64_t bytes = 0;
  for (int64_t w = 0; w < 5; ++w) {
    std::vector<int64_t> ids = {0};
    for (int64_t i = 0; i < 11; ++i) {
      ids.push_back(text.ids[static_cast<size_t>(11 * w + i)]);
      bytes += text.bytes[static_cast<size_t>(11 * w + i)];
    }
    const double loss = PlainLoss(bench.decoder, ids, 1);
    EXPECT_NEAR(row->window_nats[static_cast<size_t>(w)], loss, 1e-5);
    nats += 11.0 * loss;
  }
  EXPECT_NEAR(row->nats_per_token, nats / 55.0, 1e-5);
  EXPECT_NEAR(row->nats_per_byte, nats / static_cast<double>(bytes), 1e-5);
  EXPECT_NEAR(row->perplexity, std::exp(nats / 55.0), 1e-3);
  EXPECT_NEAR((*evaluator)->teacher().nats_per_byte, row->nats_per_byte, 1e-9);
}

TEST(EvaluateTest, TheTeacherComparedWithItselfHasNoAddedLoss) {
  const Bench bench;
  const auto evaluator = Make(bench, Text(60), Options());
  KVASIR_ASSERT_OK(evaluator);
  const auto row = (*evaluator)->Evaluate(bench.teacher);
  KVASIR_ASSERT_OK(row);
  EXPECT_EQ(row->added_nats_per_token, 0.0);
  EXPECT_EQ(row->added_low, 0.0);
  EXPECT_EQ(row->added_high, 0.0);
  EXPECT_EQ(row->top1_agreement, 1.0);
  EXPECT_EQ(row->kl_nats, 0.0);
  EXPECT_EQ(row->keep, 1.0);
  // The model has two layers; keys and values each have 2 heads with 8 numbers
  // of 2 bytes.
  EXPECT_EQ(row->kv_payload_bytes_per_token, 128.0);
}

TEST(EvaluateTest, TheDivergenceOfACandidateIsTheMeanOverItsWindows) {
  const Bench bench;
  const auto evaluator = Make(bench, Text(200), Options());
  KVASIR_ASSERT_OK(evaluator);
  const auto coarse =
      MakeBaseline({.name = "per-token:k1,v1", .decoder = &bench.decoder});
  KVASIR_ASSERT_OK(coarse);
  const auto row = (*evaluator)->Evaluate(coarse->candidate);
  KVASIR_ASSERT_OK(row);
  EXPECT_GT(row->kl_nats, 1e-3);
  ASSERT_EQ(row->window_kl.size(), row->window_nats.size());
  EXPECT_NE(row->window_kl[0], row->window_kl[1]);
  double kl = 0.0;
  for (const double window : row->window_kl) kl += window;
  EXPECT_NEAR(kl / static_cast<double>(row->window_kl.size()), row->kl_nats,
              1e-9);
  EXPECT_LT(row->top1_agreement, 1.0);
  EXPECT_GT(row->top1_agreement, 0.0);
  EXPECT_LT(row->added_low, row->added_nats_per_token);
  EXPECT_GT(row->added_high, row->added_nats_per_token);
  EXPECT_NEAR(row->added_nats_per_token,
              row->nats_per_token - (*evaluator)->teacher().nats_per_token,
              1e-9);
}

TEST(EvaluateTest, TheNumberOfThreadsDoesNotChangeTheResult) {
  const Bench bench;
  const auto coarse =
      MakeBaseline({.name = "per-token:k2,v2", .decoder = &bench.decoder});
  KVASIR_ASSERT_OK(coarse);
  std::vector<EvaluationRow> rows;
  for (const int threads : {1, 3}) {
    EvaluateOptions options = Options();
    options.threads = threads;
    const auto evaluator = Make(bench, Text(150), options);
    KVASIR_ASSERT_OK(evaluator);
    auto row = (*evaluator)->Evaluate(coarse->candidate);
    KVASIR_ASSERT_OK(row);
    rows.push_back(*std::move(row));
  }
  EXPECT_EQ(rows[0].window_nats, rows[1].window_nats);
  EXPECT_EQ(rows[0].kl_nats, rows[1].kl_nats);
  EXPECT_EQ(rows[0].repeat_nats_per_token, rows[1].repeat_nats_per_token);
}

TEST(EvaluateTest, TheRepeatTestMeasuresTheLossOfOnlyTheSecondCopyOfAPassage) {
  const Bench bench;
  const EvaluationText text = Text(60);
  EvaluateOptions options = Options();
  options.repeat.tests = 1;
  const auto evaluator = Make(bench, text, options);
  KVASIR_ASSERT_OK(evaluator);
  const auto row = (*evaluator)->Evaluate(bench.teacher);
  KVASIR_ASSERT_OK(row);
  std::vector<int64_t> ids = {0};
  ids.insert(ids.end(), text.ids.begin(), text.ids.begin() + 6);
  ids.insert(ids.end(), text.ids.begin() + 30, text.ids.begin() + 37);
  ids.insert(ids.end(), text.ids.begin(), text.ids.begin() + 6);
  // The first token of the second copy is not scored, because the first copy
  // does not predict it.
  ASSERT_TRUE(row->repeat_nats_per_token.has_value());
  EXPECT_NEAR(
      *row->repeat_nats_per_token,
      PlainLoss(bench.decoder, ids, static_cast<int64_t>(ids.size()) - 5),
      1e-5);
  EXPECT_EQ(row->repeat_nats, std::vector{*row->repeat_nats_per_token});
}

TEST(EvaluateTest, ByDefaultTheRepeatTestFitsIntoTheContext) {
  const Bench bench;
  EvaluateOptions options = Options();
  options.repeat = {};
  const auto evaluator = Make(bench, Text(400), options);
  KVASIR_ASSERT_OK(evaluator);
  const RepeatOptions& repeat = (*evaluator)->repeat();
  EXPECT_EQ(repeat.passage_tokens, 15);  // a quarter of 63, rounded down
  EXPECT_EQ(2 * repeat.passage_tokens + repeat.filler_tokens, 63);
  options.repeat.passage_tokens = 60;
  EXPECT_THAT(Make(bench, Text(400), options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("together at most 63")));
}

TEST(EvaluateTest, WithoutAStartTokenTheLossLeavesOutTheFirstToken) {
  const Bench bench;
  EvaluationText text = Text(60);
  text.bos.reset();
  const auto evaluator = Make(bench, text, Options());
  KVASIR_ASSERT_OK(evaluator);
  const auto row = (*evaluator)->Evaluate(bench.teacher);
  KVASIR_ASSERT_OK(row);
  EXPECT_NEAR(row->window_nats[1],
              PlainLoss(bench.decoder,
                        {text.ids.begin() + 12, text.ids.begin() + 24}, 1),
              1e-5);
}

TEST(EvaluateTest, TextsWindowsAndModelsThatDoNotFitAreRefusedWithTheReason) {
  const Bench bench;
  EXPECT_THAT(Make(bench, Text(54), Options()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("some text has 54 tokens, but 55")));
  EXPECT_THAT(Make(bench, Text(60, 40), Options()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the vocabulary of teacher has 31")));
  EvaluateOptions options = Options();
  options.window_tokens = 65;
  EXPECT_THAT(Make(bench, Text(900), options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("windows must have 2 to 64 tokens")));
  model::DecoderSpec spec = TestSpec();
  spec.vocab_size = 30;
  const ReferenceDecoder other = TestDecoder(2, std::nullopt, spec);
  const auto evaluator = Make(bench, Text(60), Options());
  KVASIR_ASSERT_OK(evaluator);
  EXPECT_THAT((*evaluator)->Evaluate(*MakeCandidate("other", other)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("other has a vocabulary of 30")));
}

TEST(EvaluateTest, FewerThanTwoWindowsAreRefused) {
  const Bench bench;
  EvaluateOptions options = Options();
  options.min_windows = 1;
  options.max_windows = 1;
  EXPECT_THAT(Make(bench, Text(60), options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is limited to 1, but must be at least 2")));
  options.max_windows = 0;
  EXPECT_THAT(Make(bench, Text(20), options).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("22 are needed for 2 windows of 11")));
}

TEST(EvaluateTest, AStartTokenOutsideTheVocabularyIsRefused) {
  const Bench bench;
  EvaluationText text = Text(60);
  text.bos = 31;
  EXPECT_THAT(Make(bench, text, Options()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the id of the start token is 31")));
}

TEST(EvaluateTest, ClampedCodesAreCountedAnewInEachEvaluation) {
  const Bench bench;
  const auto baseline =
      MakeBaseline({.name = "per-channel:k2.pre",
                    .decoder = &bench.decoder,
                    .calibration_ids = at::arange(6).unsqueeze(0)});
  KVASIR_ASSERT_OK(baseline);
  const auto rate = [&](int64_t tokens) {
    const auto evaluator = Make(bench, Text(tokens), Options());
    KVASIR_EXPECT_OK(evaluator);
    const auto row = (*evaluator)->Evaluate(baseline->candidate);
    KVASIR_EXPECT_OK(row);
    return row->clamp_rate;
  };
  const double first = rate(60);
  EXPECT_GT(first, 0.0);
  EXPECT_NE(rate(200), first);
  EXPECT_EQ(rate(60), first);
}

TEST(EvaluateTest, InTheJsonReportInvalidUtf8IsReplacedAndInfinityIsNull) {
  Evaluation report;
  report.text = "caf\xe9.txt";
  report.rows.emplace_back().perplexity = HUGE_VAL;
  const auto json = nlohmann::ordered_json::parse(EvaluationToJson(report));
  EXPECT_EQ(json["text"], "caf\xef\xbf\xbd.txt");
  EXPECT_TRUE(json["rows"][0]["perplexity"].is_null());
}

TEST(EvaluateTest, WeightsThatAreNotFiniteAreAnErrorThatNamesTheModel) {
  const Bench bench;
  ReferenceDecoder::Parts parts = TestParts(TestSpec(), 1);
  parts.layers[1]["mlp.down_proj.weight"][0][0].fill_(std::nan(""));
  const auto broken = ReferenceDecoder::FromTensors(std::move(parts));
  KVASIR_ASSERT_OK(broken);
  const auto evaluator = Make(bench, Text(60), Options());
  KVASIR_ASSERT_OK(evaluator);
  EXPECT_THAT(
      (*evaluator)->Evaluate(*MakeCandidate("broken", *broken)).status(),
      StatusIs(absl::StatusCode::kInternal,
               HasSubstr("broken, window 0: the loss of a window must be "
                         "finite, is nan")));
}

TEST(EvaluateTest, TheProgressFunctionCountsWindowsUntilItStopsTheEvaluation) {
  const Bench bench;
  EvaluateOptions options = Options();
  std::vector<int64_t> seen;
  options.progress = [&seen](int64_t done, int64_t total) {
    EXPECT_GE(total, done);
    seen.push_back(done);
    return seen.size() < 7;
  };
  const auto evaluator = Make(bench, Text(60), options);
  KVASIR_ASSERT_OK(evaluator);
  EXPECT_EQ(seen, (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_THAT((*evaluator)->Evaluate(bench.teacher).status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("stopped")));
  EXPECT_EQ(seen.size(), 7u);
}

TEST(EvaluateTest, BytesOfACandidateFollowFromItsPlan) {
  kvasir::v1::KvPlan plan =
      plan::FullRankPlan(model::AttentionShapeOf(TestSpec()), kvasir::v1::F16);
  kvasir::v1::Part* part =
      plan.mutable_layers(0)->mutable_value()->mutable_parts(0);
  part->mutable_codec()->mutable_bits()->add_schedule(4);
  part->mutable_codec()->mutable_per_token();
  part->mutable_codec()->set_param_dtype(kvasir::v1::F16);
  // Each exact token adds a row of 16 numbers with 2 bytes each.
  plan.mutable_layers(0)->mutable_value()->set_exact_window(8);
  const ReferenceDecoder decoder = TestDecoder(1, plan);
  const auto candidate = MakeCandidate("planned", decoder);
  KVASIR_ASSERT_OK(candidate);
  EXPECT_GE(candidate->fixed_bytes_per_sequence, 8 * 16 * 2);
  const auto layout =
      cache::PageLayout::Create(plan, model::AttentionShapeOf(TestSpec()), {});
  KVASIR_ASSERT_OK(layout);
  EXPECT_EQ(candidate->fixed_bytes_per_sequence,
            layout->fixed_bytes_per_sequence());
  // There are keys and values of two layers. The coded values of layer 0 have
  // two heads with 4 bytes of codes and 4 bytes of parameters each. The other
  // three take 32 bytes each.
  EXPECT_EQ(candidate->kv_payload_bytes_per_token, 96.0 + 16.0);
  EXPECT_EQ(candidate->keep, 1.0);
  EXPECT_EQ(candidate->method, "full");
  EXPECT_EQ(candidate->exact_sinks, 0);
  EXPECT_EQ(candidate->exact_window, 8);
}

TEST(EvaluateTest, TheJsonReportHasAllFields) {
  const Bench bench;
  const auto evaluator = Make(bench, Text(60), Options());
  KVASIR_ASSERT_OK(evaluator);
  Evaluation report = (*evaluator)->report();
  report.rows.push_back(*(*evaluator)->Evaluate(bench.teacher));
  const auto json = nlohmann::ordered_json::parse(EvaluationToJson(report));
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  EXPECT_THAT(keys, testing::ElementsAre("teacher", "text", "window_tokens",
                                         "windows", "rows"));
  keys.clear();
  for (const auto& [key, value] : json["teacher"].items()) keys.push_back(key);
  EXPECT_THAT(keys,
              testing::ElementsAre("model", "nats_per_token", "nats_per_byte",
                                   "kv_bytes_per_token", "window_nats"));
  keys.clear();
  for (const auto& [key, value] : json["rows"][0].items()) keys.push_back(key);
  EXPECT_THAT(
      keys,
      testing::ElementsAre(
          "model", "method", "keep", "exact_sinks", "exact_window",
          "kv_bytes_per_token", "kv_payload_bytes_per_token",
          "fixed_bytes_per_sequence", "kv_bytes_per_sequence", "nats_per_token",
          "nats_per_byte", "perplexity", "added_nats_per_token", "added_ci95",
          "top1_agreement", "kl_nats", "repeat_nats_per_token", "clamp_rate",
          "window_nats", "window_kl", "repeat_nats"));
  EXPECT_EQ(json["windows"], 5);
  EXPECT_EQ(json["rows"][0]["window_nats"].size(), 5u);
}

}  // namespace
}  // namespace kvasir::compress
