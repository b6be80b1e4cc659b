#include "worker/engine/scheduler.h"

#include <cmath>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "worker/testing/scheduler_scenario.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

// Returns the first `count` tokens that greedy sampling gives after the prompt
// FakePrompt(name, 4).
std::vector<int32_t> Greedy(const std::string& name, uint32_t count) {
  Request request;
  request.prompt = proto::TokenBytes::Adopt(FakePrompt(name, 4, 1000));
  request.sampling.set_temperature(0.0f);
  request.sampling.set_max_tokens(count);
  return FakeContinuation(request, 0,
                          {.vocab_size = 1000, .max_model_len = 64});
}

TEST(SchedulerStopTest, AStopTokenIsTheLastTokenOfTheOutput) {
  const int32_t third = Greedy("a", 3)[2];
  Scenario scenario;
  scenario.Run(absl::StrCat("submit a max=20 stop=", third, R"(
    run
    expect finished a=stop
    expect tokens a 3
    expect output a
    expect idle
  )"));
  EXPECT_EQ(scenario.sink("a").samples()[0].finish->matched_token_id(), third);
  EXPECT_EQ(scenario.sink("a").samples()[0].finish->output_tokens(), 3u);
}

TEST(SchedulerStopTest, TheEndOfSequenceTokenEndsTheOutputUnlessIgnored) {
  const int32_t third = Greedy("a", 3)[2];
  Scenario scenario;
  scenario.Run(absl::StrCat("options eos=", third, R"(
    submit a max=20
    submit b text=a max=20 ignore_eos
    run
    expect finished a=stop b=length
    expect tokens a 3
    expect tokens b 20
    expect output a b
    expect idle
  )"));
}

TEST(SchedulerStopTest, NoStopTokenIdIsSampledBeforeTheOutputHasMinTokens) {
  const int32_t first = Greedy("a", 1)[0];
  Scenario scenario;
  scenario.Run(absl::StrCat("submit a max=20 min=4 stop=", first, R"(
    run
    expect output a
    expect idle
  )"));
  const std::vector<int32_t>& tokens = scenario.sink("a").samples()[0].tokens;
  ASSERT_GE(tokens.size(), 4u);
  EXPECT_EQ(std::count(tokens.begin(), tokens.begin() + 4, first), 0);
}

TEST(SchedulerLogprobsTest, LogProbabilitiesAreExactForEachTokenAndPosition) {
  Scenario scenario;
  scenario.Run(R"(
    options batch=7 seqs=3
    submit a prompt=20 max=5 logprobs=2 prompt_logprobs n=2 temp=1 seed=1
    run
    expect output a
    expect idle
  )");
  const Request& request = scenario.request("a");
  for (uint32_t s = 0; s < 2; ++s) {
    const auto& sample = scenario.sink("a").samples()[s];
    std::vector<int32_t> prefix = request.prompt.ToIds();
    ASSERT_EQ(sample.logprobs.size(), 5u);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(sample.logprobs[i].logprob(),
                FakeLogprob(prefix, sample.tokens[i]));
      ASSERT_EQ(sample.logprobs[i].top_size(), 2);
      EXPECT_EQ(sample.logprobs[i].top(0).token_id(), sample.tokens[i]);
      prefix.push_back(sample.tokens[i]);
    }
  }
  const auto& prompt = scenario.sink("a").samples()[0].prompt_logprobs;
  ASSERT_EQ(prompt.size(), 19u);
  const std::vector<int32_t> ids = request.prompt.ToIds();
  for (size_t i = 0; i < prompt.size(); ++i) {
    EXPECT_EQ(prompt[i],
              FakeLogprob(absl::MakeConstSpan(ids).first(i + 1), ids[i + 1]));
  }
  EXPECT_TRUE(scenario.sink("a").samples()[1].prompt_logprobs.empty());
}

TEST(SchedulerLogprobsTest, LogProbabilitiesOfThePromptSurviveAPreemption) {
  Scenario scenario;
  scenario.Run(R"(
    options batch=8 seqs=1
    submit low prio=5 prompt=20 max=5 prompt_logprobs
    step 2
    submit high prio=0 prompt=4 max=2
    run
    expect preempted low 1
    expect output low high
    expect idle
  )");
  const Request& request = scenario.request("low");
  const auto& prompt = scenario.sink("low").samples()[0].prompt_logprobs;
  ASSERT_EQ(prompt.size(), 19u);
  const std::vector<int32_t> ids = request.prompt.ToIds();
  for (size_t i = 0; i < prompt.size(); ++i) {
    EXPECT_EQ(prompt[i],
              FakeLogprob(absl::MakeConstSpan(ids).first(i + 1), ids[i + 1]));
  }
}

TEST(SchedulerTimingTest,
     TheTimeOfARequestIsSplitIntoQueuePrefillAndDecodeTime) {
  Scenario scenario;
  scenario.Run(R"(
    options batch=8
    submit a prompt=12 max=3
    advance 2s
    step
    advance 3s
    step
    expect tokens a 1
    advance 4s
    step
    advance 1s
    run
  )");
  const auto& finish = *scenario.sink("a").samples()[0].finish;
  EXPECT_EQ(finish.queue_us(), 2'000'000u);
  EXPECT_EQ(finish.prefill_us(), 3'000'000u);
  EXPECT_EQ(finish.decode_us(), 5'000'000u);
  EXPECT_FALSE(finish.has_matched_token_id());
}

// A scheduler and its cache, without an executor: tests write the results of
// steps themselves.
struct Bare {
  explicit Bare(TokenMaskProvider* masks = nullptr)
      : cache([] {
          cache::KvCacheConfig config;
          config.page_tokens = 4;
          config.cache_id = "test";
          config.groups = {{.num_pages = 16}};
          return config;
        }()) {
    options.max_model_len = 64;
    options.max_num_seqs = 4;
    options.max_batched_tokens = 16;
    options.vocab_size = 1000;
    deps = {.cache = &cache, .clock = &clock, .token_masks = masks};
  }
  std::unique_ptr<Scheduler> Make() {
    return *Scheduler::Create(options, deps);
  }

  base::ManualClock clock;
  cache::KvCache cache;
  SchedulerOptions options;
  SchedulerDeps deps;
};

Request SmallRequest(const std::string& id) {
  Request request;
  request.request_id = id;
  request.prompt = proto::TokenBytes::FromIds({1, 2, 3});
  request.sampling.set_max_tokens(3);
  return request;
}

class EchoMasks final : public TokenMaskProvider {
 public:
  std::string NextMask(const TokenMaskState& state) override {
    return absl::StrCat(std::string(state.mask), "/", state.sample_index, "/",
                        state.output_ids.size());
  }
};

TEST(SchedulerTimeLimitTest,
     OnlyARequestThatExceedsTheWorkersQueueTimeoutMayBeRetriedOnAnotherWorker) {
  Bare bare;
  bare.options.queue_timeout = absl::Seconds(5);
  const auto scheduler = bare.Make();
  const auto by_client = std::make_shared<RecordingSink>();
  const auto by_operator = std::make_shared<RecordingSink>();
  Request impatient = SmallRequest("impatient");
  impatient.queue_timeout = absl::Seconds(2);
  ASSERT_TRUE(scheduler->Add(std::move(impatient), by_client).ok());
  ASSERT_TRUE(scheduler->Add(SmallRequest("other"), by_operator).ok());
  bare.clock.Advance(absl::Seconds(6));
  EXPECT_EQ(scheduler->Schedule(), nullptr);
  ASSERT_TRUE(by_client->failed().has_value());
  EXPECT_THAT(by_client->failed()->status,
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("queue timeout, 2s")));
  EXPECT_EQ(by_client->failed()->reason,
            kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
  ASSERT_TRUE(by_operator->failed().has_value());
  EXPECT_THAT(by_operator->failed()->status,
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("queue timeout, 5s")));
  EXPECT_EQ(by_operator->failed()->reason,
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

class SummaryObserver final : public EngineObserver {
 public:
  void OnRequestEnd(const RequestSummary& summary) override {
    ends.push_back(summary);
  }
  std::vector<RequestSummary> ends;
};

TEST(SchedulerTimingTest,
     AFailedRequestReportsTheTimeOfEachPhaseThatItReached) {
  SummaryObserver observer;
  Bare bare;
  bare.deps.observer = &observer;
  bare.options.max_num_seqs = 1;
  const auto scheduler = bare.Make();
  const auto add = [&](const char* name) {
    ASSERT_TRUE(
        scheduler->Add(SmallRequest(name), std::make_shared<RecordingSink>())
            .ok());
  };
  add("decoding");
  add("waiting");
  bare.clock.Advance(absl::Seconds(2));
  const kvasir::v1::StepPlan* plan = scheduler->Schedule();
  ASSERT_NE(plan, nullptr);
  bare.clock.Advance(absl::Seconds(3));
  kvasir::v1::StepResult result;
  result.set_step_id(plan->step_id());
  auto* out = result.add_sequences();
  out->set_sequence_id(plan->sequences(0).sequence_id());
  out->set_token_id(5);
  KVASIR_ASSERT_OK(scheduler->Apply(result));
  bare.clock.Advance(absl::Seconds(4));
  scheduler->FailAll(
      {absl::UnavailableError("broken"), kvasir::v1::Refusal::RETRY_ELSEWHERE});
  ASSERT_EQ(observer.ends.size(), 2u);
  EXPECT_EQ(observer.ends[0].queue, absl::Seconds(2));
  EXPECT_EQ(observer.ends[0].prefill, absl::Seconds(3));
  EXPECT_EQ(observer.ends[0].decode, absl::Seconds(4));
  EXPECT_EQ(observer.ends[1].queue, absl::Seconds(9));
  EXPECT_EQ(observer.ends[1].prefill, std::nullopt);
  EXPECT_EQ(observer.ends[1].decode, std::nullopt);
}

TEST(SchedulerTokenMaskTest,
     TheSchedulerRequestsATokenMaskBeforeEachTokenOfAMaskedRequest) {
  EchoMasks masks;
  Bare bare(&masks);
  const auto scheduler = bare.Make();
  Request masked = SmallRequest("masked");
  masked.sampling.set_token_mask("json");
  const auto sink = std::make_shared<RecordingSink>();
  ASSERT_TRUE(scheduler->Add(masked, sink).ok());
  ASSERT_TRUE(
      scheduler->Add(SmallRequest("plain"), std::make_shared<RecordingSink>())
          .ok());
  for (const char* want : {"json/0/0", "json/0/1", "json/0/2"}) {
    const kvasir::v1::StepPlan* plan = scheduler->Schedule();
    ASSERT_NE(plan, nullptr);
    // The next mask depends on the token that is being sampled, so no step can
    // be planned ahead.
    EXPECT_EQ(scheduler->ScheduleAhead(), nullptr);
    ASSERT_EQ(plan->sequences_size(), 2);
    EXPECT_EQ(plan->sequences(0).sample().token_mask(), want);
    EXPECT_EQ(plan->sequences(1).sample().token_mask(), "");
    kvasir::v1::StepResult result;
    result.set_step_id(plan->step_id());
    for (const auto& step : plan->sequences()) {
      auto* out = result.add_sequences();
      out->set_sequence_id(step.sequence_id());
      out->set_token_id(5);
    }
    KVASIR_ASSERT_OK(scheduler->Apply(result));
  }
  EXPECT_FALSE(scheduler->has_work());
}

TEST(SchedulerApplyTest, RefusesAResultThatDoesNotMatchThePlan) {
  struct BadResult {
    const char* message;
    void (*make)(const kvasir::v1::StepPlan&, kvasir::v1::StepResult*);
  };
  const BadResult cases[] = {
      {"result of step 7, expected step 1",
       [](const auto&, auto* result) { result->set_step_id(7); }},
      {"has no result for sequence",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
       }},
      {"token 1000 is outside the vocabulary of 1000 tokens",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
         auto* out = result->add_sequences();
         out->set_sequence_id(plan.sequences(0).sequence_id());
         out->set_token_id(1000);
       }},
      {"1 target log probabilities, expected 0",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
         auto* out = result->add_sequences();
         out->set_sequence_id(plan.sequences(0).sequence_id());
         out->set_token_id(1);
         out->add_target_logprobs(0.0f);
       }},
      {"not in the order of the plan",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
         auto* out = result->add_sequences();
         out->set_sequence_id(plan.sequences(0).sequence_id());
         out->set_token_id(1);
         result->add_sequences()->set_sequence_id(99);
       }},
  };
  for (const BadResult& bad : cases) {
    Bare bare;
    const auto scheduler = bare.Make();
    const auto sink = std::make_shared<RecordingSink>();
    ASSERT_TRUE(scheduler->Add(SmallRequest("r"), sink).ok());
    const kvasir::v1::StepPlan* plan = scheduler->Schedule();
    ASSERT_NE(plan, nullptr);
    kvasir::v1::StepResult result;
    bad.make(*plan, &result);
    EXPECT_THAT(scheduler->Apply(result),
                StatusIs(absl::StatusCode::kInternal, HasSubstr(bad.message)));
    scheduler->FailAll({absl::UnavailableError("broken"),
                        kvasir::v1::Refusal::RETRY_ELSEWHERE});
    EXPECT_TRUE(sink->ended());
    EXPECT_EQ(bare.cache.Stats().sequences, 0);
  }
}

