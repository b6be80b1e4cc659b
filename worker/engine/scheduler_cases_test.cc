// Test cases of the scheduler, as scripts in the language of
// scheduler_scenario.h.
#include <string>

#include "gtest/gtest.h"
#include "worker/testing/scheduler_scenario.h"

namespace kvasir::worker {
namespace {

struct Case {
  const char* name;
  const char* script;
};

class SchedulerScenarioTest : public ::testing::TestWithParam<Case> {};

TEST_P(SchedulerScenarioTest, TheSchedulerMeetsEveryExpectationOfTheScript) {
  Scenario scenario;
  scenario.Run(GetParam().script);
  scenario.Run("expect idle");  // must hold at the end of every script
}

std::string CaseName(const ::testing::TestParamInfo<Case>& param_info) {
  return param_info.param.name;
}

// Cases with eviction. An eviction takes place at each multiple of 4 tokens and
// at the prompt's end, and keeps 6 slots.
constexpr Case kEvictions[] = {
    {"StepsEndBeforeAnEviction", R"(
    pool pages=12 keep=6 every=4
    options batch=64
    submit a prompt=18 max=6 ignore_eos
    step
    expect plan a:8
    step
    expect plan a:4
    expect evicted 2
    step
    expect plan a:4
    expect evicted 6
    step
    expect plan a:2                   # the prompt's end
    expect evicted 10
    step
    expect plan a:1
    expect evicted 12
    run
    expect evicted 14                 # at 20; no eviction until the end at 23
    expect output a
)"},
    // Sequence b must not be preempted, because its eviction frees slots in its
    // own last page. Regression test: the scheduler counted the free room in
    // tokens instead of slots.
    {"FreeSlotsOfTheLastPageAreUsedFirst", R"(
    pool pages=4 keep=6 every=4
    options batch=64
    submit a prompt=30 max=1 ignore_eos
    submit b prompt=7 max=2 ignore_eos
    step
    expect plan a:8 b:7
    step
    expect plan a:2 b:1               # slots 6 and 7 of b's own page
    run
    expect preempted b 0
    expect output a
    expect output b
)"},
    {"ATinyPoolServesAPromptOfFourTimesItsSize", R"(
    pool pages=3 keep=6 every=4       # 12 slots
    options batch=64 len=64
    submit a prompt=48 max=8 ignore_eos
    run
    expect output a
    expect preempted a 0
)"},
    {"ManySequencesShareAPoolThatHoldsTheirKeptSlots", R"(
    pool pages=9 keep=6 every=4
    options seqs=3 batch=16 len=64
    submit a prompt=40 max=9 ignore_eos
    submit b prompt=33 max=9 ignore_eos
    submit c prompt=7 max=20 ignore_eos
    run
    expect output a b c
    expect preempted a 0
)"},
    {"APreemptedSequenceEvictsAtTheSamePointsAgain", R"(
    pool pages=16 keep=6 every=4      # and a group that keeps everything
    group pages=10
    options seqs=2 batch=16 len=40
    submit low prompt=14 max=16 prio=1 ignore_eos
    step 6
    submit high prompt=20 max=10 ignore_eos
    run
    expect preempted low 2
    expect output low high
)"},
    {"ForkedSamplesHaveTheirOwnPages", R"(
    pool pages=24 keep=6 every=4
    options seqs=4 batch=32
    submit a prompt=19 max=9 n=3 temp=1 ignore_eos
    run
    expect output a
)"},
    {"ARequestKeepsItsOwnBudget", R"(
    pool pages=40 keep=6 every=4
    options batch=64
    submit a prompt=18 max=6 budget=12 ignore_eos
    step
    expect plan a:16                  # 12 slots stay: evicts first at 16
    step
    expect plan a:2
    expect evicted 4
    submit b prompt=18 max=6 budget=1 ignore_eos
    step
    expect evicted 6                  # from a, at its prompt's end
    run
    expect evicted 8                  # from a at 20; none from b
    expect output a b
)"},
    {"ABudgetRatioIsAShareOfThePrompt", R"(
    pool pages=40 keep=6 every=4
    options batch=64
    submit a prompt=20 max=2 budget=0.5 ignore_eos
    step
    expect plan a:12
    step
    expect plan a:4
    expect evicted 2                  # 10 stay
    run
    expect output a
)"},
    {"PagesAreCountedWithTheRequestsOwnBudget", R"(
    pool pages=9 keep=6 every=4       # a sequence of this plan holds 3 pages
    options seqs=3 batch=64 len=64
    submit a prompt=20 max=8 budget=1 ignore_eos
    submit b prompt=20 max=8 ignore_eos
    step
    expect running a b
    submit c prompt=28 max=8 budget=1 ignore_eos
    step
    expect waiting c                  # it would need 8 pages
    run
    expect preempted a 0
    expect preempted b 0
    expect preempted c 0
    expect output a b c
)"},
    {"ACopiedSequenceKeepsItsBudget", R"(
    pool pages=16 keep=6 every=4 host=8
    group pages=10 host=8
    options seqs=2 batch=16 len=40
    submit low prompt=14 max=16 prio=1 budget=9 ignore_eos
    step 6
    submit high prompt=22 max=8 ignore_eos
    run
    expect preempted low 2
    expect output low high
)"},
    {"ARecomputedSequenceKeepsItsBudget", R"(
    pool pages=16 keep=6 every=4
    group pages=10
    options seqs=2 batch=16 len=40
    submit low prompt=14 max=16 prio=1 budget=0.7 ignore_eos
    step 6
    submit high prompt=22 max=8 budget=8 ignore_eos
    run
    expect preempted low 2
    expect output low high
)"},
    {"AResumedRequestKeepsItsBudget", R"(
    pool pages=40 keep=6 every=4
    options batch=64
    submit a prompt=18 max=12 emitted=7 budget=10 ignore_eos attempt=1
    run
    expect output a
)"},
    {"SamplesOfARequestKeepItsBudget", R"(
    pool pages=40 keep=6 every=4
    options batch=64
    submit a prompt=18 max=9 n=3 temp=1 budget=10 ignore_eos
    run
    expect output a
)"},
    {"ARequestMayBeAbortedWhileItsStepWithAnEvictionRuns", R"(
    pool pages=12 keep=6 every=4
    options batch=64
    submit a prompt=18 max=6
    submit b prompt=20 max=6 ignore_eos
    step 2
    schedule
    abort a
    apply
    run
    expect output b
)"},
};
INSTANTIATE_TEST_SUITE_P(Evictions, SchedulerScenarioTest,
                         ::testing::ValuesIn(kEvictions), CaseName);

// Cases with side pages, which hold rows of a sequence's latest tokens. A
// cached prefix can be reused only up to a position where the cache has a copy
// (tail) of these rows.
constexpr Case kTails[] = {
    {"TheNextTurnOfAChatReusesAllTokensUpToTheLastTail", R"(
    pool pages=40 side=2
    options batch=64
    submit a prompt=10 max=8 ignore_eos
    step
    expect plan a:8                   # the step ends at the tail
    step
    expect plan a:2
    run
    expect output a
    submit again prompt=10 max=2 text=a
    run
    expect cached again 8
    submit turn prompt=10 max=8 emitted=7 text=a ignore_eos
    run
    expect cached turn 10             # 16 tokens were found: 10 of its prompt
    expect output again turn
)"},
    {"OnlyOnePrefillStepOfAPromptEndsEarlyForATail", R"(
    pool pages=60 side=1
    options batch=64
    submit a prompt=30 max=2
    step
    expect plan a:28
    step
    expect plan a:2
    run
    submit b prompt=28 max=2          # whole pages: no cut
    step
    expect plan b:28
    run
    submit c prompt=20 max=2 text=a   # 16 tokens are cached, but without a tail
    step
    expect plan c:16
    step
    expect plan c:4
    run
    submit d prompt=25 max=2 text=a
    step
    expect plan d:4                   # from c's tail at 20; ends at a new tail
    run
    expect cached d 20
    expect output a b c d
)"},
    {"ASequenceThatLostItsSeatResumesFromItsTail", R"(
    pool pages=40 side=2
    options seqs=1 batch=64
    submit a prompt=8 max=20 prio=1 ignore_eos
    step 11
    expect tokens a 11
    submit b prompt=5 max=1 prio=0
    step 2
    expect finished b=length
    step
    expect plan a:3                   # 19 tokens, of which 16 were cached
    run
    expect preempted a 1
    expect output a b
)"},
    {"ASequenceThatLostItsPagesHasLostItsTailToo", R"(
    pool pages=12 side=1
    options batch=64 len=36
    submit a prompt=8 max=20 ignore_eos
    submit b prompt=8 max=20 ignore_eos
    run
    expect preempted b 1
    expect output a b
)"},
    {"SamplesShareThePromptAndCopyItsLatestRows", R"(
    pool pages=60 side=2
    options seqs=4 batch=64
    submit a prompt=11 max=6 n=3 temp=1 ignore_eos
    step
    expect plan a:8
    step
    expect plan a:2
    step
    expect plan a:1 a#1:1 a#2:1
    run
    expect output a
)"},
    {"SamplesOfACachedPromptShareItsTail", R"(
    pool pages=60 side=2
    options seqs=4 batch=64
    submit a prompt=9 max=2
    run
    submit b prompt=9 max=6 n=3 temp=1 text=a ignore_eos
    step
    expect plan b:1
    step
    expect plan b#1:1 b#2:1 b:1       # prompt tokens come first
    run
    expect cached b 8
    expect output a b
)"},
    {"TailsAreDroppedBeforeARequestWaits", R"(
    pool pages=12 side=2
    options batch=64 len=40
    submit a prompt=9 max=2
    run
    expect tails 2
    submit b prompt=36 max=2
    run
    expect output a b
    submit c prompt=9 max=2 text=a
    run
    expect cached c 0
)"},
    {"TheTailOfAnAbortedPromptIsReused", R"(
    pool pages=30 side=2
    options batch=8
    submit a prompt=20 max=4
    step
    expect plan a:8
    step 2
    expect plan a:4
    abort a
    submit b prompt=21 max=4 text=a
    run
    expect cached b 20
    expect output b
)"},
};

INSTANTIATE_TEST_SUITE_P(Tails, SchedulerScenarioTest,
                         ::testing::ValuesIn(kTails), CaseName);

constexpr Case kBatching[] = {
    {"ALongPromptIsPrefilledInChunks", R"(
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
)"},
    {"PrefillsGetTheTokensThatDecodesLeave", R"(
    submit a prompt=4 max=10
    step
    expect plan a:4
    submit b prompt=30 max=2
    step
    expect plan b:15 a:1
    step
    expect plan b:15 a:1
    expect tokens b 1
    step
    expect plan a:1 b:1
    expect finished b=length
    run
    expect output a b
)"},
    {"TheNextPrefillGetsTheRestOfTheBudget", R"(
    submit a prompt=10 max=4
    submit b prompt=10 max=4
    step
    expect plan a:10 b:6
    step
    expect plan b:4 a:1
    run
    expect output a b
)"},
    {"AStepHasAtMostMaxNumSeqsSequences", R"(
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
)"},
    {"AnOutputEndsAtTheModelsMaximumLength", R"(
    options len=16
    submit a prompt=10 max=100
    run
    expect finished a=length
    expect tokens a 6
    expect output a
)"},
    {"APromptOfOneTokenRuns", R"(
    submit a prompt=1 max=3
    step
    expect plan a:1
    run
    expect output a
)"},
};
INSTANTIATE_TEST_SUITE_P(Batching, SchedulerScenarioTest,
                         ::testing::ValuesIn(kBatching), CaseName);

constexpr Case kPriorities[] = {
    {"RequestsRunByPriorityThenByArrival", R"(
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
)"},
    {"AHigherPriorityTakesTheSeatOfALowerOne", R"(
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
)"},
    {"ARequestOfEqualPriorityDoesNotPreempt", R"(
    options seqs=1
    submit a max=20
    step 2
    submit b max=2
    step
    expect running a
    expect waiting b
    run
    expect preempted a 0
)"},
    {"AHigherPriorityTakesThePagesOfALowerOne", R"(
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
)"},
    {"AHigherPriorityTakesTheSeatOfALowerOneWhenDecodesSpendTheBudget", R"(
    options seqs=2 batch=2
    submit a prio=5 prompt=1 max=20
    submit b prio=5 prompt=1 max=20
    step
    expect plan a:1 b:1
    submit high prio=0 prompt=3 max=2
    step
    expect plan high:1 a:1
    expect running high a
    expect waiting b
    run
    expect output high a b
    expect preempted a 0
    expect preempted b 1
)"},
};
INSTANTIATE_TEST_SUITE_P(Priorities, SchedulerScenarioTest,
                         ::testing::ValuesIn(kPriorities), CaseName);

constexpr Case kPreemption[] = {
    {"TheLatestRequestOfEqualPriorityIsPreempted", R"(
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
)"},
    {"TheLowestPriorityIsPreemptedBeforeTheLatest", R"(
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
)"},
    {"ASequenceWaitsInsteadOfPreemptingItself", R"(
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
)"},
    {"ARequestWaitsIfItsWholePromptDoesNotFit", R"(
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
)"},
    {"AChunkShrinksToFitTheFreePages", R"(
    pool pages=8
    options len=32 batch=5
    submit a prompt=14 max=18
    submit b prompt=15 max=8
    step 5
    expect plan b:4 a:1
    step
    expect plan b:3 a:1
    expect free 0
    step
    expect plan a:1
    expect running a b
    run
    expect preempted b 1
    expect output a b
)"},
    {"ManySequencesFinishInAPoolWithRoomForOne", R"(
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
)"},
};
INSTANTIATE_TEST_SUITE_P(Preemption, SchedulerScenarioTest,
                         ::testing::ValuesIn(kPreemption), CaseName);

// Cases in which the pages of preempted sequences are copied to the host pool.
constexpr Case kHostPool[] = {
    {"APreemptedSequenceContinuesAfterItsComputedTokens", R"(
    pool pages=8 host=4
    options len=32
    submit a prompt=12 max=20
    submit b prompt=12 max=20
    step 7
    expect running a
    expect waiting b
    expect host 4                     # 12 prompt tokens, 3 output tokens
    expect moved 4 0
    step 12
    expect waiting b
    step
    expect finished a=length
    expect plan a:1
    step
    expect plan b:1                   # its prompt does not run again
    expect host 0
    run
    expect moved 4 4
    expect preempted b 1
    expect output a b
)"},
    {"WithoutACachedPrefixAllPagesAreCopiedBack", R"(
    pool pages=8 host=8
    options len=32 seqs=1
    submit a prompt=10 max=8 prio=1 prompt_logprobs
    step 3
    submit b prompt=24 max=8 prio=0
    step
    expect running b
    expect host 3
    run
    expect moved 3 3
    expect preempted a 1
    expect output a b
)"},
    {"ASequenceThatFindsTheHostPoolFullIsComputedAgain", R"(
    pool pages=12 host=4
    options len=32 batch=64
    submit a prompt=12 max=20
    submit b prompt=12 max=20
    submit c prompt=12 max=20
    step 5
    expect free 0
    step
    expect waiting c
    expect host 4
    step 8
    expect waiting b c
    expect host 4
    run
    expect preempted b 1
    expect output a b c
)"},
    {"AFastPrefillIsPreferredToASlowCopy", R"(
    pool pages=8 host=8
    options len=32 copy_rate=60000    # copy: 17 ms; prefill: 16 ms
    submit a prompt=12 max=20
    submit b prompt=12 max=20
    step 7
    expect waiting b
    expect host 0
    run
    expect moved 0 0
    expect preempted b 1
    expect output a b
)"},
    {"AFastCopyIsPreferredToAPrefill", R"(
    pool pages=8 host=8
    options len=32 copy_rate=80000    # copy: 13 ms; prefill: 16 ms
    submit a prompt=12 max=20
    submit b prompt=12 max=20
    step 7
    expect waiting b
    expect host 4
    run
    expect output a b
)"},
    {"SequencesOfAPoolWithRoomForOneReturnFromTheHostPool", R"(
    pool pages=8 host=16
    options len=32 batch=16 seqs=8 queue=16
    submit a prompt=9 max=23 temp=1 seed=1
    submit b prompt=2 max=30 temp=1 seed=2
    submit c prompt=20 max=12 temp=1 seed=3 prio=1 logprobs=2
    submit d prompt=1 max=31 temp=1 seed=4
    submit e prompt=30 max=2 temp=1 seed=5 prompt_logprobs
    submit f prompt=3 max=7 n=3 temp=1 seed=6
    submit g prompt=17 max=9 temp=1 seed=7 prio=-1
    submit h prompt=5 max=20 n=2 temp=1 seed=8 penalties
    run
    expect output a b c d e f g h
)"},
    {"APromptPreemptedHalfwayContinuesAfterItsComputedTokens", R"(
    pool pages=16 host=16
    options batch=8 seqs=1
    submit a prompt=30 max=4 prio=1 prompt_logprobs
    step 2
    submit b prompt=40 max=4 prio=0
    step
    expect host 4
    run
    expect moved 4 4
    expect output a b
)"},
    {"PreemptedSamplesShareTheirPromptAgain", R"(
    pool pages=9 host=9
    options len=24 batch=32
    submit a prompt=13 max=11 n=3 temp=1 seed=3 ignore_eos
    step 2
    expect free 3
    run
    expect moved 5 2                  # the prompt's 3 pages were still cached
    expect output a
)"},
    {"WithASlidingWindowOnlyPagesInTheWindowAreCopied", R"(
    pool pages=8 host=8 window=6
    options seqs=1 len=32
    submit a prompt=20 max=8 prio=1
    step 4
    submit b prompt=20 max=8 prio=0
    step
    expect host 2
    run
    expect output a b
)"},
    {"SidePagesAreCopiedWithTheirSequence", R"(
    pool pages=12 side=2 host=12
    options seqs=1 len=32 batch=32
    submit a prompt=11 max=8 prio=1
    step 4
    submit b prompt=20 max=8 prio=0
    step
    expect host 6
    run
    expect output a b
)"},
    {"WithAWindowAHostPoolCopyNeedsFewerPagesThanAPrefill", R"(
    pool pages=6 host=6 window=6
    options seqs=2 len=32 batch=16
    submit a prompt=16 max=14 prio=2 ignore_eos
    submit b prompt=4 max=20 prio=0 ignore_eos
    step 3
    submit c prompt=15 max=1 prio=1   # takes a's seat, and its cached pages
    step
    expect finished c=length
    expect running b
    expect waiting a
    expect host 2
    expect free 4                     # a prefill would hold 5 at a time
    step
    expect plan b:1 a:1
    run
    expect output a b c
)"},
    {"AnAbortFreesTheHostPoolCopy", R"(
    pool pages=8 host=8
    options seqs=1 len=32
    submit a prompt=12 max=20 prio=1
    step 3
    submit b prompt=12 max=20 prio=0
    step
    expect host 4
    abort a
    expect host 0
    run
    expect output b
)"},
    {"ADeadlineFreesTheHostPoolCopy", R"(
    pool pages=8 host=8
    options seqs=1 len=32
    submit a prompt=12 max=20 prio=1 deadline=5s
    step 3
    submit b prompt=12 max=20 prio=0
    step
    expect host 4
    advance 6s
    step
    expect failed a=DEADLINE_EXCEEDED
    expect host 0
    run
    expect output b
)"},
};

INSTANTIATE_TEST_SUITE_P(HostPool, SchedulerScenarioTest,
                         ::testing::ValuesIn(kHostPool), CaseName);

constexpr Case kTimeLimits[] = {
    {"ADeadlineEndsAQueuedRequest", R"(
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
)"},
    {"ADeadlineEndsARequestThatPrefills", R"(
    submit a prompt=40 deadline=2s
    step
    expect running a
    advance 3s
    step
    expect plan none
    expect failed a=DEADLINE_EXCEEDED
)"},
    {"ADeadlineEndsARequestThatDecodes", R"(
    submit a max=30 deadline=2s
    step 3
    advance 2s
    step
    expect failed a=DEADLINE_EXCEEDED
    expect tokens a 3
)"},
    {"ADeadlineEndsAPreemptedRequest", R"(
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
)"},
    {"ADeadlineEndsAllSamplesOfARequest", R"(
    submit a prompt=6 n=3 max=20 deadline=2s
    step 3
    expect running a a#1 a#2
    advance 2s
    step
    expect failed a=DEADLINE_EXCEEDED
)"},
    {"ARequestsOwnQueueTimeoutEndsItInTheQueue", R"(
    options seqs=1 timeout=60s
    submit a max=30
    submit b queue_timeout=2s
    step
    advance 2s
    step
    expect failed b=DEADLINE_EXCEEDED
    run
)"},
    {"TheDefaultQueueTimeoutAppliesOnlyBeforeTheFirstStep", R"(
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
)"},
    {"TheQueueTimeoutDoesNotEndPreemptedRequests", R"(
    options seqs=1 timeout=5s
    submit low prio=5 max=10
    step 2
    submit high prio=0 max=10
    step
    expect waiting low
    advance 6s
    run
    expect output high low
)"},
};
INSTANTIATE_TEST_SUITE_P(TimeLimits, SchedulerScenarioTest,
                         ::testing::ValuesIn(kTimeLimits), CaseName);

constexpr Case kAbort[] = {
    {"AnAbortEndsAWaitingRequest", R"(
    options seqs=1
    submit a max=3
    submit b
    step
    abort b
    expect finished b=abort
    expect waiting none
    run
    expect output a
)"},
    {"AnAbortEndsARequestThatPrefills", R"(
    submit a prompt=40
    step
    abort a
    expect finished a=abort
)"},
    {"AnAbortEndsARequestThatDecodes", R"(
    submit a max=30
    step 5
    abort a
    expect finished a=abort
    expect tokens a 5
)"},
    {"AnAbortWhileAStepRunsDropsItsToken", R"(
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
)"},
    {"AnAbortWhileTheFirstChunkRunsEndsTheRequest", R"(
    submit a prompt=30
    schedule
    abort a
    apply
    expect finished a=abort
)"},
    {"AnAbortEndsAPreemptedRequest", R"(
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
)"},
    {"AnAbortBeforeTheForkEndsAllSamples", R"(
    submit a prompt=40 n=3
    step
    expect running a
    abort a
    expect finished a=abort
)"},
    {"AnAbortAfterTheForkEndsAllSamples", R"(
    submit a prompt=10 n=3 max=20
    step 4
    expect running a a#1 a#2
    abort a
    expect finished a=abort
)"},
    {"AnAbortEndsRunningAndPreemptedSamples", R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=10 n=3 max=22
    step 9
    expect running a a#1
    expect waiting a#2
    abort a
    expect finished a=abort
)"},
    {"AnAbortOfAFinishedOrUnknownRequestIsIgnored", R"(
    submit a max=2
    run
    abort a
    abort nobody
    expect finished a=length
    expect output a
)"},
};
INSTANTIATE_TEST_SUITE_P(Abort, SchedulerScenarioTest,
                         ::testing::ValuesIn(kAbort), CaseName);

constexpr Case kAdmission[] = {
    {"RequestsAboveTheQueueLimitAreRefused", R"(
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
)"},
    {"PreemptedRequestsDoNotFillTheQueue", R"(
    options seqs=1 queue=1
    submit low prio=5 max=20
    step 2
    submit high prio=0 max=4
    step
    expect waiting low
    submit other max=2
    run
    expect output low high other
)"},
    {"ARequestWithALiveIdIsRefused", R"(
    submit a max=2
    submit a max=2
    expect refused a=ALREADY_EXISTS/none
    run
)"},
    {"AnotherAttemptOfALiveIdIsAccepted", R"(
    submit a max=2
    submit a max=3 attempt=1
    run
    expect output a
)"},
    {"ForksHoldTheirSeatsFromTheStart", R"(
    options seqs=3
    submit a prompt=30 n=2 max=4
    submit b prompt=4 n=2 max=4
    step
    expect running a
    expect waiting b
    run
    expect output a b
)"},
};
INSTANTIATE_TEST_SUITE_P(Admission, SchedulerScenarioTest,
                         ::testing::ValuesIn(kAdmission), CaseName);

constexpr Case kSamples[] = {
    {"SamplesPrefillOnceAndShareThePages", R"(
    submit a prompt=10 n=3 max=4 temp=1 seed=5
    step
    expect plan a:9
    expect running a a#1 a#2
    expect free 13
    step
    expect plan a:1 a#1:1 a#2:1
    expect free 11       # two of the three samples copied the last page
    run
    expect output a
    expect finished a=length
)"},
    {"APromptOfOneTokenMayHaveSeveralSamples", R"(
    submit a prompt=1 n=2 max=4 temp=1 seed=5
    run
    expect output a
)"},
    {"APromptThatFillsItsPagesMayHaveSeveralSamples", R"(
    submit a prompt=9 n=4 max=6 temp=1 seed=5
    run
    expect output a
)"},
    {"APromptCachedExceptItsLastTokenMayHaveSeveralSamples", R"(
    submit a prompt=8 max=1
    run
    submit b text=a prompt=9 n=2 max=4 temp=1 seed=1
    step
    expect plan b:1
    run
    expect cached b 8
    expect output b
)"},
    {"APreemptedForkContinuesWithTheSameTokens", R"(
    pool pages=8
    options len=32 batch=32
    submit a prompt=10 n=3 max=22 temp=1 seed=11
    run
    expect output a
    expect finished a=length
)"},
};
INSTANTIATE_TEST_SUITE_P(Samples, SchedulerScenarioTest,
                         ::testing::ValuesIn(kSamples), CaseName);

constexpr Case kResume[] = {
    {"AResumedRequestPrefillsItsEmittedTokens", R"(
    submit a prompt=10 emitted=5 max=12 temp=1 seed=3
    step
    expect plan a:10
    expect tokens a 0
    step
    expect plan a:5
    expect tokens a 1
    run
    expect tokens a 7
    expect output a
)"},
    {"AResumedRequestKeepsPenaltiesAndMinTokens", R"(
    submit a prompt=10 emitted=5 max=20 min=8 temp=1 seed=3 penalties
    run
    expect output a
)"},
    {"AResumedRequestMayPrefillInChunks", R"(
    options batch=7 seqs=2
    submit a prompt=20 emitted=9 max=20 temp=1 seed=3 penalties
    run
    expect output a
)"},
    {"AResumedRequestWithACompleteOutputEndsAtOnce", R"(
    submit a prompt=4 max=4 emitted=4
    expect finished a=length
    expect tokens a 0
)"},
    {"PenaltiesSurviveAPreemption", R"(
    options seqs=1
    submit low prio=5 max=20 temp=1 seed=4 penalties
    step 7
    submit high prio=0 max=3 temp=1 seed=5 penalties
    run
    expect preempted low 1
    expect output low high
)"},
};
INSTANTIATE_TEST_SUITE_P(Resume, SchedulerScenarioTest,
                         ::testing::ValuesIn(kResume), CaseName);

constexpr Case kPrefixReuse[] = {
    {"APromptReusesTheFullPagesOfAnEarlierPrompt", R"(
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
)"},
    {"AFullyCachedPromptStillRunsItsLastToken", R"(
    submit a prompt=16 max=2
    run
    submit b text=a prompt=16 max=2
    step
    expect plan b:4
    run
    expect cached b 12
    expect output b
)"},
    {"PrefixesAreNotSharedAcrossSalts", R"(
    submit a prompt=16 max=2 salt=x
    run
    submit b text=a prompt=16 max=2 salt=y
    submit c text=a prompt=16 max=2 salt=x
    run
    expect cached b 0
    expect cached c 12
    expect output b c
)"},
    {"ARequestSharesPagesWithARunningSequence", R"(
    pool pages=16
    submit a prompt=32 max=30
    step 3
    submit b text=a prompt=32 max=20
    step
    expect plan b:4 a:1
    run
    expect cached b 28
    expect output a b
)"},
    {"AWaitingRequestUsesAPrefixThatGrewMeanwhile", R"(
    pool pages=16
    options batch=44
    submit a prompt=40 max=20
    submit b text=a prompt=40 max=8
    step
    expect plan a:40
    expect waiting b
    step
    expect plan b:4 a:1
    run
    expect cached b 36
    expect output a b
)"},
    {"ARequestWaitsForPagesIfNoCachedPrefixHelps", R"(
    pool pages=16
    options batch=44
    submit a prompt=40 max=10
    submit b prompt=40 max=8
    step 9
    expect running a
    expect waiting b
    run
    expect preempted a 0
    expect preempted b 0
    expect output a b
)"},
    {"PromptLogprobsDisablePrefixReuse", R"(
    submit a prompt=16 max=2
    run
    submit b text=a prompt=16 max=2 prompt_logprobs
    run
    expect cached b 0
    expect output b
)"},
};
INSTANTIATE_TEST_SUITE_P(PrefixReuse, SchedulerScenarioTest,
                         ::testing::ValuesIn(kPrefixReuse), CaseName);

constexpr Case kWindows[] = {
    {"ASequenceHoldsOnlyThePagesOfItsWindow", R"(
    pool pages=6 window=6
    options batch=8 seqs=1
    submit a prompt=40 max=20
    run
    expect output a
)"},
    {"LayersWithAndWithoutAWindowRunTogether", R"(
    pool pages=16
    group pages=8 window=6
    options batch=8
    submit a prompt=40 max=20 temp=1 seed=1
    submit b prompt=20 max=20 temp=1 seed=2
    submit c prompt=30 max=9 n=2 temp=1 seed=3
    run
    expect output a b c
)"},
};
INSTANTIATE_TEST_SUITE_P(Windows, SchedulerScenarioTest,
                         ::testing::ValuesIn(kWindows), CaseName);

}  // namespace
}  // namespace kvasir::worker
