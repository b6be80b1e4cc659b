#include "worker/executor/model_executor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/status_matchers.h"
#include "model/shapes/shape_config.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<Rank> TinyRank(const RankOptions& options = TinyOptions()) {
  auto rank = MakeTinyRank(options);
  KVASIR_EXPECT_OK(rank);
  return *std::move(rank);
}

DirectRunner RunnerOf(Rank& rank) {
  return DirectRunner(&rank.executor(), &rank.layout(), rank.pages());
}

std::vector<int32_t> Prompt(int32_t first, int count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    ids[static_cast<size_t>(i)] = (first + 37 * i) % 1237;
  }
  return ids;
}

StepResult MustRun(DirectRunner& runner, const std::vector<DirectStep>& steps) {
  auto result = runner.Run(steps);
  KVASIR_EXPECT_OK(result);
  return result.ok() ? *std::move(result) : StepResult{};
}

// Runs a prompt, then samples tokens one after the other.
std::vector<int32_t> Generate(DirectRunner& runner, uint64_t id,
                              const std::vector<int32_t>& prompt,
                              SampleRequest sample, int num_tokens) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < num_tokens; ++i) {
    sample.set_position(prompt.size() + static_cast<size_t>(i));
    DirectStep step = {.sequence_id = id, .sample = sample};
    if (i == 0) step.token_ids = prompt;
    tokens.push_back(MustRun(runner, {step}).sequences(0).token_id());
    sample.clear_prompt_history();
    sample.clear_output_history();
    sample.set_history_reset(false);
  }
  return tokens;
}

SampleRequest Random(uint64_t seed) {
  SampleRequest sample = GreedySample();
  sample.set_temperature(1.5f);
  sample.set_top_p(0.95f);
  sample.set_seed(seed);
  return sample;
}

TEST(ModelExecutorTest, DecodeStepsUseTheLastSampledTokenIfThePlanPassesNone) {
  auto rank = TinyRank();
  EXPECT_FALSE(rank->executor().is_asynchronous());
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> prompt = Prompt(5, 20);
  const std::vector<int32_t> tokens =
      Generate(runner, 1, prompt, Random(3), 12);
  // Repeats the run, but each plan contains the id of the token that was
  // sampled last.
  std::vector<int32_t> fed = prompt;
  for (size_t i = 0; i < tokens.size(); ++i) {
    SampleRequest sample = Random(3);
    sample.set_position(prompt.size() + i);
    const StepResult result = MustRun(
        runner, {{.sequence_id = 2, .token_ids = fed, .sample = sample}});
    ASSERT_EQ(result.sequences(0).token_id(), tokens[i]) << i;
    fed = {tokens[i]};
  }
}

TEST(ModelExecutorTest,
     ASequenceKeepsItsLastSampledTokenDuringStepsOfOtherSequences) {
  auto rank = TinyRank();
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> prompt = Prompt(5, 20);
  const std::vector<int32_t> want =
      Generate(runner, 1, prompt, GreedySample(), 2);
  MustRun(runner,
          {{.sequence_id = 2, .token_ids = prompt, .sample = GreedySample()}});
  MustRun(runner, {{.sequence_id = 3,
                    .token_ids = Prompt(9, 9),
                    .sample = GreedySample()}});
  const StepResult result =
      MustRun(runner, {{.sequence_id = 2, .sample = GreedySample()}});
  EXPECT_EQ(result.sequences(0).token_id(), want[1]);
}

TEST(ModelExecutorTest,
     SixteenSequencesInOneBatchGetTheSameTokensAsOneSequenceAtATime) {
  const auto sample_of = [](int i) {
    SampleRequest sample =
        i % 3 == 0 ? GreedySample() : Random(static_cast<uint64_t>(100 + i));
    if (i % 4 == 1) sample.set_repetition_penalty(1.3f);
    if (i % 5 == 2) sample.set_top_k(7);
    sample.set_num_logprobs(i % 3);
    sample.set_position(77);
    return sample;
  };
  constexpr int kTokens = 4;
  auto alone_rank = TinyRank();
  DirectRunner alone = RunnerOf(*alone_rank);
  std::vector<std::vector<int32_t>> want;
  for (int i = 0; i < 16; ++i) {
    want.emplace_back();
    for (int t = 0; t < kTokens; ++t) {
      const std::vector<int32_t> prompt = Prompt(i, 3 + i % 2);
      DirectStep step = {.sequence_id = static_cast<uint64_t>(i),
                         .sample = sample_of(i)};
      if (t == 0) step.token_ids = prompt;
      want.back().push_back(MustRun(alone, {step}).sequences(0).token_id());
    }
  }
  RankOptions options = TinyOptions();
  options.num_threads = 2;
  auto rank = TinyRank(options);
  DirectRunner runner = RunnerOf(*rank);
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 16; ++i) prompts.push_back(Prompt(i, 3 + i % 2));
  for (int t = 0; t < kTokens; ++t) {
    std::vector<DirectStep> steps;
    for (int i = 15; i >= 0; --i) {
      DirectStep step = {.sequence_id = static_cast<uint64_t>(i),
                         .sample = sample_of(i)};
      if (t == 0) step.token_ids = prompts[static_cast<size_t>(i)];
      steps.push_back(step);
    }
    const StepResult result = MustRun(runner, steps);
    for (int i = 0; i < 16; ++i) {
      EXPECT_EQ(result.sequences(15 - i).token_id(),
                want[static_cast<size_t>(i)][static_cast<size_t>(t)])
          << "sequence " << i << " token " << t;
    }
  }
}

TEST(ModelExecutorTest, ABatchOfSixteenReadsEachWeightOnce) {
  for (const int threads : {1, 2}) {
    RankOptions options = TinyOptions();
    options.num_threads = threads;
    auto rank = TinyRank(options);
    DirectRunner runner = RunnerOf(*rank);
    const std::vector<int32_t> prompt = Prompt(5, 4);
    std::vector<DirectStep> prefill;
    std::vector<DirectStep> decode;
    for (uint64_t id = 0; id < 16; ++id) {
      prefill.push_back(
          {.sequence_id = id, .token_ids = prompt, .sample = GreedySample()});
      decode.push_back({.sequence_id = id, .sample = GreedySample()});
    }
    MustRun(runner, prefill);
    const int64_t start = rank->stream().weight_bytes_read();
    MustRun(runner, decode);
    EXPECT_EQ(rank->stream().weight_bytes_read() - start,
              rank->executor().matrix_bytes())
        << threads << " threads";
  }
}

TEST(ModelExecutorTest, TargetLogprobsEqualTheLogSoftmaxOfTheLogits) {
  RankOptions options = TinyOptions();
  std::map<int64_t, std::vector<float>> logits;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    logits[row.position].assign(row.logits.begin(), row.logits.end());
  };
  // With so little memory, the vocabulary is scored in two chunks.
  options.executor.logits_bytes = 1;
  auto rank = TinyRank(options);
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> ids = Prompt(5, 64);
  const std::vector<int32_t> targets = Prompt(11, 64);
  const StepResult result = MustRun(
      runner, {{.sequence_id = 1, .token_ids = ids, .target_ids = targets}});
  ASSERT_EQ(result.sequences(0).target_logprobs_size(), 64);
  EXPECT_EQ(result.sequences(0).token_id(), -1);
  for (int i = 0; i < 64; ++i) {
    const std::vector<float>& row = logits[i];
    double sum = 0;
    for (const float logit : row) sum += std::exp(static_cast<double>(logit));
    const double want =
        row[static_cast<size_t>(targets[static_cast<size_t>(i)])] -
        std::log(sum);
    EXPECT_NEAR(result.sequences(0).target_logprobs(i), want, 2e-5) << i;
  }
}