TEST(SchedulerApplyTest, OnlyTheRequestForWhichNoTokenIsAllowedFails) {
  Bare bare;
  const auto scheduler = bare.Make();
  const auto barred = std::make_shared<RecordingSink>(2);
  const auto other = std::make_shared<RecordingSink>();
  Request two = SmallRequest("barred");
  two.sampling.set_n(2);
  ASSERT_TRUE(scheduler->Add(std::move(two), barred).ok());
  ASSERT_TRUE(scheduler->Add(SmallRequest("other"), other).ok());
  while (const kvasir::v1::StepPlan* plan = scheduler->Schedule()) {
    kvasir::v1::StepResult result;
    result.set_step_id(plan->step_id());
    std::set<uint64_t> of_barred;
    for (const SequenceSnapshot& sequence : scheduler->Snapshot()) {
      if (sequence.request_id == "barred")
        of_barred.insert(sequence.sequence_id);
    }
    for (const auto& step : plan->sequences()) {
      auto* out = result.add_sequences();
      out->set_sequence_id(step.sequence_id());
      out->set_token_id(of_barred.contains(step.sequence_id()) ? -1 : 5);
    }
    KVASIR_ASSERT_OK(scheduler->Apply(result));
  }
  ASSERT_TRUE(barred->failed().has_value());
  EXPECT_THAT(barred->failed()->status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no token can be sampled")));
  EXPECT_EQ(barred->failed()->reason, kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
  EXPECT_EQ(other->samples()[0].tokens, std::vector<int32_t>({5, 5, 5}));
  EXPECT_EQ(bare.cache.Stats().sequences, 0);
  KVASIR_EXPECT_OK(bare.cache.CheckInvariants());
}

TEST(SchedulerOptionsTest, TheErrorForAnInvalidOptionStatesItsValue) {
  Bare bare;
  const auto create = [&](auto change) {
    SchedulerOptions options = bare.options;
    change(&options);
    return Scheduler::Create(options, bare.deps).status();
  };
  EXPECT_THAT(create([](auto* o) { o->max_batched_tokens = 3; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("max_batched_tokens is 3")));
  EXPECT_THAT(create([](auto* o) { o->max_num_seqs = 0; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("max_num_seqs is 0")));
  EXPECT_THAT(create([](auto* o) { o->max_queue = 0; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("max_queue is 0")));
  EXPECT_THAT(create([](auto* o) { o->max_model_len = 1; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("max_model_len is 1")));
  EXPECT_THAT(create([](auto* o) {
                o->eos_token_ids = {2, 1000};
              }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("end-of-sequence id is 1000")));
  EXPECT_THAT(create([](auto* o) { o->max_model_len = 65; }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("needs 17 pages of page group 0, which has "
                                 "16")));
}

// A script after which `a` runs and `b` waits with its pages in the host pool.
constexpr char kOneInTheHostPool[] = R"(
  pool pages=8 host=8
  options len=32
  submit a prompt=12 max=20
  submit b prompt=12 max=20
  step 7
  expect waiting b
  expect host 4
)";

TEST(SchedulerHostPoolTest, HostPoolCopiesOfRefusedRequestsAreFreed) {
  Scenario scenario;
  scenario.Run(kOneInTheHostPool);
  scenario.scheduler().RefuseAll({absl::UnavailableError("stopped"),
                                  kvasir::v1::Refusal::RETRY_ELSEWHERE});
  scenario.Run(R"(
    expect failed a=UNAVAILABLE b=UNAVAILABLE
    expect idle
  )");
}

TEST(SchedulerHostPoolTest, HostPoolCopiesAreFreedAfterAFailedStep) {
  Scenario scenario;
  scenario.Run(kOneInTheHostPool);
  scenario.Run("schedule");
  scenario.scheduler().FailAll(
      {absl::InternalError("broken"), kvasir::v1::Refusal::RETRY_ELSEWHERE});
  scenario.Run(R"(
    expect failed a=INTERNAL b=INTERNAL
    expect idle
  )");
}

TEST(SchedulerHostPoolTest,
     QueuedTokensOfARequestInTheHostPoolCountOnlyTokensNotYetComputed) {
  Scenario scenario;
  scenario.Run(kOneInTheHostPool);
  EXPECT_EQ(scenario.scheduler().Load().queued_tokens, 1u);
  for (const SequenceSnapshot& each : scenario.scheduler().Snapshot()) {
    EXPECT_EQ(each.computed_tokens, each.running ? 18u : 15u);
  }
  scenario.Run("run");
}

TEST(SchedulerHostPoolTest, ACopyRateThatIsNotPositiveIsRefused) {
  cache::KvCacheConfig config;
  config.page_tokens = 4;
  config.groups = {{.num_pages = 16}};
  cache::KvCache cache(config);
  base::ManualClock clock;
  SchedulerOptions options;
  options.max_model_len = 64;
  options.vocab_size = 10;
  for (const double rate : {0.0, -1.0, std::nan("")}) {
    options.copy_bytes_per_second = rate;
    EXPECT_THAT(Scheduler::Create(options, {.cache = &cache, .clock = &clock}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("copy_bytes_per_second")));
  }
}

}  // namespace
}  // namespace kvasir::worker
