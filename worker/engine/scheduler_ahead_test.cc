// Tests of ScheduleAhead: steps that are planned while the previous step runs.
// The scripts are in the language of scheduler_scenario.h.
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "worker/engine/scheduler.h"
#include "worker/testing/scheduler_scenario.h"

namespace kvasir::worker {
namespace {

TEST(SchedulerAheadTest, DecodesArePlannedWhileAStepRuns) {
  Scenario scenario;
  scenario.Run(R"(
    submit a prompt=6 max=8
    submit b prompt=3 max=4 temp=1 seed=3
    schedule
    ahead
    expect plan a:1 b:1
    apply
    expect tokens a 1
    ahead
    expect plan a:1 b:1
    apply
    expect tokens a 2
    ahead
    apply
    # The running step samples b's fourth token.
    ahead
    expect plan a:1
    apply
    expect finished b=length
    expect tokens a 4
    apply
    expect tokens a 5
    run
    expect output a b
    expect idle
  )");
}

TEST(SchedulerAheadTest,
     ATokenOfAStepPlannedAheadIsDroppedIfItsSequenceHasEnded) {
  Scenario probe;
  probe.Run(R"(
    submit a max=5
    run
  )");
  const int32_t third = probe.sink("a").samples()[0].tokens[2];
  Scenario scenario;
  scenario.Run(absl::StrCat("submit a max=20 stop=", third, R"(
    submit b max=6
    step 2
    schedule
    ahead
    expect plan a:1 b:1
    apply
    expect finished a=stop
    expect tokens a 3
    expect running b
    ahead
    expect plan b:1
    apply
    expect tokens a 3
    expect tokens b 4
    run
    expect output a b
    expect idle
  )"));
}

// The pages count as free at once, but the step that was planned ahead still
// writes to them. So `b` starts only after this step.
TEST(SchedulerAheadTest,
     PagesOfAnEndedSequenceAreNotReusedBeforeTheStepPlannedAheadHasEnded) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=16
    options len=32
    submit a prompt=20 max=9
    step 3
    schedule
    ahead
    expect plan a:1
    abort a
    expect free 16
    submit b prompt=28 max=3
    apply
    # a's step still runs.
    ahead
    expect plan none
    apply
    expect tokens a 2
    schedule
    expect plan b:16
    apply
    run
    expect output b
    expect idle
  )");
}

TEST(SchedulerAheadTest,
     ARequestPastItsDeadlineEndsWhenTheNextStepIsPlannedAhead) {
  Scenario scenario;
  scenario.Run(R"(
    submit a max=20 deadline=5s
    submit b max=20
    step
    schedule
    ahead
    apply
    advance 6s
    ahead
    expect failed a=DEADLINE_EXCEEDED
    expect plan b:1
    apply
    run
    expect output b
    expect idle
  )");
}

TEST(SchedulerAheadTest, NoStepIsPlannedAheadWhileAPromptCanRun) {
  Scenario scenario;
  scenario.Run(R"(
    options batch=8 seqs=3
    submit a prompt=4 max=12
    submit b prompt=15 max=4
    schedule
    expect plan a:4 b:4
    # b's prompt continues.
    ahead
    expect plan none
    apply
    schedule
    apply
    schedule
    expect plan b:4 a:1
    ahead
    expect plan a:1 b:1
    apply
    # There is a seat for c.
    submit c prompt=2 max=9
    ahead
    expect plan none
    apply
    schedule
    ahead
    expect plan a:1 b:1 c:1
    apply
    # There is no seat for d.
    submit d prompt=2 max=2
    ahead
    expect plan a:1 c:1
    apply
    expect finished b=length
    # Now d has a seat.
    ahead
    expect plan none
    run
    expect output a b c d
    expect idle
  )");
}

TEST(SchedulerAheadTest, AWaitingRequestOfHigherPriorityStopsPlanningAhead) {
  Scenario scenario;
  scenario.Run(R"(
    options seqs=1 batch=8
    submit a prio=3 max=20
    step
    schedule
    submit b prio=3 max=2
    ahead
    expect plan a:1
    apply
    submit c prio=1 max=2
    ahead
    expect plan none
    apply
    schedule
    expect running c
    apply
    run
    expect preempted a 1
    expect output a b c
    expect idle
  )");
}

TEST(SchedulerAheadTest, NoStepIsPlannedAheadIfPagesRunOut) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=15 max=12
    submit b prompt=11 max=12
    step
    # Two steps later a needs its fifth page, and b its fourth.
    expect free 1
    schedule
    expect plan a:1 b:1
    ahead
    expect plan none
    apply
    run
    expect preempted b 1
    expect output a b
    expect idle
  )");
}