TEST(ModelExecutorTest, TargetLogprobsDoNotDependOnTheSizeOfTheLogitsBuffer) {
  const std::vector<int32_t> ids = Prompt(5, 64);
  std::vector<std::vector<float>> results;
  for (const int64_t bytes : {int64_t{1}, int64_t{64} << 20}) {
    RankOptions options = TinyOptions();
    options.executor.logits_bytes = bytes;
    auto rank = TinyRank(options);
    DirectRunner runner = RunnerOf(*rank);
    const StepResult result = MustRun(
        runner, {{.sequence_id = 1, .token_ids = ids, .target_ids = ids}});
    const auto& logprobs = result.sequences(0).target_logprobs();
    results.emplace_back(logprobs.begin(), logprobs.end());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(ModelExecutorTest, PenaltyCountsContinueAfterAPreemption) {
  auto rank = TinyRank();
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> prompt = Prompt(5, 10);
  // These large biases decide which token is sampled, until the penalty for a
  // repeated token outweighs its bias.
  SampleRequest sample = GreedySample();
  for (const int32_t id : {prompt[3], 321, 322}) {
    auto* bias = sample.add_logit_bias();
    bias->set_token_id(id);
    bias->set_bias(id == 322 ? 30.0f : 40.0f);
  }
  const std::vector<int32_t> free = Generate(runner, 1, prompt, sample, 8);

  sample.set_repetition_penalty(3.0f);
  sample.set_frequency_penalty(9.0f);
  sample.set_presence_penalty(5.0f);
  sample.set_history_reset(true);
  sample.mutable_prompt_history()->Add(prompt.begin(), prompt.end());
  const std::vector<int32_t> tokens = Generate(runner, 2, prompt, sample, 8);
  EXPECT_EQ(tokens[0], 321);
  EXPECT_NE(tokens[1], 321);
  EXPECT_NE(tokens, free);

  // Restart as after a preemption: the first two output tokens are now input.
  runner.Release(2);
  std::vector<int32_t> again = prompt;
  again.insert(again.end(), tokens.begin(), tokens.begin() + 2);
  sample.mutable_output_history()->Add(tokens.begin(), tokens.begin() + 2);
  EXPECT_EQ(Generate(runner, 3, again, sample, 6),
            std::vector<int32_t>(tokens.begin() + 2, tokens.end()));
}

TEST(ModelExecutorTest, MasksBansAndBiasesLimitTheSampledTokens) {
  auto rank = TinyRank();
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> prompt = Prompt(5, 10);
  const int32_t best = Generate(runner, 1, prompt, GreedySample(), 1)[0];

  SampleRequest banned = GreedySample();
  banned.add_banned_ids(best);
  EXPECT_NE(Generate(runner, 2, prompt, banned, 1)[0], best);

  SampleRequest biased = GreedySample();
  biased.add_logit_bias()->set_token_id(321);
  biased.mutable_logit_bias(0)->set_bias(1000);
  EXPECT_EQ(Generate(runner, 3, prompt, biased, 1)[0], 321);

  std::vector<uint32_t> words(1237 / 32 + 1, 0);
  words[123 / 32] = 1u << (123 % 32);
  KVASIR_ASSERT_OK(rank->executor().RegisterTokenMask("only-123", words));
  SampleRequest masked = GreedySample();
  masked.set_token_mask("only-123");
  EXPECT_EQ(Generate(runner, 4, prompt, masked, 1)[0], 123);
  EXPECT_THAT(rank->executor().RegisterTokenMask("short", {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("39")));
}

TEST(ModelExecutorTest, ATokenMaskCannotBeReplacedWhileAStepIsInFlight) {
  auto rank = TinyRank();
  ModelExecutor& executor = rank->executor();
  const std::vector<uint32_t> words(1237 / 32 + 1, ~0u);
  KVASIR_ASSERT_OK(executor.RegisterTokenMask("mask", words));
  StepPlan plan;
  plan.set_step_id(executor.last_step_id() + 1);
  KVASIR_ASSERT_OK(executor.Enqueue(plan));
  EXPECT_THAT(
      executor.RegisterTokenMask("mask", words),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in flight")));
  KVASIR_ASSERT_OK(executor.Await().status());
  KVASIR_EXPECT_OK(executor.RegisterTokenMask("mask", words));
}

TEST(ModelExecutorTest, RequestedLogprobsAreSortedInDescendingOrder) {
  auto rank = TinyRank();
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> prompt = Prompt(5, 10);
  SampleRequest three = GreedySample();
  three.set_num_logprobs(3);
  const StepResult result = MustRun(
      runner,
      {{.sequence_id = 1, .token_ids = prompt, .sample = three},
       {.sequence_id = 2, .token_ids = prompt, .sample = GreedySample()}});
  const auto& with = result.sequences(0);
  ASSERT_EQ(with.top_size(), 3);
  EXPECT_EQ(with.top(0).token_id(), with.token_id());
  EXPECT_EQ(with.top(0).logprob(), with.logprob());
  EXPECT_GE(with.top(0).logprob(), with.top(1).logprob());
  EXPECT_GE(with.top(1).logprob(), with.top(2).logprob());
  EXPECT_LT(with.logprob(), 0);
  EXPECT_EQ(result.sequences(1).top_size(), 0);
  EXPECT_EQ(result.sequences(1).token_id(), with.token_id());
}

TEST(ModelExecutorTest, TheLargestStepFitsThePlannedWorkspace) {
  RankOptions options = TinyOptions();
  auto rank = TinyRank(options);
  DirectRunner runner = RunnerOf(*rank);
  SampleRequest sample = Random(1);
  sample.set_num_logprobs(20);
  sample.set_presence_penalty(0.1f);
  for (int32_t id = 0; id < kMaxBiases; ++id) {
    auto* bias = sample.add_logit_bias();
    bias->set_token_id(id);
    bias->set_bias(0.5f);
    sample.add_banned_ids(id);
  }
  const std::vector<int32_t> prompt = Prompt(5, 4);
  std::vector<DirectStep> steps;
  for (uint64_t id = 0; id < 16; ++id) {
    steps.push_back({.sequence_id = id,
                     .token_ids = prompt,
                     .target_ids = prompt,
                     .sample = sample});
  }
  MustRun(runner, steps);
}

TEST(ModelExecutorTest,
     ASequenceWithACopiedPageGivesTheSameOutputAsOneWithTheOriginalPage) {
  auto rank = TinyRank();
  ModelExecutor& executor = rank->executor();
  // the prompt fills one page and 4 slots of the next
  const std::vector<int32_t> prompt = Prompt(5, 20);
  StepPlan plan;
  plan.set_step_id(1);
  SequenceStep* step = plan.add_sequences();
  step->set_sequence_id(1);
  auto* table = step->add_block_tables();
  table->set_reset(true);
  table->add_appended_pages(3);
  table->add_appended_pages(8);
  step->mutable_token_ids()->Add(prompt.begin(), prompt.end());
  step->set_num_tokens(20);
  *step->mutable_sample() = GreedySample();
  KVASIR_ASSERT_OK(executor.Execute(plan));

  // Two sequences continue the same text. Sequence 1 continues in place.
  // Sequence 2 shares the first page of sequence 1. It has a copy of the second
  // page, made by two page copies (8 to 5, 5 to 9).
  StepPlan next;
  next.set_step_id(2);
  for (const auto& [from, to] : {std::pair{8, 5}, std::pair{5, 9}}) {
    auto* copy = next.add_page_copies();
    copy->set_from_page(from);
    copy->set_to_page(to);
  }
  for (const uint64_t id : {uint64_t{1}, uint64_t{2}}) {
    SequenceStep* more = next.add_sequences();
    more->set_sequence_id(id);
    more->add_token_ids(77);
    more->set_num_tokens(1);
    more->set_logical_start(20);
    more->add_physical_starts(20);
    *more->mutable_sample() = GreedySample();
    more->mutable_sample()->set_num_logprobs(2);
  }
  auto* copied = next.mutable_sequences(1)->add_block_tables();
  copied->set_reset(true);
  copied->add_appended_pages(3);
  copied->add_appended_pages(9);
  KVASIR_ASSERT_OK_AND_ASSIGN(const StepResult result, executor.Execute(next));
  EXPECT_EQ(result.sequences(0).token_id(), result.sequences(1).token_id());
  EXPECT_EQ(result.sequences(0).logprob(), result.sequences(1).logprob());
}

// One step copies a sequence's pages to the host pool, overwrites them by other
// copies, and copies them back to other pages. This works only if copies run in
// the order of the list.
TEST(ModelExecutorTest, APageCanBeCopiedToTheHostPoolAndBackInOneStep) {
  RankOptions options = TinyOptions();
  options.host_pages = {2};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank, MakeTinyRank(options));
  ModelExecutor& executor = rank->executor();
  // the prompt fills one page and 4 slots of the next
  const std::vector<int32_t> prompt = Prompt(5, 20);
  StepPlan plan;
  plan.set_step_id(1);
  SequenceStep* step = plan.add_sequences();
  step->set_sequence_id(1);
  auto* table = step->add_block_tables();
  table->set_reset(true);
  table->add_appended_pages(3);
  table->add_appended_pages(8);
  step->mutable_token_ids()->Add(prompt.begin(), prompt.end());
  step->set_num_tokens(20);
  *step->mutable_sample() = GreedySample();
  KVASIR_ASSERT_OK(executor.Execute(plan));

  StepPlan next;
  next.set_step_id(2);
  next.add_released_sequences(1);
  const auto add = [&next](int32_t from, bool from_host, int32_t to,
                           bool to_host) {
    auto* copy = next.add_page_copies();
    copy->set_from_page(from);
    copy->set_from_host(from_host);
    copy->set_to_page(to);
    copy->set_to_host(to_host);
  };
  add(3, false, 0, true);  // copy to the host pool
  add(8, false, 1, true);
  add(3, false, 8, false);  // overwrite both pages
  add(9, false, 3, false);
  add(1, true, 9, false);  // copy back to another page
  add(8, false, 1, true);  // the host page is free now
  add(0, true, 8, false);
  for (const uint64_t id : {uint64_t{2}, uint64_t{3}}) {
    SequenceStep* more = next.add_sequences();
    more->set_sequence_id(id);
    auto* moved = more->add_block_tables();
    moved->set_reset(true);
    moved->add_appended_pages(8);
    moved->add_appended_pages(id == 2 ? 9 : 4);
    const auto ids = absl::MakeConstSpan(prompt).subspan(id == 2 ? 20 : 16);
    more->mutable_token_ids()->Add(ids.begin(), ids.end());
    more->add_token_ids(77);
    more->set_num_tokens(static_cast<uint32_t>(more->token_ids_size()));
    more->set_logical_start(id == 2 ? 20 : 16);
    *more->mutable_sample() = GreedySample();
    more->mutable_sample()->set_num_logprobs(2);
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const StepResult result, executor.Execute(next));
  EXPECT_EQ(result.sequences(0).token_id(), result.sequences(1).token_id());
  EXPECT_EQ(result.sequences(0).logprob(), result.sequences(1).logprob());
}

// With a distance that is a power of two, a token's rows would compete for the
// same sets of a CPU cache.
TEST(LayerAttentionTest,
     TheDistanceOfLatentGroupsInTheBufferOfNewRowsIsNotAPowerOfTwo) {
  kernels::LatentGroup group;
  group.codes.stride_bytes = 128;
  KvArenas::Layer layer;
  layer.key_ring = 0;
  layer.key.emplace_back().exact_groups = {group, group, group};
  EXPECT_EQ(LayerAttention::FreshBytes(layer, 64), 3 * (64 * 128 + 5 * 64));
}

TEST(ModelExecutorTest, PlansThatThisBuildCannotServeAreRefused) {
  auto spec = model::SpecOfShape(TinyShape());
  KVASIR_ASSERT_OK(spec);
  auto plan =
      plan::FullRankPlan(model::AttentionShapeOf(*spec), kvasir::v1::BF16);
  auto* selection = plan.mutable_layers(1)->mutable_selection();
  selection->set_chunk_slots(8);
  selection->set_budget(64);
  selection->mutable_landmark_codec()->set_dtype(kvasir::v1::BF16);
  RandomSource source(TinyShape(), 1, kernels::DType::kBf16);
  EXPECT_THAT(Rank::Create(*spec, plan, &source, TinyOptions()),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("layer 1")));
}

TEST(ModelExecutorTest, ALayerWithoutRopeIgnoresTheOrderOfTokens) {
  model::ModelShape shape = TinyShape();
  shape.num_layers = 1;
  auto spec = model::SpecOfShape(shape);
  KVASIR_ASSERT_OK(spec);
  for (const bool rope : {true, false}) {
    spec->layers[0].rope = rope;
    const auto attention_shape = model::AttentionShapeOf(*spec);
    EXPECT_EQ(attention_shape.layers[0].rope, rope);
    std::vector<float> last;
    RankOptions options = TinyOptions();
    options.executor.logits_tap = [&](const LogitsRow& row) {
      last.assign(row.logits.begin(), row.logits.end());
    };
    RandomSource source(shape, 1, kernels::DType::kBf16);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto rank,
        Rank::Create(*spec,
                     plan::FullRankPlan(attention_shape, kvasir::v1::F32),
                     &source, options));
    DirectRunner runner = RunnerOf(*rank);
    const auto logits_after = [&](uint64_t id, std::vector<int32_t> prompt) {
      MustRun(
          runner,
          {{.sequence_id = id, .token_ids = prompt, .sample = GreedySample()}});
      return last;
    };
    const std::vector<float> one = logits_after(1, {5, 900, 33, 7});
    const std::vector<float> other = logits_after(2, {33, 5, 900, 7});
    ASSERT_EQ(one.size(), other.size());
    float difference = 0;
    for (size_t i = 0; i < one.size(); ++i) {
      difference = std::max(difference, std::abs(one[i] - other[i]));
    }
    if (rope) {
      EXPECT_GT(difference, 1e-3f);
    } else {
      EXPECT_LT(difference, 1e-5f);
    }
  }
}

TEST(ModelExecutorTest, AMaxModelLenAboveTheNumberOfLearnedPositionsIsRefused) {
  RankOptions options = TinyOptions();
  model::ModelShape shape = TinyOptShape();
  shape.max_position = options.executor.max_model_len - 1;
  EXPECT_THAT(MakeTinyRank(options, nullptr, shape),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("128"), HasSubstr("127 positions"))));
  shape.max_position = options.executor.max_model_len;
  KVASIR_EXPECT_OK(MakeTinyRank(options, nullptr, shape));
}

