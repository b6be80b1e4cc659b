// Tests sequences with side pages. A prompt can reuse a cached prefix only up
// to the last tail, which is a copy of the side pages at that length.
#include <memory>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "cache/kv_cache.h"
#include "cache/testing/kv_cache_scenario.h"

namespace kvasir::cache {
namespace {

KvCacheConfig Config(int64_t num_pages, int64_t side_pages) {
  KvCacheConfig config;
  config.page_tokens = 4;
  config.groups = {
      {.num_pages = num_pages, .side_pages_per_sequence = side_pages}};
  config.cache_id = "test";
  return config;
}

void RunScript(int64_t num_pages, int64_t side_pages,
               absl::string_view script) {
  KvCacheScenario(Config(num_pages, side_pages)).Run(script);
}

TEST(KvCacheTailsTest, APrefixIsFoundUpToItsLastTail) {
  KvCacheScenario s(Config(12, 2));
  s.Run(R"(
    start a 1..10      -> cached 0
    cut a              -> 8
    reserve a 8        -> ok
    side a             -> 0 1
    pages a            -> 2 3
    copies             ->
    commit a 8
    copies             -> g0 0>4; g0 1>5
    tails              -> 2
    pool               -> used 4 free 8 cached 2
    step a 2           -> ok
    release a
    pool               -> used 0 free 12 cached 4
    probe 1..10        -> cached 8
    probe 1..8         -> cached 0    # there is no tail after token 4
    start b 1..10      -> cached 8
    cut b              -> 0
    pages b            -> 2 3
    side b             ->
    pool               -> used 4 free 8 cached 0
    reserve b 2        -> ok
    delta b            -> g0 reset live=0 +2 +3 +0 side+6 side+1
    copies             -> g0 4>6; g0 5>1
    pool               -> used 5 free 7 cached 2
    commit b 2
  )");
  EXPECT_EQ(s.cache().Stats().hit_tokens, 8);
}

TEST(KvCacheTailsTest, AStepThatDoesNotEndAtAPageBoundaryPublishesNoTail) {
  RunScript(12, 2, R"(
    start a 1..10
    step a 10          -> ok
    tails              -> 0
    probe 1..10        -> cached 0
  )");
}

TEST(KvCacheTailsTest, OnlyTheNewestTailOfTheOutputIsKept) {
  RunScript(16, 1, R"(
    start a 1..6
    step a 4           -> ok          # the prompt's last boundary
    copies             -> g0 0>2
    step a 2           -> ok
    append a 7..16
    step a 1           -> ok
    copies             ->
    step a 1           -> ok          # the output's first boundary
    copies             -> g0 0>4
    tails              -> 2
    probe 1..20        -> cached 8
    step a 1           -> ok
    step a 1           -> ok
    step a 1           -> ok
    step a 1           -> ok          # its second: replaces that tail
    copies             -> g0 0>4
    tails              -> 2
    probe 1..12        -> cached 4
    probe 1..20        -> cached 12
    release a
    probe 1..20        -> cached 12
    pool               -> used 0 free 16 cached 5
  )");
}

TEST(KvCacheTailsTest, ATailThatAnotherSequenceUsesIsNotReplaced) {
  RunScript(16, 1, R"(
    start a 1..3
    append a 4..12
    step a 3           -> ok
    step a 1           -> ok
    tails              -> 1
    start b 1..4 20    -> cached 4
    step b 1           -> ok
    step a 4           -> ok
    tails              -> 2
    probe 1..7         -> cached 4
    probe 1..9         -> cached 8
  )");
}

TEST(KvCacheTailsTest, APromptPublishesATailWhereItDivergesFromACachedOne) {
  RunScript(32, 1, R"(
    start a 1..10 20..29
    step a 8           -> ok
    step a 8           -> ok
    cut a              -> 20
    step a 4           -> ok
    probe 1..30        -> cached 0    # no tail where the texts diverge
    start b 1..10 40..49 -> cached 0
    cut b              -> 8
    step b 8           -> ok
    step b 12          -> ok
    start c 1..10 60..69 -> cached 8
    cut c              -> 20
    step c 12          -> ok
  )");
}

TEST(KvCacheTailsTest, APreemptedSequenceContinuesFromItsTail) {
  RunScript(16, 1, R"(
    start a 1..5
    append a 6..12
    step a 5           -> ok
    step a 2           -> ok
    step a 1           -> ok
    step a 2           -> ok
    preempt a
    start a 1..12      -> cached 8
    step a 4           -> ok
    copies             -> g0 0>3; g0 3>4; g0 4>5
  )");
}

TEST(KvCacheTailsTest, ASequenceThatMustNotPublishItsPagesPublishesNoTail) {
  RunScript(16, 1, R"(
    start a 1..10 nopublish
    cut a              -> 0
    step a 8           -> ok
    step a 2           -> ok
    release a
    pool               -> used 0 free 16 cached 0
  )");
}

TEST(KvCacheTailsTest, PrefixesCachedWithAnotherSaltAreNotFound) {
  RunScript(16, 1, R"(
    start a 1..10 salt=x
    step a 8           -> ok
    probe 1..10 salt=x -> cached 8
    probe 1..10 salt=y -> cached 0
    start b 1..10 salt=y -> cached 0
    cut b              -> 8           # b's last boundary; no fork point
  )");
}

// A hasher that gives every prefix the same hash, so that different prefixes
// always collide.
class OneHash final : public PrefixHasher {
 public:
  PrefixHash Root(absl::string_view) const override { return {}; }
  PrefixHash Extend(const PrefixHash&,
                    absl::Span<const int32_t>) const override {
    return {};
  }
};

TEST(KvCacheTailsTest, APrefixWithTheSameHashButOtherTokensIsACacheMiss) {
  KvCacheScenario s(Config(16, 1), std::make_unique<OneHash>());
  s.Run(R"(
    start a 1..6
    step a 4           -> ok
    probe 1..5         -> cached 4
    start b 11..16     -> cached 0
    step b 4           -> ok          # its page gets no node, so no tail
    tails              -> 1
    probe 11..16       -> cached 0
    probe 1..5         -> cached 4
  )");
}

TEST(KvCacheTailsTest, ForgettingACachedPageAlsoDropsItsTail) {
  RunScript(8, 2, R"(
    start a 1..8
    step a 8           -> ok
    release a
    pool               -> used 0 free 8 cached 4
    start b 21..32 nopublish          # 2 side pages, 3 token pages
    step b 12          -> ok          # takes a's last page
    pool               -> used 5 free 3 cached 1
    tails              -> 0
    probe 1..9         -> cached 0
    release b
    drop
    pool               -> used 0 free 8 cached 0
  )");
}

// A released sequence's tails are evicted after its token pages.
TEST(KvCacheTailsTest, EvictsThePagesThatFollowATailBeforeTheTailItself) {
  RunScript(10, 1, R"(
    start a 1..6
    append a 7..19
    step a 4           -> ok          # page 1, tail 2
    step a 15          -> ok          # pages 3 4 5 6
    release a
    pool               -> used 0 free 10 cached 5
    start b 31..56 nopublish
    step b 26          -> ok          # 8 pages: 3 cached ones are taken
    pool               -> used 8 free 2 cached 2
    probe 1..6         -> cached 4
  )");
}

TEST(KvCacheTailsTest, TailsAreEvictedIfRequestsNeedTheirPages) {
  RunScript(8, 1, R"(
    start a 1..8
    step a 8           -> ok
    pool               -> used 3 free 5 cached 1
    start b 21..36 nopublish
    step b 16          -> ok          # 5 pages, one of them the tail's
    tails              -> 0
    probe 1..9         -> cached 0
    pool               -> used 8 free 0 cached 0
    append a 9 10 11 12
    step a 4           -> no g0 want 1 free 0
    release b
    step a 4           -> ok
    tails              -> 1
    probe 1..13        -> cached 12
  )");
}

TEST(KvCacheTailsTest, TailsTakeAtMostAQuarterOfThePool) {
  RunScript(16, 2, R"(
    start a 1..4
    step a 4           -> ok
    start b 11..14
    step b 4           -> ok
    tails              -> 4
    probe 1..5         -> cached 4
    start c 21..24
    step c 4           -> ok
    tails              -> 4
    probe 1..5         -> cached 0
    probe 11..15       -> cached 4
    probe 21..25       -> cached 4
  )");
}

TEST(KvCacheTailsTest,
     InAFullPoolTheLastSequenceThatUsesATailTakesItOverWithoutACopy) {
  RunScript(6, 2, R"(
    start a 1..8
    step a 4           -> ok
    step a 4           -> ok
    copies             -> g0 0>4; g0 1>5
    release a
    start b 1..16      -> cached 8
    pool               -> used 4 free 2 cached 0
    reserve b 8        -> ok          # takes both free pages: no copy
    copies             ->
    side b             -> 4 5
    tails              -> 0
    commit b 8
    release b
    drop
    pool               -> used 0 free 6 cached 0
  )");
}

TEST(KvCacheTailsTest, ATailIsStillCopiedIfItsLastSequenceEndsBeforeTheStep) {
  RunScript(5, 1, R"(
    start a 1..5
    step a 4           -> ok
    release a
    start c 1..5       -> cached 4
    reserve c 1        -> ok
    start b 1..5       -> cached 4
    reserve b 1        -> ok          # takes the tail over
    release b
    copies             -> g0 0>2; g0 2>0
  )");
}

TEST(KvCacheTailsTest, ATailThatSeveralSequencesShareIsNotTakenOver) {
  RunScript(6, 2, R"(
    start a 1..8
    step a 8           -> ok
    release a
    start b 1..16      -> cached 8
    start c 1..16      -> cached 8
    reserve b 8        -> no g0 want 4 free 2
    release c
    reserve b 8        -> ok
  )");
}

// A sequence may turn the pages of a tail into its own side pages if no other
// sequence holds the tail.
TEST(KvCacheTailsTest, TheAvailablePagesOfASequenceIncludeThePagesOfItsTail) {
  KvCacheScenario s(Config(6, 2));
  s.Run(R"(
    start a 1..8
    step a 8           -> ok
    release a
    start b 1..16      -> cached 8
  )");
  EXPECT_EQ(s.cache().available_pages(PageGroupId(0)), 2);
  EXPECT_EQ(s.cache().available_pages(SequenceId(1), PageGroupId(0)), 4);
}

// The executor does copies in the order of the list. So a copy reads what its
// source page held when the copy was listed, even if another sequence holds the
// page by then.
TEST(KvCacheTailsTest, AFreedPageIsCopiedBeforeANewHolderOverwritesIt) {
  RunScript(6, 1, R"(
    start a 1..4
    step a 4           -> ok
    side a             -> 0
    release a
    start b 21..24
    reserve b 4        -> ok
    side b             -> 0
    start c 1..5       -> cached 4
    reserve c 1        -> ok
    copies             -> g0 0>2; g0 2>4
  )");
}

TEST(KvCacheTailsTest, AForkCopiesTheSidePagesOfItsParentImmediately) {
  RunScript(12, 2, R"(
    start a 1..6 nopublish
    step a 5           -> ok
    fork a b
    side b             -> 4 5
    copies             -> g0 0>4; g0 1>5
    step a 1           -> ok
    step b 1           -> ok
    copies             -> g0 3>6
    release a
    release b
    pool               -> used 0 free 12 cached 0
  )");
}

TEST(KvCacheTailsTest, AForkOfAForkCopiesSidePagesOfASequenceThatHasEnded) {
  RunScript(12, 1, R"(
    start a 1..6 nopublish
    step a 5           -> ok
    fork a b
    fork b c
    release b
    copies             -> g0 0>3; g0 3>4
  )");
}

TEST(KvCacheTailsTest, ForksOfASequenceThatHasNotRunShareItsTail) {
  RunScript(12, 2, R"(
    start a 1..5
    step a 4           -> ok
    copies             -> g0 0>3; g0 1>4
    start b 1..5       -> cached 4
    fork b c
    step b 1           -> ok
    step c 1           -> ok
    copies             -> g0 3>5; g0 4>6; g0 3>8; g0 4>9
    tails              -> 2
  )");
}

TEST(KvCacheTailsTest,
     AForkIsRefusedIfTheFreePagesDoNotSufficeForItsSidePages) {
  KvCacheScenario s(Config(5, 2));
  s.Run(R"(
    start a 1..9 nopublish
    step a 5           -> ok
  )");
  EXPECT_FALSE(s.cache().can_fork(SequenceId(0)));
}

TEST(KvCacheTailsTest, ReleasingASequenceInAnyStateFreesAllItsPages) {
  RunScript(12, 2, R"(
    start a 1..10
    step a 8           -> ok
    release a                         # the copy into its tail is pending
    start a 1..10      -> cached 8    # holds the tail
    release a
    start a 1..10      -> cached 8
    reserve a 2        -> ok          # copies of the tail are pending
    release a
    start a 1..10      -> cached 8
    fork a b                          # both hold the tail
    release a
    release b
    start a 1..10      -> cached 8
    step a 1           -> ok
    fork a b                          # b has side pages, but no reservation
    release b
    fork a b
    release a
    release b
    drop
    pool               -> used 0 free 12 cached 0
  )");
}

TEST(KvCacheTailsTest, WithoutPrefixReuseNoTailsArePublished) {
  KvCacheConfig config = Config(12, 2);
  config.prefix_reuse = false;
  KvCacheScenario s(config);
  s.Run(R"(
    start a 1..10
    cut a              -> 0
    step a 8           -> ok
    tails              -> 0
    probe 1..10        -> cached 0
  )");
}

}  // namespace
}  // namespace kvasir::cache
