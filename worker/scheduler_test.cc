#include "worker/scheduler.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "worker/scheduler_scenario.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

struct Case {
  const char* name;
  const char* script;
};

class SchedulerScenarioTest : public ::testing::TestWithParam<Case> {};

TEST_P(SchedulerScenarioTest, RunsAsWritten) {
  Scenario scenario;
  scenario.Run(GetParam().script);
}

std::string CaseName(const ::testing::TestParamInfo<Case>& param_info) {
  return param_info.param.name;
}

INSTANTIATE_TEST_SUITE_P(
    Batching, SchedulerScenarioTest,
    ::testing::Values(Case{"ChunksALongPromptUnderTheBudget", R"(
    submit a prompt=40 max=3
    step
    expect plan a:16
    expect tokens a 0
    step
    expect plan a:16
    step
    expect plan a:8
    expect tokens a 1
    step
    expect plan a:1
    run
    expect finished a=length
    expect output a
    expect idle
)"},
                      Case{"DecodesBeforeItPrefills", R"(
    submit a prompt=4 max=10
    step
    expect plan a:4
    submit b prompt=30 max=2
    step
    expect plan a:1 b:15
    step
    expect plan a:1 b:15
    expect tokens b 1
    step
    expect plan a:1 b:1
    expect finished b=length
    run
    expect output a b
    expect idle
)"},
                      Case{"GivesTheRestOfTheBudgetToTheNext", R"(
    submit a prompt=10 max=4
    submit b prompt=10 max=4
    step
    expect plan a:10 b:6
    step
    expect plan a:1 b:4
    run
    expect output a b
    expect idle
)"},
                      Case{"RunsNoMoreThanItsSeats", R"(
    options seqs=2
    submit a max=2
    submit b max=4
    submit c max=2
    step
    expect running a b
    expect waiting c
    step
    expect finished a=length
    step
    expect running b c
    run
    expect output a b c
    expect idle
)"},
                      Case{"EndsAtTheModelsLength", R"(
    options len=16
    submit a prompt=10 max=100
    run
    expect finished a=length
    expect tokens a 6
    expect output a
    expect idle
)"},
                      Case{"APromptOfOneTokenRuns", R"(
    submit a prompt=1 max=3
    step
    expect plan a:1
    run
    expect output a
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Priorities, SchedulerScenarioTest,
    ::testing::Values(Case{"LowerValuesFirstThenFirstCome", R"(
    options seqs=1
    submit a prio=1 max=1
    submit b prio=0 max=1
    submit c prio=0 max=1
    expect waiting b c a
    step
    expect plan b:4
    step
    expect plan c:4
    step
    expect plan a:4
    expect idle
)"},
                      Case{"AHigherPriorityTakesTheSeatOfALower", R"(
    options seqs=1
    submit low prio=5 max=20
    step 3
    expect tokens low 3
    submit high prio=0 max=2
    step
    expect plan high:4
    expect running high
    expect waiting low
    run
    expect output high low
    expect preempted low 1
    expect preempted high 0
    expect idle
)"},
                      Case{"AnEqualPriorityWaits", R"(
    options seqs=1
    submit a max=20
    step 2
    submit b max=2
    step
    expect running a
    expect waiting b
    run
    expect preempted a 0
    expect idle
)"},
                      Case{"AHigherPriorityTakesThePagesOfALower", R"(
    pool pages=8
    options len=32
    submit low prio=5 prompt=20 max=10
    step 3
    submit high prio=0 prompt=20 max=4
    step
    expect plan high:16
    expect running high
    expect waiting low
    run
    expect output high low
    expect preempted low 1
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Preemption, SchedulerScenarioTest,
    ::testing::Values(Case{"TakesTheLatestOfEqualPriority", R"(
    pool pages=8
    options len=32
    submit a prompt=12 max=20
    submit b prompt=12 max=20
    step
    expect plan a:12 b:4
    step 2
    expect running a b
    step 4
    expect running a
    expect waiting b
    run
    expect preempted a 0
    expect preempted b 1
    expect output a b
    expect idle
)"},
                      Case{"TakesTheLowestPriorityBeforeTheLatest", R"(
    pool pages=12
    options len=32 batch=64
    submit a prio=0 prompt=12 max=20
    submit b prio=1 prompt=12 max=20
    submit c prio=0 prompt=12 max=20
    step
    expect plan a:12 c:12 b:12
    step 4
    expect plan a:1 c:1 b:1
    expect free 0
    step
    expect plan a:1 c:1
    expect waiting b
    run
    expect output a b c
    expect preempted a 0
    expect idle
)"},
                      Case{"WaitsRatherThanPreemptItself", R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=12 max=3
    submit b prompt=15 max=8
    step
    expect plan a:12 b:15
    step
    expect plan a:1 b:1
    expect free 0
    step
    expect plan a:1
    expect running b
    expect finished a=length
    step
    expect plan b:1
    run
    expect preempted b 0
    expect output a b
    expect idle
)"},
                      Case{"DoesNotAdmitWhatItCouldNotFinishPrefilling", R"(
    pool pages=16
    options batch=8
    submit a prompt=30 max=30
    step 4
    submit b prompt=34 max=2
    step
    expect plan a:1
    expect waiting b
    run
    expect preempted a 0
    expect preempted b 0
    expect output a b
    expect idle
)"},
                      Case{"ShrinksAChunkToTheFreePages", R"(
    pool pages=8
    options len=32 batch=32 seqs=2
    submit a prompt=8 max=20
    submit b prompt=8 max=20
    submit c prompt=8 max=20
    run
    expect output a b c
    expect idle
)"},
                      Case{"FinishesManyOnAPoolForOne", R"(
    pool pages=8
    options len=32 batch=16 seqs=8 queue=16
    submit a prompt=9 max=23 temp=1 seed=1
    submit b prompt=2 max=30 temp=1 seed=2
    submit c prompt=20 max=12 temp=1 seed=3 prio=1
    submit d prompt=1 max=31 temp=1 seed=4
    submit e prompt=30 max=2 temp=1 seed=5
    submit f prompt=3 max=7 n=3 temp=1 seed=6
    submit g prompt=17 max=9 temp=1 seed=7 prio=-1
    submit h prompt=5 max=20 n=2 temp=1 seed=8 penalties
    run
    expect output a b c d e f g h
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    TimeLimits, SchedulerScenarioTest,
    ::testing::Values(Case{"DeadlineInTheQueue", R"(
    options seqs=1
    submit a max=20
    submit b deadline=2s
    step
    advance 1s
    step
    expect waiting b
    advance 1s
    step
    expect failed b=DEADLINE_EXCEEDED
    expect waiting none
    run
    expect output a
    expect idle
)"},
                      Case{"DeadlineWhilePrefilling", R"(
    submit a prompt=40 deadline=2s
    step
    expect running a
    advance 3s
    step
    expect plan none
    expect failed a=DEADLINE_EXCEEDED
    expect idle
)"},
                      Case{"DeadlineWhileDecoding", R"(
    submit a max=30 deadline=2s
    step 3
    advance 2s
    step
    expect failed a=DEADLINE_EXCEEDED
    expect tokens a 3
    expect idle
)"},
                      Case{"DeadlineWhilePreempted", R"(
    options seqs=1
    submit low prio=5 max=20 deadline=2s
    step 2
    submit high prio=0 max=20
    step
    expect waiting low
    advance 2s
    step
    expect failed low=DEADLINE_EXCEEDED
    run
    expect idle
)"},
                      Case{"DeadlineOfForks", R"(
    submit a prompt=6 n=3 max=20 deadline=2s
    step 3
    expect running a a#1 a#2
    advance 2s
    step
    expect failed a=DEADLINE_EXCEEDED
    expect idle
)"},
                      Case{"QueueTimeoutOfTheRequest", R"(
    options seqs=1 timeout=60s
    submit a max=30
    submit b queue_timeout=2s
    step
    advance 2s
    step
    expect failed b=RESOURCE_EXHAUSTED
    run
    expect idle
)"},
                      Case{"QueueTimeoutByDefaultAndOnlyBeforeTheFirstStep", R"(
    options seqs=1 timeout=5s
    submit a max=30
    submit b
    step
    advance 6s
    step
    expect failed b=RESOURCE_EXHAUSTED
    expect running a
    run
    expect output a
    expect idle
)"},
                      Case{"QueueTimeoutSparesWhatWasPreempted", R"(
    options seqs=1 timeout=5s
    submit low prio=5 max=10
    step 2
    submit high prio=0 max=10
    step
    expect waiting low
    advance 6s
    run
    expect output high low
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(Abort, SchedulerScenarioTest,
                         ::testing::Values(Case{"Waiting", R"(
    options seqs=1
    submit a max=3
    submit b
    step
    abort b
    expect finished b=abort
    expect waiting none
    run
    expect output a
    expect idle
)"},
                                           Case{"Prefilling", R"(
    submit a prompt=40
    step
    abort a
    expect finished a=abort
    expect idle
)"},
                                           Case{"Decoding", R"(
    submit a max=30
    step 5
    abort a
    expect finished a=abort
    expect tokens a 5
    expect idle
)"},
                                           Case{"WhileItsStepRuns", R"(
    submit a max=30
    submit b max=5
    step 2
    schedule
    expect plan a:1 b:1
    abort a
    apply
    expect finished a=abort
    expect tokens a 2
    expect tokens b 3
    run
    expect output b
    expect idle
)"},
                                           Case{"WhileItsFirstChunkRuns", R"(
    submit a prompt=30
    schedule
    abort a
    apply
    expect finished a=abort
    expect idle
)"},
                                           Case{"Preempted", R"(
    options seqs=1
    submit low prio=5 max=20
    step 3
    submit high prio=0 max=5
    step
    expect waiting low
    abort low
    expect finished low=abort
    run
    expect output high
    expect idle
)"},
                                           Case{"BeforeItForked", R"(
    submit a prompt=40 n=3
    step
    expect running a
    abort a
    expect finished a=abort
    expect idle
)"},
                                           Case{"Forked", R"(
    submit a prompt=10 n=3 max=20
    step 4
    expect running a a#1 a#2
    abort a
    expect finished a=abort
    expect idle
)"},
                                           Case{"ForkedAndPartlyPreempted", R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=10 n=3 max=22
    step 9
    expect running a a#1
    expect waiting a#2
    abort a
    expect finished a=abort
    expect idle
)"},
                                           Case{"FinishedOrUnknownIsNothing",
                                                R"(
    submit a max=2
    run
    abort a
    abort nobody
    expect finished a=length
    expect output a
    expect idle
)"}),
                         CaseName);

INSTANTIATE_TEST_SUITE_P(
    Admission, SchedulerScenarioTest,
    ::testing::Values(Case{"RefusesAboveTheQueueBound", R"(
    options seqs=1 queue=2
    submit a max=2
    submit b max=2
    submit c max=2
    expect refused c=RESOURCE_EXHAUSTED/retry
    step
    submit d max=2
    submit e max=2
    expect refused e=RESOURCE_EXHAUSTED/retry
    run
    expect output a b d
    expect idle
)"},
                      Case{"PreemptedRequestsDoNotFillTheQueue", R"(
    options seqs=1 queue=1
    submit low prio=5 max=20
    step 2
    submit high prio=0 max=4
    step
    expect waiting low
    submit other max=2
    run
    expect output low high other
    expect idle
)"},
                      Case{"RefusesALiveId", R"(
    submit a max=2
    submit a max=2
    expect refused a=ALREADY_EXISTS/none
    run
    expect idle
)"},
                      Case{"TakesAnotherAttemptOfALiveId", R"(
    submit a max=2
    submit a max=3 attempt=1
    run
    expect output a
    expect idle
)"},
                      Case{"RefusesMoreSamplesThanSeats", R"(
    submit a n=5
    expect refused a=INVALID_ARGUMENT/never
    expect idle
)"},
                      Case{"ForksHoldTheirSeatsFromTheStart", R"(
    options seqs=3
    submit a prompt=30 n=2 max=4
    submit b prompt=4 n=2 max=4
    step
    expect running a
    expect waiting b
    run
    expect output a b
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Samples, SchedulerScenarioTest,
    ::testing::Values(Case{"PrefillOnceAndShareThePages", R"(
    submit a prompt=10 n=3 max=4 temp=1 seed=5
    step
    expect plan a:9
    expect running a a#1 a#2
    expect free 13
    step
    expect plan a:1 a#1:1 a#2:1
    expect free 11       # two of the three copied the last page
    run
    expect output a
    expect finished a=length
    expect idle
)"},
                      Case{"OfAPromptOfOneToken", R"(
    submit a prompt=1 n=2 max=4 temp=1 seed=5
    run
    expect output a
    expect idle
)"},
                      Case{"OfAPromptThatEndsWithAPage", R"(
    submit a prompt=9 n=4 max=6 temp=1 seed=5
    run
    expect output a
    expect idle
)"},
                      Case{"OfAPromptThatIsCachedButForItsLastToken", R"(
    submit a prompt=8 max=1
    run
    submit b text=a prompt=9 n=2 max=4 temp=1 seed=1
    step
    expect plan b:1
    run
    expect cached b 8
    expect output b
    expect idle
)"},
                      Case{"APreemptedForkGoesOnExactly", R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=10 n=3 max=22 temp=1 seed=11
    run
    expect output a
    expect finished a=length
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Resume, SchedulerScenarioTest,
    ::testing::Values(Case{"PrefillsWhatWasEmittedAndGoesOn", R"(
    submit a prompt=10 emitted=5 max=12 temp=1 seed=3
    step
    expect plan a:15
    expect tokens a 1
    run
    expect tokens a 7
    expect output a
    expect idle
)"},
                      Case{"WithPenaltiesAndMinTokens", R"(
    submit a prompt=10 emitted=5 max=20 min=8 temp=1 seed=3 penalties
    run
    expect output a
    expect idle
)"},
                      Case{"InChunks", R"(
    options batch=7 seqs=2
    submit a prompt=20 emitted=9 max=20 temp=1 seed=3 penalties
    run
    expect output a
    expect idle
)"},
                      Case{"OfAnOutputThatWasComplete", R"(
    submit a prompt=4 max=4 emitted=4
    expect finished a=length
    expect tokens a 0
    expect idle
)"},
                      Case{"PenaltiesSurviveAPreemption", R"(
    options seqs=1
    submit low prio=5 max=20 temp=1 seed=4 penalties
    step 7
    submit high prio=0 max=3 temp=1 seed=5 penalties
    run
    expect preempted low 1
    expect output low high
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    PrefixReuse, SchedulerScenarioTest,
    ::testing::Values(Case{"TakesTheWholePagesOfAnEarlierPrompt", R"(
    submit a prompt=16 max=2
    run
    expect idle
    submit b text=a prompt=20 max=2
    step
    expect plan b:4
    run
    expect cached a 0
    expect cached b 16
    expect output a b
    expect idle
)"},
                      Case{"LeavesOneTokenToRun", R"(
    submit a prompt=16 max=2
    run
    submit b text=a prompt=16 max=2
    step
    expect plan b:4
    run
    expect cached b 12
    expect output b
    expect idle
)"},
                      Case{"NotAcrossSalts", R"(
    submit a prompt=16 max=2 salt=x
    run
    submit b text=a prompt=16 max=2 salt=y
    submit c text=a prompt=16 max=2 salt=x
    run
    expect cached b 0
    expect cached c 12
    expect output b c
    expect idle
)"},
                      Case{"SharesPagesWithASequenceThatRuns", R"(
    pool pages=16
    submit a prompt=32 max=30
    step 3
    submit b text=a prompt=32 max=20
    step
    expect plan a:1 b:4
    run
    expect cached b 28
    expect output a b
    expect idle
)"},
                      Case{"NoneForPromptLogprobs", R"(
    submit a prompt=16 max=2
    run
    submit b text=a prompt=16 max=2 prompt_logprobs
    run
    expect cached b 0
    expect output b
    expect idle
)"}),
    CaseName);

INSTANTIATE_TEST_SUITE_P(Windows, SchedulerScenarioTest,
                         ::testing::Values(Case{"HoldOnlyThePagesThatAreSeen",
                                                R"(
    pool pages=6 window=6
    options batch=8 seqs=1
    submit a prompt=40 max=20
    run
    expect output a
    expect idle
)"},
                                           Case{"BesideLayersThatSeeAll", R"(
    pool pages=16
    group pages=8 window=6
    options batch=8
    submit a prompt=40 max=20 temp=1 seed=1
    submit b prompt=20 max=20 temp=1 seed=2
    submit c prompt=30 max=9 n=2 temp=1 seed=3
    run
    expect output a b c
    expect idle
)"}),
                         CaseName);

// ---------------------------------------------------------------------------
// What the language does not say
// ---------------------------------------------------------------------------

// The tokens of an endless greedy output after FakePrompt(name, 4).
std::vector<int32_t> Greedy(const std::string& name, uint32_t count) {
  Request request;
  request.prompt_ids = FakePrompt(name, 4, 1000);
  request.sampling.temperature = 0.0f;
  request.sampling.max_tokens = count;
  return FakeContinuation(request, 0,
                          {.vocab_size = 1000, .max_model_len = 64});
}

TEST(SchedulerStopTest, AStopIdEndsTheOutputAndIsDelivered) {
  const int32_t third = Greedy("a", 3)[2];
  Scenario scenario;
  scenario.Run(absl::StrCat("submit a max=20 stop=", third, R"(
    run
    expect finished a=stop
    expect tokens a 3
    expect output a
    expect idle
  )"));
  EXPECT_EQ(scenario.sink("a").samples()[0].finish->matched_token_id, third);
  EXPECT_EQ(scenario.sink("a").samples()[0].finish->output_tokens, 3u);
}

TEST(SchedulerStopTest, EndOfSequenceEndsUnlessIgnored) {
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

TEST(SchedulerStopTest, NoStopIdIsSampledBelowMinTokens) {
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

TEST(SchedulerLogprobsTest, AreThoseOfEachTokenAndPosition) {
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
    std::vector<int32_t> prefix = request.prompt_ids;
    ASSERT_EQ(sample.logprobs.size(), 5u);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(sample.logprobs[i].logprob,
                FakeLogprob(prefix, sample.tokens[i]));
      ASSERT_EQ(sample.logprobs[i].top.size(), 2u);
      EXPECT_EQ(sample.logprobs[i].top[0].token_id, sample.tokens[i]);
      prefix.push_back(sample.tokens[i]);
    }
  }
  const auto& prompt = scenario.sink("a").samples()[0].prompt_logprobs;
  ASSERT_EQ(prompt.size(), 19u);
  for (size_t i = 0; i < prompt.size(); ++i) {
    EXPECT_EQ(prompt[i],
              FakeLogprob(absl::MakeConstSpan(request.prompt_ids).first(i + 1),
                          request.prompt_ids[i + 1]));
  }
  EXPECT_TRUE(scenario.sink("a").samples()[1].prompt_logprobs.empty());
}

TEST(SchedulerLogprobsTest, OfThePromptSurviveAPreemptionInTheMiddle) {
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
  for (size_t i = 0; i < prompt.size(); ++i) {
    EXPECT_EQ(prompt[i],
              FakeLogprob(absl::MakeConstSpan(request.prompt_ids).first(i + 1),
                          request.prompt_ids[i + 1]));
  }
}

TEST(SchedulerTimingTest, SplitsARequestsTimeIntoQueuePrefillAndDecode) {
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
  const FinishInfo& finish = *scenario.sink("a").samples()[0].finish;
  EXPECT_EQ(finish.queue, absl::Seconds(2));
  EXPECT_EQ(finish.prefill, absl::Seconds(3));
  EXPECT_EQ(finish.decode, absl::Seconds(5));
}

// A cache and a scheduler without an executor.
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
  request.prompt_ids = {1, 2, 3};
  request.sampling.max_tokens = 3;
  return request;
}

class EchoMasks final : public TokenMaskProvider {
 public:
  std::string NextMask(const TokenMaskState& state) override {
    return absl::StrCat(std::string(state.mask), "/", state.sample_index, "/",
                        state.output_ids.size());
  }
};

TEST(SchedulerTokenMaskTest, IsAskedForBeforeEveryTokenThatWantsOne) {
  EchoMasks masks;
  Bare bare(&masks);
  const auto scheduler = bare.Make();
  Request masked = SmallRequest("masked");
  masked.sampling.token_mask = "json";
  const auto sink = std::make_shared<RecordingSink>();
  ASSERT_TRUE(scheduler->Add(masked, sink).ok());
  ASSERT_TRUE(
      scheduler->Add(SmallRequest("plain"), std::make_shared<RecordingSink>())
          .ok());
  for (const char* want : {"json/0/0", "json/0/1", "json/0/2"}) {
    const kvasir::v1::StepPlan* plan = scheduler->Schedule();
    ASSERT_NE(plan, nullptr);
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
    ASSERT_THAT(scheduler->Apply(result), base::IsOk());
  }
  EXPECT_FALSE(scheduler->has_work());
}

TEST(SchedulerApplyTest, RefusesAResultThatIsNotThePlans) {
  struct BadResult {
    const char* message;
    void (*make)(const kvasir::v1::StepPlan&, kvasir::v1::StepResult*);
  };
  const BadResult cases[] = {
      {"result of step 7, want 1",
       [](const auto&, auto* result) { result->set_step_id(7); }},
      {"has no result for sequence",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
       }},
      {"token 1000, vocabulary size 1000",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
         auto* out = result->add_sequences();
         out->set_sequence_id(plan.sequences(0).sequence_id());
         out->set_token_id(1000);
       }},
      {"1 target log probabilities, want 0",
       [](const auto& plan, auto* result) {
         result->set_step_id(plan.step_id());
         auto* out = result->add_sequences();
         out->set_sequence_id(plan.sequences(0).sequence_id());
         out->set_token_id(1);
         out->add_target_logprobs(0.0f);
       }},
      {"out of the plan's order",
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
    scheduler->FailAll(
        {absl::UnavailableError("broken"), RefusalReason::kRetryElsewhere});
    EXPECT_TRUE(sink->ended());
    EXPECT_EQ(bare.cache.Stats().sequences, 0);
  }
}

TEST(SchedulerOptionsTest, ContradictionsAreRefusedWithTheNumbers) {
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

}  // namespace
}  // namespace kvasir::worker