TEST(ModelExecutorTest, TheErrorForAPoolTooSmallForOneSequenceStatesTheSizes) {
  RankOptions options = TinyOptions();
  options.kv_cache_bytes = 20000;
  EXPECT_THAT(
      MakeTinyRank(options),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("128")));
}

TEST(RankMemoryTest,
     TheErrorForAPoolLargerThanTheFreeMemoryStatesTheFlagAndTheSizes) {
  KVASIR_EXPECT_OK(CheckPoolFitsMemory(
      {.pool_bytes = 700, .weight_bytes = 300, .available_bytes = 1000}));
  EXPECT_THAT(
      CheckPoolFitsMemory(
          {.pool_bytes = 701, .weight_bytes = 300, .available_bytes = 1000}),
      StatusIs(absl::StatusCode::kResourceExhausted,
               HasSubstr("KV cache of 701 bytes does not fit: of 1000 bytes "
                         "available the weights take 300; lower "
                         "--kv-cache-bytes to at most 700")));
  EXPECT_THAT(
      CheckPoolFitsMemory(
          {.pool_bytes = 1, .weight_bytes = 3, .available_bytes = 2}),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("at most 0")));
  PoolMemory memory = {.pool_bytes = 600,
                       .host_pool_bytes = 100,
                       .weight_bytes = 300,
                       .available_bytes = 1000};
  KVASIR_EXPECT_OK(CheckPoolFitsMemory(memory));
  memory.host_pool_bytes = int64_t{1} << 62;
  EXPECT_THAT(CheckPoolFitsMemory(memory),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("take 300 and the KV cache 600; lower "
                                 "--host-pool-bytes to at most 100")));
  memory.host_pool_bytes = 60;
  memory.kept_bytes = 40;
  KVASIR_EXPECT_OK(CheckPoolFitsMemory(memory));
  memory.kept_bytes = 41;
  EXPECT_THAT(
      CheckPoolFitsMemory(memory),
      StatusIs(
          absl::StatusCode::kResourceExhausted,
          HasSubstr(
              "take 300, attention weights kept for evictions 41 and the KV "
              "cache 600; lower --host-pool-bytes to at most 59")));
  memory.pool_bytes = 660;
  EXPECT_THAT(
      CheckPoolFitsMemory(memory),
      StatusIs(absl::StatusCode::kResourceExhausted,
               HasSubstr("take 300, attention weights kept for evictions 41; "
                         "lower --kv-cache-bytes to at most 659")));
}