// A waiting sequence cannot start while no page becomes free. So steps are
// still planned ahead.
TEST(SchedulerAheadTest,
     AWaitingSequenceThatCannotGetItsPagesDoesNotStopPlanningAhead) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=8
    options len=32
    submit a prompt=9 max=6
    submit b prompt=22 max=3 text=b
    schedule
    expect plan a:9
    apply
    expect waiting b
    schedule
    ahead
    expect plan a:1
    apply
    ahead
    expect plan a:1
    run
    expect output a b
    expect idle
  )");
}

TEST(SchedulerAheadTest,
     AWaitingSequenceThatSharesAPrefixStartsOnceThePrefixIsCached) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=16
    options batch=44
    submit a prompt=40 max=20
    submit b text=a prompt=40 max=8
    schedule
    expect plan a:40
    expect waiting b
    ahead
    expect plan a:1
    apply
    # b would share the pages that a has written.
    ahead
    expect plan none
    apply
    schedule
    expect plan b:4 a:1
    run
    expect cached b 36
    expect output a b
    expect idle
  )");
}

TEST(SchedulerAheadTest, StepsArePlannedAheadBetweenEvictions) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=16 keep=6 every=4
    submit a prompt=5 max=20
    step
    schedule
    ahead
    expect plan a:1
    apply
    run
    expect output a
    expect idle
  )");
}

TEST(SchedulerAheadTest, NoStepIsPlannedAheadForSequencesWithSidePages) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=32 side=2
    submit a max=8
    schedule
    ahead
    expect plan none
    apply
    run
    expect output a
    expect idle
  )");
}

TEST(SchedulerAheadTest, StepsPlannedAheadApplyTheSamplingParametersExactly) {
  Scenario scenario;
  scenario.Run(R"(
    submit a max=12 min=6 penalties logprobs=2 temp=1 seed=4
    submit b max=12 n=2 temp=1 seed=5
    step 2
    schedule
    ahead
    apply
    ahead
    apply
    ahead
    apply
    ahead
    apply
    run
    expect output a b
    expect idle
  )");
}

// Request `c` lacks pages of one page group. Then `a` takes pages of the other
// group, and `b` ends and frees enough pages for `c`. So `c` must start,
// although the sum of free pages has fallen.
TEST(SchedulerAheadTest,
     AWaitingRequestStartsWhenItsGroupGainsPagesThoughTheSumOfFreePagesFell) {
  Scenario scenario;
  scenario.Run(R"(
    pool pages=60
    group pages=9 window=6
    options len=64 seqs=4 batch=16
    submit a prompt=4 max=56
    submit b prompt=4 max=44
    step
    submit c prompt=20 max=4
    step 10
    expect waiting c
    expect tokens b 11
    schedule
  )");
  for (int i = 0; i < 31; ++i) {
    scenario.Run("ahead\nexpect plan a:1 b:1\napply\nexpect waiting c");
    if (::testing::Test::HasFailure()) return;
  }
  scenario.Run(R"(
    expect tokens b 42
    ahead
    apply
    ahead
    expect plan a:1
    apply
    expect finished b=length
    ahead
    expect plan none
    apply
    schedule
    expect running a c
  )");
}

TEST(SchedulerAheadTest,
     TheStatisticsDescribeTheLastAppliedStepAndNotAStepPlannedAhead) {
  Scenario scenario;
  scenario.Run(R"(
    submit a prompt=6 max=3
    submit b prompt=3 max=2
    schedule
    ahead
    apply
  )");
  EXPECT_EQ(scenario.scheduler().last_step().step_id, 1u);
  EXPECT_EQ(scenario.scheduler().last_step().prefill_tokens, 9u);
  EXPECT_EQ(scenario.scheduler().last_step().prefill_sequences, 2u);
  EXPECT_EQ(scenario.scheduler().last_step().decode_sequences, 0u);
  EXPECT_EQ(scenario.scheduler().last_step().time_to_first_token.size(), 2u);
  scenario.Run(R"(
    ahead
    apply
  )");
  EXPECT_EQ(scenario.scheduler().last_step().step_id, 2u);
  EXPECT_EQ(scenario.scheduler().last_step().prefill_tokens, 0u);
  EXPECT_EQ(scenario.scheduler().last_step().decode_sequences, 2u);
  EXPECT_EQ(scenario.scheduler().last_step().inter_token.size(), 2u);
  scenario.Run("run");
}

}  // namespace
}  // namespace kvasir::worker