TEST(RankMemoryTest,
     APoolAboveTheMemoryLimitIsRefusedBeforeItsMemoryIsTouched) {
  RankOptions options = TinyOptions();
  options.kv_cache_bytes = int64_t{1} << 50;  // no machine could provide it
  options.memory_limit_bytes = int64_t{1} << 30;
  EXPECT_THAT(MakeTinyRank(options),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("of 1073741824")));
}

// ---------------------------------------------------------------------------
// Plans that break a rule
// ---------------------------------------------------------------------------

// A valid step 2, for a sequence that ran 20 tokens in step 1, in pages 3 and
// 8.
StepPlan SoundPlan() {
  StepPlan plan;
  plan.set_step_id(2);
  SequenceStep* step = plan.add_sequences();
  step->set_sequence_id(1);
  step->add_token_ids(7);
  step->set_num_tokens(1);
  step->set_logical_start(20);
  step->add_physical_starts(20);
  *step->mutable_sample() = GreedySample();
  return plan;
}

SequenceStep* AddFresh(StepPlan* plan, uint64_t id, int32_t page) {
  SequenceStep* step = plan->add_sequences();
  step->set_sequence_id(id);
  auto* table = step->add_block_tables();
  table->set_reset(true);
  table->add_appended_pages(page);
  step->add_token_ids(7);
  step->set_num_tokens(1);
  return step;
}

// A rank with the plan case `name`. If `key_window` is above 0, it replaces the
// case's number of recent keys that are kept uncompressed.
std::unique_ptr<Rank> RankOfCase(const std::string& name,
                                 uint32_t key_window = 0) {
  for (PlanCase plan_case : PlanCases()) {
    if (plan_case.name != name) continue;
    if (key_window > 0) plan_case.key_exact = key_window;
    auto rank = MakePlannedRank(plan_case, TinyOptions());
    KVASIR_EXPECT_OK(rank);
    return *std::move(rank);
  }
  ADD_FAILURE() << "there is no case " << name;
  return nullptr;
}

// A rank with a plan that gives each sequence two side pages.
std::unique_ptr<Rank> RankWithSidePages() {
  std::unique_ptr<Rank> rank = RankOfCase("ExactPaluJoint", /*key_window=*/16);
  EXPECT_EQ(rank->layout().page_groups()[0].side_pages_per_sequence, 2);
  return rank;
}

// Checks that the plan case "ExactRowsInAnotherArena" is what its name says.
TEST(SidePagesTest, ExactRowsMayLieInTheArenaOfAnotherLayer) {
  const std::unique_ptr<Rank> rank = RankOfCase("ExactRowsInAnotherArena");
  const cache::LayerLayout& few = rank->layout().layer(1);
  EXPECT_TRUE(few.key.exact.any());
  for (const cache::ExactSegment& segment : few.key.exact.segments) {
    EXPECT_EQ(segment.layer, 0);
  }
  EXPECT_FALSE(rank->layout().layer(0).key.exact.any());
}

TEST(SidePagesTest, ARingOfExactRowsMayLieInTwoArenas) {
  const std::unique_ptr<Rank> rank = RankOfCase("ExactRowsOverTwoArenas");
  EXPECT_EQ(rank->layout().page_groups()[0].side_pages_per_sequence, 1);
  std::set<int64_t> arenas;
  for (const cache::ExactSegment& segment :
       rank->layout().layer(1).key.exact.segments) {
    arenas.insert(segment.layer);
  }
  EXPECT_EQ(arenas, (std::set<int64_t>{0, 1}));
}

struct Pages {
  int32_t token = 0;
  std::vector<int32_t> side;
};

void AddWithSidePages(StepPlan* plan, uint64_t id, const Pages& pages) {
  auto* table = AddFresh(plan, id, pages.token)->mutable_block_tables(0);
  table->mutable_side_pages()->Add(pages.side.begin(), pages.side.end());
}

// Starts a sequence with these side pages on a new rank.
absl::Status StartWithSidePages(const std::vector<int32_t>& side_pages) {
  StepPlan plan;
  plan.set_step_id(1);
  AddWithSidePages(&plan, 1, {4, side_pages});
  return RankWithSidePages()->executor().Execute(plan).status();
}

TEST(SidePagesTest, APlanWithInvalidOrSharedSidePagesIsRefused) {
  KVASIR_EXPECT_OK(StartWithSidePages({5, 6}));
  const auto refuses = [](const std::vector<int32_t>& pages, const char* why) {
    EXPECT_THAT(StartWithSidePages(pages),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refuses({},
          "sequence 1: the plan gives it 0 side pages in page group 0, but "
          "must give 2");
  refuses({5, 6, 7},
          "sequence 1: the plan gives it 3 side pages in page group 0, but "
          "must give 2");
  refuses({5, -1}, "page -1 of group 0 is outside");
  refuses({5, 5}, "page 5 of group 0 is written twice");
  refuses({5, 4}, "page 4 of group 0 is written twice");
}

// Test fixture: sequence 1 has token page 4 and side pages 5 and 6. Then
// sequence 2 starts. In some tests its plan has side pages of sequence 1.
class TakenSidePagesTest : public ::testing::Test {
 protected:
  void Start(const Pages& pages) {
    StepPlan first;
    first.set_step_id(1);
    AddWithSidePages(&first, 1, {4, {5, 6}});
    KVASIR_ASSERT_OK(executor().Execute(first));
    StepPlan second;
    second.set_step_id(2);
    AddWithSidePages(&second, 2, pages);
    KVASIR_ASSERT_OK(executor().Execute(second));
  }
  static StepPlan GoOn() {
    StepPlan plan;
    plan.set_step_id(3);
    SequenceStep* step = plan.add_sequences();
    step->set_sequence_id(1);
    step->add_token_ids(7);
    step->set_num_tokens(1);
    step->set_logical_start(1);
    step->add_physical_starts(1);
    return plan;
  }
  ModelExecutor& executor() { return rank_->executor(); }

  const std::unique_ptr<Rank> rank_ = RankWithSidePages();
};

TEST_F(TakenSidePagesTest,
       ASequenceContinuesIfNoOtherSequenceTookItsSidePages) {
  Start({7, {8, 9}});
  KVASIR_EXPECT_OK(executor().Execute(GoOn()));
}

TEST_F(TakenSidePagesTest, ASequenceWhoseSidePageAnotherSequenceTookIsRefused) {
  Start({7, {8, 6}});
  EXPECT_THAT(
      executor().Execute(GoOn()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("sequence 1: another sequence has taken one of its "
                         "side pages in page group 0")));
}

TEST_F(TakenSidePagesTest, ASequenceWhoseSidePageNowHoldsTokensIsRefused) {
  Start({5, {8, 9}});
  EXPECT_THAT(
      executor().Execute(GoOn()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("another sequence has taken one of its side pages")));
}

TEST_F(TakenSidePagesTest, APreemptedSequenceMayStartAnewWithOtherSidePages) {
  Start({5, {8, 6}});
  StepPlan plan;
  plan.set_step_id(3);
  AddWithSidePages(&plan, 1, {4, {10, 11}});
  KVASIR_EXPECT_OK(executor().Execute(plan));
}

TEST_F(TakenSidePagesTest,
       AnotherSequenceMayTakeTheSidePagesOfAReleasedSequence) {
  Start({7, {8, 9}});
  StepPlan plan;
  plan.set_step_id(3);
  plan.add_released_sequences(2);
  AddWithSidePages(&plan, 3, {9, {7, 8}});
  KVASIR_EXPECT_OK(executor().Execute(plan));
}

TEST_F(TakenSidePagesTest, AStepInWhichTwoSequencesWriteOnePageIsRefused) {
  Start({7, {8, 9}});
  StepPlan plan = GoOn();
  AddWithSidePages(&plan, 3, {10, {11, 5}});
  EXPECT_THAT(executor().Execute(plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("sequence 3: page 5 of group 0 is written "
                                 "twice")));
}

// Returns step 1, which must run before SoundPlan.
StepPlan StepBefore() {
  StepPlan plan = SoundPlan();
  plan.set_step_id(1);
  SequenceStep* const step = plan.mutable_sequences(0);
  const std::vector<int32_t> prompt = Prompt(5, 20);
  step->mutable_token_ids()->Clear();
  step->mutable_token_ids()->Add(prompt.begin(), prompt.end());
  step->set_num_tokens(20);
  step->set_logical_start(0);
  step->set_physical_starts(0, 0);
  auto* table = step->add_block_tables();
  table->set_reset(true);
  table->add_appended_pages(3);
  table->add_appended_pages(8);
  return plan;
}

struct BrokenPlan {
  const char* name;
  void (*change)(StepPlan*);
  const char* message;
};

class BrokenPlanTest : public ::testing::TestWithParam<BrokenPlan> {};

TEST_P(BrokenPlanTest, ARefusedPlanLeavesTheExecutorUnusable) {
  auto rank = TinyRank();
  KVASIR_ASSERT_OK(rank->executor().Execute(StepBefore()));

  StepPlan plan = SoundPlan();
  GetParam().change(&plan);
  EXPECT_THAT(rank->executor().Execute(plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(GetParam().message)));
  EXPECT_THAT(rank->executor().Execute(SoundPlan()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("an earlier step failed")));
}

// ---------------------------------------------------------------------------
// Evictions that break a rule
// ---------------------------------------------------------------------------

// A valid step 2 that evicts: sequence 1 has 20 tokens in pages 3 and 8, evicts
// 5 of them and continues.
StepPlan SoundEviction() {
  StepPlan plan = SoundPlan();
  plan.mutable_sequences(0)->set_physical_starts(0, 15);
  kvasir::v1::SlotEviction* const eviction = plan.add_evictions();
  eviction->set_sequence_id(1);
  eviction->add_pages(3);
  eviction->add_pages(8);
  eviction->set_num_slots(20);
  eviction->set_kept_slots(15);
  eviction->set_logical_tokens(20);
  return plan;
}

class EvictionPlanTest : public ::testing::TestWithParam<BrokenPlan> {
 protected:
  EvictionPlanTest() {
    PlanCase plan_case = {"Evicts", plan_cases::Full("POST_ROPE"),
                          plan_cases::Full("NO_ROPE")};
    plan_case.eviction =
        R"({"budget":15,"sinks":3,"recent":9,"every_tokens":5,)"
        R"("lambda":1,"positions":"ORIGINAL","observation_window":2})";
    RankOptions options = TinyOptions();
    options.pages = {12};
    auto rank = MakePlannedRank(plan_case, options);
    KVASIR_EXPECT_OK(rank.status());
    rank_ = *std::move(rank);
    StepPlan first = StepBefore();
    first.mutable_sequences(0)->add_first_counted(18);
    KVASIR_EXPECT_OK(rank_->executor().Execute(first));
  }

  std::unique_ptr<Rank> rank_;
};

TEST_F(EvictionPlanTest,
       TheNextTokenNeedsANewPageAfterAnEvictionThatFreedAPage) {
  KVASIR_ASSERT_OK(rank_->executor().Execute(SoundEviction()));
  // The eviction freed page 8, and the step wrote the last slot of page 3. So
  // the next token has no slot.
  StepPlan next = SoundPlan();
  next.set_step_id(3);
  next.mutable_sequences(0)->set_logical_start(21);
  next.mutable_sequences(0)->set_physical_starts(0, 16);
  EXPECT_THAT(rank_->executor().Execute(next),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("covers 16 slots, but the step needs 17")));
}

TEST_P(EvictionPlanTest, AnInvalidEvictionIsRefused) {
  StepPlan plan = SoundEviction();
  GetParam().change(&plan);
  EXPECT_THAT(rank_->executor().Execute(plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(GetParam().message)));
}

kvasir::v1::SlotEviction* Evicts(StepPlan* plan) {
  return plan->mutable_evictions(0);
}
// Changes the plan's eviction to one of a sequence that the executor has never
// run. This is valid: the scheduler may evict slots of a sequence only to copy
// its pages elsewhere, without running it in this step.
void SetSlots(StepPlan* plan, uint64_t slots, int num_pages) {
  Evicts(plan)->set_sequence_id(7);
  Evicts(plan)->set_logical_tokens(slots);
  Evicts(plan)->set_num_slots(slots);
  Evicts(plan)->clear_pages();
  for (int i = 0; i < num_pages; ++i) Evicts(plan)->add_pages(i % 12);
}

INSTANTIATE_TEST_SUITE_P(
    Evictions, EvictionPlanTest,
    ::testing::Values(
        BrokenPlan{
            "InAPageGroupThatDoesNotExist",
            [](StepPlan* p) { Evicts(p)->set_page_group(1); },
            "page group 1: the page group does not exist: the number of page "
            "groups is 1"},
        BrokenPlan{"ThatKeepsAllSlots",
                   [](StepPlan* p) { Evicts(p)->set_kept_slots(20); },
                   "keeps 20 of 20 slots, but must evict at least 1"},
        BrokenPlan{"ThatKeepsNoSlot",
                   [](StepPlan* p) { Evicts(p)->set_kept_slots(0); },
                   "keeps 0 of 20 slots, but must keep at least 1"},
        BrokenPlan{"OfMoreSlotsThanTokensRan",
                   [](StepPlan* p) { Evicts(p)->set_logical_tokens(19); },
                   "has 20 slots, but must have at most 19, the number of "
                   "tokens of the sequence"},
        BrokenPlan{"OfMoreSlotsThanThePoolHolds",
                   [](StepPlan* p) { SetSlots(p, 64000, 4000); },
                   "has 64000 slots, but must have at most 192, the number of "
                   "slots in the pool"},
        BrokenPlan{"OfMoreSlotsThanTheLongestSequenceHas",
                   [](StepPlan* p) { SetSlots(p, 129, 9); },
                   "has 129 slots, but must have at most 128, the maximum "
                   "length of a sequence"},
        BrokenPlan{"OfFewerSlotsThanTheSequenceHas",
                   [](StepPlan* p) { Evicts(p)->set_num_slots(19); },
                   "has 19 slots, but the sequence has 20"},
        BrokenPlan{"AfterMoreTokensThanTheSequenceHas",
                   [](StepPlan* p) { Evicts(p)->set_logical_tokens(21); },
                   "comes after 21 tokens, but the sequence has 20"},
        BrokenPlan{"ThatNamesOnePageTwice",
                   [](StepPlan* p) {
                     SetSlots(p, 40, 2);
                     Evicts(p)->add_pages(1);
                   },
                   "page 1 twice"},
        BrokenPlan{
            "WithTooFewPages",
            [](StepPlan* p) { Evicts(p)->mutable_pages()->RemoveLast(); },
            "has 1 pages, but must have 2"},
        BrokenPlan{"WithAPageOutsideThePool",
                   [](StepPlan* p) { Evicts(p)->set_pages(1, 12); },
                   "page 12 of group 0 is outside of the pool of 12"},
        BrokenPlan{"WithPagesThatTheSequenceDoesNotHave",
                   [](StepPlan* p) { Evicts(p)->set_pages(1, 7); },
                   "names page 7 at index 1, but the sequence's page table "
                   "has page 8 there"},
        BrokenPlan{"ThatKeepsLessThanSinksAndRecentSlots",
                   [](StepPlan* p) { Evicts(p)->set_kept_slots(11); },
                   "kept slots: must be 12 to 20, but is 11"},
        BrokenPlan{
            "AfterMoreCopiesThanThePlanHas",
            [](StepPlan* p) { Evicts(p)->set_after_page_copies(1); },
            "after_page_copies of its eviction is 1, but must be 0 to 0"},
        BrokenPlan{
            "ThatTheSequencesStepIgnores",
            [](StepPlan* p) {
              p->mutable_sequences(0)->set_physical_starts(0, 20);
            },
            "physical start in page group 0 is 20, but must be 15 to 15"},
        BrokenPlan{
            "WithAFirstCountedTokenPastTheStep",
            [](StepPlan* p) { p->mutable_sequences(0)->add_first_counted(22); },
            "first counted token in page group 0 is 22, but must be at most "
            "21"},
        BrokenPlan{"WithCountsForTooManyPageGroups",
                   [](StepPlan* p) {
                     p->mutable_sequences(0)->add_first_counted(20);
                     p->mutable_sequences(0)->add_first_counted(20);
                   },
                   "has 2 first counted tokens, but must have none or 1"}),
    [](const auto& param_info) { return param_info.param.name; });

// A rank on which each of the tiny model's two layers is a page group. Only the
// second layer evicts.
std::unique_ptr<Rank> RankOfTwoPageGroups(cache::PageCounts pages) {
  const PlanCase plan_case = {
      .name = "Evicts",
      .key = plan_cases::Full("POST_ROPE"),
      .value = plan_cases::Full("NO_ROPE"),
      .first_whole = true,
      .eviction = R"({"budget":15,"sinks":3,"recent":9,"every_tokens":5,)"
                  R"("lambda":1,"positions":"ORIGINAL"})"};
  RankOptions options = TinyOptions();
  options.pages = std::move(pages);
  auto rank = MakePlannedRank(plan_case, options);
  KVASIR_EXPECT_OK(rank);
  return *std::move(rank);
}

TEST(EvictionPlanInTwoPageGroupsTest,
     AnEvictionInAPageGroupThatDoesNotEvictIsRefused) {
  const auto rank = RankOfTwoPageGroups({12, 12});
  StepPlan plan = SoundEviction();
  plan.set_step_id(1);
  EXPECT_THAT(rank->executor().Execute(plan),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("eviction in page group 0: no layer of the "
                                 "page group evicts slots")));
}

// Regression test: after a reset in one page group, the executor accepted any
// start position in the other page groups.
TEST(ResetTest, AStepThatResetsASequenceInOnlySomePageGroupsIsRefused) {
  for (const uint32_t resets : {1, 2}) {
    const auto rank = RankOfTwoPageGroups({12, 12});
    StepPlan plan = StepBefore();
    SequenceStep* const step = plan.mutable_sequences(0);
    *step->add_block_tables() = step->block_tables(0);
    step->mutable_block_tables(1)->set_page_group(1);
    step->add_physical_starts(0);
    KVASIR_ASSERT_OK(rank->executor().Execute(plan));
    StepPlan next = SoundPlan();
    next.mutable_sequences(0)->add_physical_starts(15);
    for (uint32_t i = 0; i < resets; ++i) {
      auto* table = next.mutable_sequences(0)->add_block_tables();
      table->set_page_group(1 - i);
      table->set_reset(true);
      table->add_appended_pages(3);
      table->add_appended_pages(8);
    }
    const auto result = rank->executor().Execute(next);
    if (resets == 2) {
      KVASIR_EXPECT_OK(result);
      continue;
    }
    EXPECT_THAT(
        result,
        StatusIs(
            absl::StatusCode::kInvalidArgument,
            HasSubstr("sequence 1: the plan resets its page tables in 1 page "
                      "groups, but must reset them in all 2 or in none")));
  }
}

// ---------------------------------------------------------------------------
// Plans without a scheduler
// ---------------------------------------------------------------------------

TEST(DirectRunnerTest, ASequenceThatIsRewoundReusesThePagesThatItHolds) {
  const std::vector<int32_t> ids = Prompt(5, 64);
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank, MakeTinyRank(TinyOptions()));
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  const auto run = [&](size_t first, size_t count) {
    const auto part = absl::MakeConstSpan(ids);
    const auto result =
        runner.Run({{.sequence_id = 1,
                     .token_ids = part.subspan(first, count),
                     .target_ids = part.subspan(first + 1, count),
                     .output = first >= 20}});
    KVASIR_EXPECT_OK(result);
    return std::vector<float>(result->sequences(0).target_logprobs().begin(),
                              result->sequences(0).target_logprobs().end());
  };
  run(0, 20);
  const std::vector<float> once = run(20, 5);
  const absl::Span<const int32_t> held = runner.slots(1, 0).pages;
  const std::vector<int32_t> pages(held.begin(), held.end());
  const int64_t free = runner.free_pages(0);
  run(25, 35);
  runner.Rewind(1, 20, 20);
  EXPECT_EQ(runner.length(1), 20);
  EXPECT_EQ(run(20, 5), once);
  EXPECT_EQ(runner.slots(1, 0).pages, pages);
  EXPECT_EQ(runner.free_pages(0), free);
}

// Regression test: a refused call of Run had already evicted slots in the
// runner's tables. The executor never received this eviction.
TEST(DirectRunnerTest, ARefusedStepChangesNothing) {
  const std::vector<int32_t> ids = Prompt(5, 64);
  const auto part = [&](size_t first, size_t count) {
    return absl::MakeConstSpan(ids).subspan(first, count);
  };
  std::vector<float> numbers[2];
  for (const bool disturbed : {false, true}) {
    // The group that evicts has 3 pages. Sequence 1 needs 2 pages for its 20
    // tokens; an eviction frees one of them.
    const auto rank = RankOfTwoPageGroups({8, 3});
    DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
    runner.SetPrompt(1, 20);
    const auto run = [&](size_t first, size_t count) {
      const DirectStep step = {.sequence_id = 1,
                               .token_ids = part(first, count),
                               .target_ids = part(first + 1, count),
                               .output = first >= 20};
      const auto result = runner.Run({step});
      KVASIR_ASSERT_OK(result);
      for (const float number : result->sequences(0).target_logprobs()) {
        numbers[disturbed].push_back(number);
      }
    };
    run(0, 20);
    EXPECT_EQ(runner.slots(1, 1).evicted_at, 0);
    const DirectStep sound = {
        .sequence_id = 1, .token_ids = part(20, 3), .output = true};
    if (disturbed) {
      const int64_t free = runner.free_pages(1);
      EXPECT_THAT(runner.Run({sound,
                              {.sequence_id = 2, .token_ids = part(0, 15)},
                              {.sequence_id = 3, .token_ids = part(0, 2)}}),
                  StatusIs(absl::StatusCode::kResourceExhausted,
                           HasSubstr("2 tokens does not fit: page group 1 has "
                                     "too few free pages")));
      EXPECT_THAT(
          runner.Run({sound, {.sequence_id = 2, .token_ids = part(0, 20)}}),
          StatusIs(absl::StatusCode::kResourceExhausted,
                   HasSubstr("of 20 tokens")));
      DirectStep beyond = sound;
      beyond.token_ids = part(20, 6);
      EXPECT_THAT(
          runner.Run({{.sequence_id = 2, .token_ids = part(0, 8)}, beyond}),
          StatusIs(
              absl::StatusCode::kInvalidArgument,
              HasSubstr("a step from token 20 to token 26 crosses token 25, "
                        "where the prompt ends or an eviction is due")));
      EXPECT_EQ(runner.free_pages(1), free);
      EXPECT_EQ(runner.length(2), 0);
      // The runner does not know the prompt length of sequence 2.
      EXPECT_FALSE(runner.next_eviction(2).has_value());
      EXPECT_EQ(runner.slots(1, 1).evicted_at, 0);
    }
    run(20, 3);
    EXPECT_EQ(runner.slots(1, 1).evicted_at, 20);
    EXPECT_EQ(runner.slots(1, 1).kept_slots, 15);
    EXPECT_EQ(runner.slots(1, 0).evicted_at, 0);
    run(23, 2);
    run(25, 5);
    EXPECT_EQ(runner.slots(1, 1).evicted_at, 25);
  }
  EXPECT_EQ(numbers[0], numbers[1]);
}

// Test fixture: the values (V) of one token overflow in layer 0, because some
// finite weights are huge. These weights belong to a channel of the residual
// stream that only this token uses.
class OverflowTest : public ::testing::Test {
 protected:
  static constexpr int32_t kToken = 5;

  static std::string FourBits() {
    return plan_cases::Codes("4", R"("per_token":{},"param_dtype":"F16")");
  }

  // A rank that stores values with `codec` and keys as bf16. Only values of
  // heads from `first_head` on overflow.
  static std::unique_ptr<Rank> OverflowRank(const std::string& codec,
                                            int64_t first_head = 0,
                                            Collective* collective = nullptr) {
    const int64_t first_value = first_head * TinyShape().head_dim;
    const auto spec = model::SpecOfShape(TinyShape());
    RandomSource random(TinyShape(), 7, kernels::DType::kF32);
    ChangedSource source(&random, [first_value](
                                      const std::string& name,
                                      const WeightBlock& block,
                                      WeightSource::Consumer consume) {
      const bool embedding = name == model::kEmbeddingName;
      if (!embedding && name != "model.layers.0.self_attn.v_proj.weight") {
        return consume(block);
      }
      const auto* const from = static_cast<const float*>(block.data);
      std::vector<float> numbers(from, from + block.num_rows * block.columns);
      for (int64_t row = 0; row < block.num_rows; ++row) {
        float* const first = numbers.data() + row * block.columns;
        const int64_t of_tensor = block.first_row + row;
        *first = embedding || of_tensor < first_value ? 0.0f : 3e38f;
        if (!embedding || of_tensor != kToken) continue;
        std::fill_n(first, block.columns, 0.0f);
        *first = 1.0f;
      }
      WeightBlock changed = block;
      changed.data = numbers.data();
      return consume(changed);
    });
    auto rank =
        Rank::Create(*spec,
                     PlanOf({.name = "Overflow",
                             .key = plan_cases::Full("POST_ROPE"),
                             .value = plan_cases::Full("NO_ROPE", codec)},
                            *spec),
                     &source, TinyOptions(), collective);
    KVASIR_EXPECT_OK(rank);
    return *std::move(rank);
  }

  // Runs a step of three sequences, of which the middle one contains the token
  // that overflows.
  static StepResult Step(Rank& rank) {
    StepPlan plan;
    plan.set_step_id(1);
    for (int i = 0; i < 3; ++i) {
      SequenceStep* const step = plan.add_sequences();
      step->set_sequence_id(static_cast<uint64_t>(i));
      step->set_num_tokens(3);
      for (const int32_t id : {10, i == 1 ? kToken : 11, 12}) {
        step->add_token_ids(id);
        step->add_target_ids(13);
      }
      step->set_prompt(true);
      auto* const table = step->add_block_tables();
      table->set_reset(true);
      table->add_appended_pages(i);
      *step->mutable_sample() = GreedySample();
    }
    auto result = rank.executor().Execute(plan);
    KVASIR_EXPECT_OK(result);
    return result.ok() ? *std::move(result) : StepResult();
  }

  static void ExpectMiddleFails(const StepResult& result,
                                kvasir::v1::SequenceFault fault) {
    ASSERT_EQ(result.sequences_size(), 3);
    EXPECT_EQ(result.sequences(1).fault(), fault);
    EXPECT_EQ(result.sequences(1).token_id(), -1);
    for (const int i : {0, 2}) {
      EXPECT_EQ(result.sequences(i).fault(),
                kvasir::v1::SEQUENCE_FAULT_UNSPECIFIED);
      EXPECT_GE(result.sequences(i).token_id(), 0);
    }
  }
};

TEST_F(OverflowTest, LogitsThatAreNotFiniteFailOnlyTheirOwnSequence) {
  auto rank = OverflowRank(plan_cases::kTyped);
  ExpectMiddleFails(Step(*rank), kvasir::v1::LOGIT_NOT_FINITE);
}

TEST_F(OverflowTest,
       ALatentThatIsNotFiniteFailsItsSequenceEvenIfItIsStoredAsCodes) {
  auto rank = OverflowRank(FourBits());
  ExpectMiddleFails(Step(*rank), kvasir::v1::LATENT_NOT_FINITE);
}

TEST_F(OverflowTest,
       ALatentThatIsNotFiniteOnOneRankFailsItsSequenceOnAllRanks) {
  const auto group = InProcessGroup::Create(2);
  std::vector<StepResult> results(group.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      // Only heads 2 and 3, which rank 1 holds, overflow.
      results[r] = Step(*OverflowRank(FourBits(), 2, group[r].get()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const StepResult& result : results) {
    ExpectMiddleFails(result, kvasir::v1::LATENT_NOT_FINITE);
  }
}

TEST_F(OverflowTest, DirectRunnerReturnsAnErrorIfALogitIsNotFinite) {
  auto rank = OverflowRank(plan_cases::kTyped);
  DirectRunner runner = RunnerOf(*rank);
  const std::vector<int32_t> ids = {10, kToken, 12};
  EXPECT_THAT(
      runner.Run({{.sequence_id = 1, .token_ids = ids, .target_ids = ids}}),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("logit")));
}

SequenceStep* First(StepPlan* plan) { return plan->mutable_sequences(0); }
SampleRequest* Sample(StepPlan* plan) { return First(plan)->mutable_sample(); }
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(
    All, BrokenPlanTest,
    ::testing::Values(
        BrokenPlan{"StepIdGap", [](StepPlan* p) { p->set_step_id(4); },
                   "the step id is 4, but must be 2"},
        BrokenPlan{"StepIdRepeated", [](StepPlan* p) { p->set_step_id(1); },
                   "the step id is 1, but must be 2"},
        BrokenPlan{"ReleaseOfAnUnknownSequence",
                   [](StepPlan* p) { p->add_released_sequences(5); },
                   "sequence 5: the plan releases it, but the executor does "
                   "not know it"},
        BrokenPlan{"UnknownSequence",
                   [](StepPlan* p) { First(p)->set_sequence_id(9); },
                   "sequence 9: the executor does not know it"},
        BrokenPlan{"SequenceTwice",
                   [](StepPlan* p) { *p->add_sequences() = *First(p); },
                   "sequence 1: is in the step twice"},
        BrokenPlan{"PageOutsideThePool",
                   [](StepPlan* p) { AddFresh(p, 2, 1 << 20); },
                   "page 1048576 of group 0 is outside"},
        BrokenPlan{"NegativePage", [](StepPlan* p) { AddFresh(p, 2, -1); },
                   "page -1 of group 0 is outside"},
        BrokenPlan{"UnknownPageGroup",
                   [](StepPlan* p) {
                     First(p)->add_block_tables()->set_page_group(3);
                   },
                   "page group 3"},
        BrokenPlan{"PageWrittenTwice", [](StepPlan* p) { AddFresh(p, 2, 8); },
                   "page 8 of group 0 is written twice"},
        BrokenPlan{"SidePagesUnderAPlanWithoutSidePages",
                   [](StepPlan* p) {
                     AddFresh(p, 2, 9)->mutable_block_tables(0)->add_side_pages(
                         10);
                   },
                   "gives it 1 side pages in page group 0, but must give 0"},
        BrokenPlan{
            "TableTooLong",
            [](StepPlan* p) {
              auto* table = First(p)->add_block_tables();
              for (int i = 0; i < 7; ++i) table->add_appended_pages(i);
            },
            "its page table in page group 0 has 9 pages, the limit is 8"},
        BrokenPlan{"LiveIndexPastTheEnd",
                   [](StepPlan* p) {
                     First(p)->add_block_tables()->set_first_live_index(3);
                   },
                   "its page table in page group 0 is 3, but must be 0 to 2"},
        BrokenPlan{"GivesUpSlotsThatTokensSee",
                   [](StepPlan* p) {
                     First(p)->add_block_tables()->set_first_live_index(1);
                   },
                   "gave up slots below 16, but the step's tokens see slot 0"},
        BrokenPlan{"TableDoesNotCoverTheTokens",
                   [](StepPlan* p) {
                     SequenceStep* step = AddFresh(p, 2, 9);
                     step->set_logical_start(16);
                   },
                   "covers 16 slots, but the step needs 17"},
        BrokenPlan{"SkipsAPosition",
                   [](StepPlan* p) {
                     First(p)->set_logical_start(21);
                     First(p)->set_physical_starts(0, 21);
                   },
                   "starts at position 21, but must start at 20"},
        BrokenPlan{"RepeatsAPosition",
                   [](StepPlan* p) {
                     First(p)->set_logical_start(19);
                     First(p)->set_physical_starts(0, 19);
                   },
                   "starts at position 19, but must start at 20"},
        BrokenPlan{
            "PromptAfterOutput",
            [](StepPlan* p) { AddFresh(p, 2, 9)->set_prompt(true); },
            "sequence 2: is a prompt after output; prompts must come first"},
        BrokenPlan{
            "PhysicalStartAboveLogicalStart",
            [](StepPlan* p) { First(p)->set_physical_starts(0, 21); },
            "physical start in page group 0 is 21, but must be 20 to 20"},
        BrokenPlan{"PhysicalStartBelowLogicalStart",
                   [](StepPlan* p) { First(p)->set_physical_starts(0, 4); },
                   "physical start in page group 0 is 4, but must be 20 to 20"},
        BrokenPlan{"PhysicalStartsForTooManyPageGroups",
                   [](StepPlan* p) { First(p)->add_physical_starts(20); },
                   "has 2 physical starts, but must have none or 1"},
        BrokenPlan{
            "HugePosition",
            [](StepPlan* p) { First(p)->set_logical_start(~uint64_t{0}); },
            "past the maximum length 128"},
        BrokenPlan{"NoTokens",
                   [](StepPlan* p) {
                     First(p)->clear_token_ids();
                     First(p)->set_num_tokens(0);
                   },
                   "has no tokens"},
        BrokenPlan{"NumTokensUnlikeTokenIds",
                   [](StepPlan* p) { First(p)->set_num_tokens(2); },
                   "num_tokens is 2, but the number of token_ids is 1"},
        BrokenPlan{"TooManyTokens",
                   [](StepPlan* p) { First(p)->set_num_tokens(65); },
                   "has 65 tokens, the limit is 64"},
        BrokenPlan{"TooManySequences",
                   [](StepPlan* p) {
                     for (int i = 0; i < 16; ++i) p->add_sequences();
                   },
                   "has 17 sequences, the limit is 16"},
        BrokenPlan{"IdOutsideTheVocabulary",
                   [](StepPlan* p) { First(p)->set_token_ids(0, 1237); },
                   "token_ids: an id must be 0 to 1236, but is 1237"},
        BrokenPlan{"NegativeTarget",
                   [](StepPlan* p) { First(p)->add_target_ids(-1); },
                   "target_ids: an id must be 0 to 1236, but is -1"},
        BrokenPlan{"MoreTargetsThanTokens",
                   [](StepPlan* p) {
                     First(p)->add_target_ids(1);
                     First(p)->add_target_ids(1);
                   },
                   "has 2 target_ids, at most num_tokens = 1 are allowed"},
        BrokenPlan{"LastSampledTokenOfANewSequence",
                   [](StepPlan* p) {
                     SequenceStep* step = AddFresh(p, 2, 9);
                     step->clear_token_ids();
                     step->set_input_is_last_sampled(true);
                   },
                   "input_is_last_sampled requires"},
        BrokenPlan{
            "LastSampledTokenTogetherWithAnId",
            [](StepPlan* p) { First(p)->set_input_is_last_sampled(true); },
            "input_is_last_sampled requires"},
        BrokenPlan{"TemperatureNan",
                   [](StepPlan* p) { Sample(p)->set_temperature(kNan); },
                   "temperature: must be 0 or more"},
        BrokenPlan{"TopPZero", [](StepPlan* p) { Sample(p)->set_top_p(0); },
                   "top_p: must be above 0"},
        BrokenPlan{"NegativeTopK",
                   [](StepPlan* p) { Sample(p)->set_top_k(-1); },
                   "top_k: must be 0 or more"},
        BrokenPlan{"MinPAboveOne", [](StepPlan* p) { Sample(p)->set_min_p(2); },
                   "min_p: must be 0 to 1"},
        BrokenPlan{"RepetitionPenaltyZero",
                   [](StepPlan* p) { Sample(p)->set_repetition_penalty(0); },
                   "repetition_penalty: must be 0.01 to 100"},
        BrokenPlan{
            "RepetitionPenaltyThatOverflowsALogit",
            [](StepPlan* p) { Sample(p)->set_repetition_penalty(1e-38f); },
            "repetition_penalty: must be 0.01 to 100"},
        BrokenPlan{"TooManyLogprobs",
                   [](StepPlan* p) { Sample(p)->set_num_logprobs(21); },
                   "num_logprobs: must be -1 to 20, but is 21"},
        BrokenPlan{"BannedIdOutsideTheVocabulary",
                   [](StepPlan* p) { Sample(p)->add_banned_ids(5000); },
                   "banned_ids: an id must be 0 to 1236, but is 5000"},
        BrokenPlan{
            "BiasNan",
            [](StepPlan* p) { Sample(p)->add_logit_bias()->set_bias(kNan); },
            "logit_bias of id 0"},
        BrokenPlan{"UnknownMask",
                   [](StepPlan* p) { Sample(p)->set_token_mask("none"); },
                   "token_mask"},
        BrokenPlan{"CopyOutsideThePool",
                   [](StepPlan* p) {
                     auto* copy = p->add_page_copies();
                     copy->set_from_page(1);
                     copy->set_to_page(1 << 20);
                   },
                   "outside of the pool"},
        BrokenPlan{"CopyToAHostPoolThatDoesNotExist",
                   [](StepPlan* p) {
                     auto* copy = p->add_page_copies();
                     copy->set_from_page(1);
                     copy->set_to_page(0);
                     copy->set_to_host(true);
                   },
                   "page 0 of group 0 is outside of the host pool of 0"},
        BrokenPlan{"CopyFromOutsideTheHostPool",
                   [](StepPlan* p) {
                     auto* copy = p->add_page_copies();
                     copy->set_from_page(-1);
                     copy->set_from_host(true);
                   },
                   "page -1 of group 0 is outside of the host pool"},
        BrokenPlan{"CopyWithinTheHostPool",
                   [](StepPlan* p) {
                     auto* copy = p->add_page_copies();
                     copy->set_from_host(true);
                     copy->set_to_host(true);
                   },
                   "both pages are in the host pool"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kvasir::worker
