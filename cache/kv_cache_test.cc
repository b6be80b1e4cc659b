#include "cache/kv_cache.h"

#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "cache/testing/kv_cache_scenario.h"

namespace kvasir::cache {
namespace {

constexpr int64_t kPageBytes = 1024;
constexpr int64_t kPayloadBytes = 960;

KvCacheConfig::Group Pages(int64_t num_pages, int64_t sliding_window = 0) {
  return {.num_pages = num_pages,
          .sliding_window = sliding_window,
          .page_bytes = kPageBytes,
          .payload_bytes = kPayloadBytes};
}

KvCacheConfig Config(std::vector<KvCacheConfig::Group> groups) {
  KvCacheConfig config;
  config.page_tokens = 4;
  config.groups = std::move(groups);
  config.cache_id = "test";
  return config;
}

TEST(KvCacheTest, AReservationAllocatesAPageOnlyIfTheLastOneIsFull) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..9       -> cached 0
    reserve a 5        -> ok
    delta a            -> g0 reset live=0 +0 +1
    commit a 5
    delta a            ->
    reserve a 3        -> ok          # the second page has room for three
    delta a            ->
    commit a 3
    reserve a 1        -> ok
    delta a            -> g0 live=0 +2
    commit a 1
    lengths a          -> logical 9 physical 9
    pool               -> used 3 free 3 cached 0
    release a
    pool               -> used 0 free 6 cached 2
    drop
    pool               -> used 0 free 6 cached 0
  )");
}

TEST(KvCacheTest, ARefusedReservationOnlyReportsTheMissingPages) {
  KvCacheScenario s(Config({Pages(3)}));
  s.Run(R"(
    start a 1..8
    reserve a 8        -> ok
    start b 11..18
    reserve b 8        -> no g0 want 2 free 1
    pages b            ->
    pool               -> used 2 free 1 cached 0
    reserve b 4        -> ok
    pages b            -> 2
  )");
}

TEST(KvCacheTest, ASecondReservationReplacesOneThatWasNotCommitted) {
  KvCacheScenario s(Config({Pages(4)}));
  s.Run(R"(
    start a 1..8
    reserve a 8        -> ok
    reserve a 2        -> ok
    commit a 2
    pages a            -> 0 1         # page 1 is kept for later tokens
    step a 6           -> ok
    pages a            -> 0 1
  )");
}

TEST(KvCacheTest, TheNextStepCanBePlannedBeforeTheCurrentOneIsCommitted) {
  KvCacheConfig config = Config({Pages(4)});
  config.groups[0].eviction = {
      .budget_tokens = 6, .every_tokens = 8, .observation_window = 2};
  config.prefix_reuse = false;
  KvCache cache(config);
  ASSERT_TRUE(cache.can_run_ahead());
  const SequenceId a(1);
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5};
  cache.StartSequence(a, ids, {});
  ASSERT_TRUE(cache.Reserve(a, 3));
  kvasir::v1::SequenceStep first;
  cache.TakeDeltas(a, &first);
  EXPECT_EQ(first.physical_starts(0), 0u);
  // only the queries of tokens 3 and 4 add to the scores
  EXPECT_EQ(first.first_counted(0), 3u);
  ASSERT_TRUE(cache.Reserve(a, 5));
  kvasir::v1::SequenceStep next;
  cache.TakeDeltas(a, &next, /*written_before=*/3);
  EXPECT_EQ(next.physical_starts(0), 3u);
  EXPECT_EQ(next.first_counted(0), 3u);
  ASSERT_EQ(next.block_tables_size(), 1);
  EXPECT_EQ(next.block_tables(0).appended_pages_size(), 1);
  const absl::Span<const int32_t> all = ids;
  cache.Commit(a, all.first(3));
  EXPECT_EQ(cache.reserved_tokens(a), 2);
  cache.Commit(a, all.subspan(3));
  EXPECT_EQ(cache.reserved_tokens(a), 0);
  EXPECT_EQ(cache.logical_tokens(a), 5);

  // The queries of all output tokens add to the scores.
  ASSERT_TRUE(cache.Reserve(a, 1));
  ASSERT_TRUE(cache.Reserve(a, 2));
  kvasir::v1::SequenceStep output;
  cache.TakeDeltas(a, &output, /*written_before=*/1);
  EXPECT_EQ(output.physical_starts(0), 6u);
  EXPECT_EQ(output.first_counted(0), 6u);
}

TEST(KvCacheTest, TheFullPagesOfAFinishedSequenceAreFoundByALaterPrompt) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..10
    step a 10          -> ok
    release a
    start b 1..8 50 51 52  -> cached 8
    pages b            -> 0 1
    pool               -> used 2 free 4 cached 0
    reserve b 3        -> ok
    delta b            -> g0 reset live=0 +0 +1 +2
    commit b 3
    lengths b          -> logical 11 physical 11
  )");
}

TEST(KvCacheTest, APromptSharesThePagesOfASequenceThatIsStillRunning) {
  KvCacheScenario s(Config({Pages(4)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok
    start b 1..6       -> cached 4
    step b 2           -> ok
    pages a            -> 0 1
    pages b            -> 0 2
    pool               -> used 3 free 1 cached 0
    release a
    pages b            -> 0 2
    pool               -> used 2 free 2 cached 0
  )");
}

TEST(KvCacheTest, APromptThatIsCachedCompletelyComputesItsLastPageAgain) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..8
    step a 8           -> ok
    release a
    probe 1..8         -> cached 4
    probe 1..9         -> cached 8
    probe 1..4         -> cached 0
    start b 1..8       -> cached 4
    step b 4           -> ok
    pages b            -> 0 2         # its own copy of the second page
    release b
    pool               -> used 0 free 6 cached 2
  )");
}

TEST(KvCacheTest,
     PagesAreFoundOnlyForTheSameTokensInTheSameOrderWithTheSameSalt) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..8 salt=x
    step a 8           -> ok
    probe 1..9 salt=x  -> cached 8
    probe 1..9 salt=y  -> cached 0
    probe 1..9         -> cached 0
    probe 1..4 9 6 7 8 9 salt=x -> cached 4
    probe 5..8 1..5 salt=x      -> cached 0
    start b 1..9 salt=x noreuse -> cached 0
  )");
}

TEST(KvCacheTest, PagesOfASequenceThatMustNotPublishAreNotFound) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..8 nopublish
    step a 8           -> ok
    probe 1..9         -> cached 0
    release a
    pool               -> used 0 free 6 cached 0
  )");
}

TEST(KvCacheTest, WithoutPrefixReuseNoPageIsCached) {
  KvCacheConfig config = Config({Pages(6)});
  config.prefix_reuse = false;
  KvCacheScenario s(config);
  s.Run(R"(
    start a 1..8
    step a 8           -> ok
    probe 1..9         -> cached 0
    release a
    pool               -> used 0 free 6 cached 0
  )");
  EXPECT_EQ(s.cache().Stats().query_tokens, 0);
}

TEST(KvCacheTest, EvictsTheEndOfTheLeastRecentlyUsedPrefixFirst) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..12
    step a 12          -> ok          # pages 0 1 2
    start b 21..32
    step b 12          -> ok          # pages 3 4 5
    release b
    release a
    pool               -> used 0 free 6 cached 6
    start c 41..48
    step c 4           -> ok          # evicts b's last page: b is older
    pages c            -> 5
    step c 4           -> ok
    pages c            -> 5 4
    probe 21..33       -> cached 4
    probe 1..13        -> cached 12
    release c
    start d 61..76
    step d 16          -> ok          # evicts b's rest, then a from its end
    pages d            -> 3 2 1 0
    probe 41..49       -> cached 8
  )");
  EXPECT_EQ(s.cache().Stats().pages_evicted, 6);
}

TEST(KvCacheTest, ACacheHitMakesAPrefixTheMostRecentlyUsedOne) {
  KvCacheScenario s(Config({Pages(4)}));
  s.Run(R"(
    start a 1..8
    step a 8           -> ok          # pages 0 1
    release a
    start b 21..28
    step b 8           -> ok          # pages 2 3
    release b
    start c 1..9       -> cached 8    # uses a's pages
    release c
    start d 41..48
    step d 8           -> ok
    pages d            -> 3 2
    probe 1..9         -> cached 8
    probe 21..29       -> cached 0
  )");
}

TEST(KvCacheTest, PagesThatASequenceHoldsAreNotEvicted) {
  KvCacheScenario s(Config({Pages(3)}));
  s.Run(R"(
    start a 1..8
    step a 8           -> ok
    release a
    start b 1..9       -> cached 8
    start c 21..28
    reserve c 8        -> no g0 want 2 free 1
    reserve c 4        -> ok
    pages b            -> 0 1
  )");
}

TEST(KvCacheTest, SequencesThatComputeTheSamePageKeepTheirOwnCopies) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..9
    start b 1..9
    step a 9           -> ok          # 0 1 2
    step b 9           -> ok          # 3 4 5
    pages b            -> 3 4 5
    probe 1..9         -> cached 8
    release b
    pool               -> used 3 free 3 cached 0
    start c 1..9       -> cached 8
    pages c            -> 0 1
  )");
}

TEST(KvCacheTest,
     APrefixWithAnEvictedPageIsFoundAgainAfterThePageIsRecomputed) {
  KvCacheScenario s(Config({Pages(5)}));
  s.Run(R"(
    start a 1..4
    start b 1..9
    step a 4           -> ok          # publishes page 0
    step b 4           -> ok          # the same tokens, in b's own page 1
    release a
    step b 5           -> ok          # publishes page 2 below page 0's node
    start c 21..28
    step c 8           -> ok          # takes page 4 and the cached page 0
    pages c            -> 4 0
    probe 1..9         -> cached 0    # the chain has lost its first page
    release c
    start d 1..9       -> cached 0
    step d 4           -> ok          # computes the first page anew
    probe 1..9         -> cached 8    # and b's page is found again
  )");
}

TEST(KvCacheTest, AForkCopiesOnlyThePartlyFilledLastPage) {
  KvCacheScenario s(Config({Pages(8)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok          # 0 1
    delta a            -> g0 reset live=0 +0 +1
    fork a b
    fork a c
    pages b            -> 0
    lengths b          -> logical 6 physical 6
    pool               -> used 2 free 6 cached 0
    append a 7
    append b 8
    append c 9
    reserve a 1        -> ok          # the parent writes in place
    reserve b 1        -> ok
    reserve c 1        -> ok
    copies             -> g0 1>2; g0 1>3
    copies             ->
    delta a            ->
    delta b            -> g0 reset live=0 +0 +2
    delta c            -> g0 reset live=0 +0 +3
    commit a 1
    commit b 1
    commit c 1
    pool               -> used 4 free 4 cached 0
    release a
    release b
    release c
    pool               -> used 0 free 8 cached 1
  )");
  EXPECT_EQ(s.cache().Stats().pages_copied, 2);
}

TEST(KvCacheTest, AForkAtAPageBoundaryCopiesNothing) {
  KvCacheScenario s(Config({Pages(8)}));
  s.Run(R"(
    start a 1..8
    step a 8           -> ok
    fork a b
    append b 9
    step b 1           -> ok
    copies             ->
    pages b            -> 0 1 2
  )");
}

TEST(KvCacheTest,
     AForkCopiesItsLastPageAtItsFirstWriteEvenAfterItsParentHasEnded) {
  KvCacheScenario s(Config({Pages(4)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok          # 0 1
    fork a b
    append a 7 8
    step a 2           -> ok          # fills page 1 after the fork's slots
    release a
    append b 9
    pool               -> used 2 free 2 cached 0
    step b 1           -> ok
    copies             -> g0 1>2
    pages b            -> 0 2
    probe 1..9         -> cached 8    # the parent's page, cached
  )");
}

TEST(KvCacheTest, ForksOfAForkCopyTheirLastPageFromTheSameSource) {
  KvCacheScenario s(Config({Pages(8)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok
    fork a b
    fork b c
    append c 9
    step c 1           -> ok
    copies             -> g0 1>2
    append b 8
    step b 1           -> ok
    copies             -> g0 1>3
  )");
}

TEST(KvCacheTest, InAFullPoolTheLastHolderOfAPageWritesToItInsteadOfToACopy) {
  KvCacheScenario s(Config({Pages(2)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok
    fork a b
    append b 9
    reserve b 1        -> no g0 want 1 free 0   # a still holds page 1
    append a 7 8
    step a 2           -> ok
    release a
    step b 1           -> ok
    copies             ->
    pages b            -> 0 1
    probe 1..9         -> cached 4    # page 1 is now b's, and not found
  )");
}

// A step does its copies before it writes anything. So a copy may stay in the
// list although its pages already have a new holder.
TEST(KvCacheTest, APendingCopyStaysInTheListIfItsSequenceEnds) {
  KvCacheScenario s(Config({Pages(8)}));
  s.Run(R"(
    start a 1..6
    step a 6           -> ok
    fork a b
    fork a c
    reserve b 1        -> ok
    reserve c 1        -> ok
    preempt b
    start d 21..24
    reserve d 4        -> ok
    pages d            -> 2
    copies             -> g0 1>2; g0 1>3
  )");
}

TEST(KvCacheTest, APreemptedSequenceFindsItsPagesAgain) {
  KvCacheScenario s(Config({Pages(6)}));
  s.Run(R"(
    start a 1..9
    step a 9           -> ok
    preempt a
    pool               -> used 0 free 6 cached 2
    start a 1..10      -> cached 8
    reserve a 2        -> ok
    delta a            -> g0 reset live=0 +0 +1 +2
  )");
  EXPECT_EQ(s.cache().Stats().preemptions, 1);
}

TEST(KvCacheTest, PagesThatLeaveTheSlidingWindowAreReleased) {
  // The second group has a window of 5: a query attends to its own token and
  // the four before it.
  KvCacheScenario s(Config({Pages(8), Pages(4, 5)}));
  s.Run(R"(
    start a 1..20
    reserve a 8        -> ok
    delta a            -> g0 reset live=0 +0 +1; g1 reset live=0 +0 +1
    commit a 8                        # the next query sees 4..8
    lengths a g0       -> logical 8 physical 8
    lengths a g1       -> logical 8 physical 4
    pages a g1         -> 1
    reserve a 1        -> ok
    delta a            -> g0 live=0 +2; g1 live=1 +2
    commit a 1
    step a 7           -> ok
    lengths a g1       -> logical 16 physical 4
    pages a g0         -> 0 1 2 3
    pool g1            -> used 1 free 3 cached 3
    release a
    pool g0            -> used 0 free 8 cached 4
  )");
}

TEST(KvCacheTest, ACacheHitNeedsOnlyThePagesInsideTheSlidingWindow) {
  KvCacheScenario s(Config({Pages(8), Pages(5, 5)}));
  s.Run(R"(
    start a 1..16 30
    step a 16          -> ok
    release a
    start b 1..12 40   -> cached 12
    reserve b 1        -> ok
    delta b            -> g0 reset live=0 +0 +1 +2 +4; g1 reset live=2 +-1 +-1 +2 +4
    lengths b g1       -> logical 12 physical 4
  )");
}

TEST(KvCacheTest, AMissingPageInsideTheSlidingWindowShortensTheCacheHit) {
  KvCacheScenario s(Config({Pages(12), Pages(4, 5)}));
  s.Run(R"(
    start a 1..16
    step a 8           -> ok          # gives up page 0
    step a 8           -> ok          # gives up pages 1 and 2
    pool g1            -> used 1 free 3 cached 3
    start b 61..68
    step b 8           -> ok          # takes the two oldest cached pages
    probe 1..17        -> cached 16
    probe 1..13        -> cached 12
    probe 1..9         -> cached 0    # needs group 1's page 1, which is gone
  )");
}

// The last page of a long sequence with a window keeps the index nodes of all
// pages before it in the index. With a pool of 4 pages, the index has room for
// 2 * 4 + 64 nodes: the root and 71 pages.
TEST(KvCacheTest, AnIndexThatIsFullOfNodesWithoutPagesMakesRoomForNewPrefixes) {
  KvCacheScenario s(Config({Pages(4, 5)}));
  s.Run("start a 1..284 -> cached 0");
  for (int page = 0; page < 71; ++page) {
    ASSERT_EQ(s.Do("step a 4"), "ok") << page;
  }
  s.Run(R"(
    release a
    pool               -> used 0 free 4 cached 4
    probe 1..285       -> cached 284
    start b 1001..1009 -> cached 0
    step b 8           -> ok          # takes the two oldest cached pages
    release b
    probe 1..285       -> cached 0    # a's pages and nodes are gone
    probe 1001..1009   -> cached 8
    start c 1001..1009 -> cached 8
    step c 1           -> ok
    pages c            -> 0 2
    start d 7..15 salt=other -> cached 0
    release c
    release d
  )");
  EXPECT_EQ(s.cache().Stats().pages_unpublished, 0);
}

// The sequence has one page more than the index has room for, so its own nodes
// fill the index.
TEST(KvCacheTest, ASequenceThatFillsTheIndexByItselfEvictsNoCachedPages) {
  KvCacheScenario s(Config({Pages(4, 5)}));
  s.Run("start a 1..288 -> cached 0");
  for (int page = 0; page < 72; ++page) {
    ASSERT_EQ(s.Do("step a 4"), "ok") << page;
  }
  EXPECT_EQ(s.cache().Stats().pages_unpublished, 1);
  s.Run(R"(
    pool               -> used 1 free 3 cached 3
    probe 1..285       -> cached 284
  )");
}

TEST(KvCacheTest, SidePagesAreAllocatedByTheFirstReservation) {
  KvCacheConfig config = Config({Pages(6)});
  config.groups[0].side_pages_per_sequence = 2;
  KvCacheScenario s(config);
  s.Run(R"(
    start a 1..8
    pool               -> used 0 free 6 cached 0
    reserve a 4        -> ok
    side a             -> 0 1
    pages a            -> 2
    delta a            -> g0 reset live=0 +2 side+0 side+1
    commit a 4
    reserve a 4        -> ok
    delta a            -> g0 live=0 +3
    start b 21..28
    reserve b 4        -> no g0 want 3 free 2
    release a
    pool               -> used 0 free 6 cached 1
  )");
}

TEST(KvCacheTest, SidePagesAreCountedSeparatelyFromTokenPages) {
  KvCacheConfig config = Config({Pages(8)});
  config.groups[0].side_pages_per_sequence = 2;
  config.groups[0].side_payload_bytes = kPageBytes + 10;
  KvCacheScenario s(config);
  s.Run(R"(
    start a 1..8
    step a 3           -> ok
    start b 1..8
    step b 4           -> ok
  )");
  const PageGroupStats stats = s.cache().Stats().groups[0];
  EXPECT_EQ(stats.used_bytes, 6 * kPageBytes);
  EXPECT_EQ(stats.side_bytes, 4 * kPageBytes);
  EXPECT_EQ(stats.side_unused_bytes, 2 * (kPageBytes - 10));
  EXPECT_EQ(stats.padding_bytes, 2 * (kPageBytes - kPayloadBytes));
  EXPECT_EQ(stats.unfilled_bytes, 2 * kPayloadBytes - 7 * kPayloadBytes / 4);
}

TEST(KvCacheTest, ReleasingASequenceInAnyStateFreesAllItsPages) {
  KvCacheScenario s(Config({Pages(8), Pages(8, 5)}));
  s.Run(R"(
    start a 1..9                      # started
    release a
    start a 1..9                      # reserved
    reserve a 9        -> ok
    release a
    start a 1..9                      # sent to the executor
    reserve a 5        -> ok
    delta a
    release a
    start a 1..9                      # committed
    step a 6           -> ok
    fork a b                          # forked, not reserved
    release a
    release b
    start a 1..9
    step a 2           -> ok
    fork a b
    reserve b 3        -> ok          # forked, copy pending
    release b
    release a
    drop
    pool g0            -> used 0 free 8 cached 0
    pool g1            -> used 0 free 8 cached 0
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

TEST(KvCacheTest, APrefixWithTheSameHashButOtherTokensIsACacheMiss) {
  KvCacheScenario s(Config({Pages(8)}), std::make_unique<OneHash>());
  s.Run(R"(
    start a 1..8 salt=x
    step a 8           -> ok          # the second page collides with the first
    probe 1..9 salt=x  -> cached 4
    probe 5..9 salt=x  -> cached 0    # other tokens
    probe 1..9 salt=y  -> cached 0    # other root
    start b 21..28 salt=x
    step b 8           -> ok
    probe 21..29 salt=x -> cached 0
    start c 1..4 1..4 9 salt=x -> cached 4  # same tokens, other parent
  )");
  EXPECT_EQ(s.cache().Stats().pages_published, 1);
  EXPECT_EQ(s.cache().Stats().pages_unpublished, 3);
}

TEST(KvCacheTest, ASequenceWhoseStartIsRefusedIsNotCountedAsACacheQuery) {
  KvCacheScenario s(Config({Pages(4)}));
  s.Run(R"(
    start a 1..9
    step a 9           -> ok
    start b 1..13      -> cached 8
    reserve b 5        -> no g0 want 2 free 1
    release b
    start b 1..13      -> cached 8
    reserve b 5        -> no g0 want 2 free 1
    release b
  )");
  EXPECT_EQ(s.cache().Stats().query_tokens, 9);
  EXPECT_EQ(s.cache().Stats().hit_tokens, 0);
  s.Run(R"(
    release a
    start b 1..13      -> cached 8
    step b 5           -> ok
  )");
  EXPECT_EQ(s.cache().Stats().query_tokens, 9 + 13);
  EXPECT_EQ(s.cache().Stats().hit_tokens, 8);
}

TEST(KvCacheTest, TheStatisticsCountUsedPaddedAndUnfilledBytes) {
  KvCacheScenario s(Config({Pages(8), Pages(8, 5)}));
  s.Run(R"(
    start a 1..10
    step a 10          -> ok
    start b 1..10      -> cached 8
    step b 1           -> ok
  )");
  const KvCacheStats stats = s.cache().Stats();
  EXPECT_EQ(stats.sequences, 2);
  EXPECT_EQ(stats.logical_tokens, 19);
  EXPECT_EQ(stats.query_tokens, 20);
  EXPECT_EQ(stats.hit_tokens, 8);
  const PageGroupStats& all = stats.groups[0];
  // two shared pages, and one further page of each sequence
  EXPECT_EQ(all.used_pages, 4);
  EXPECT_EQ(all.held_slots, 16);
  EXPECT_EQ(all.filled_slots, 8 + 2 + 1);
  EXPECT_EQ(all.physical_tokens, 19);
  EXPECT_EQ(all.pool_bytes, 8 * kPageBytes);
  EXPECT_EQ(all.used_bytes, 4 * kPageBytes);
  EXPECT_EQ(all.padding_bytes, 4 * (kPageBytes - kPayloadBytes));
  EXPECT_EQ(all.unfilled_bytes, 4 * kPayloadBytes - 11 * kPayloadBytes / 4);
  const PageGroupStats& windowed = stats.groups[1];
  // Page 1 is shared, and each sequence has one page of its own.
  EXPECT_EQ(windowed.used_pages, 3);
  EXPECT_EQ(windowed.cached_pages, 1);
  EXPECT_EQ(windowed.physical_tokens, 6 + 5);
}

TEST(KvCacheTest, TheCachesMetadataTakesUnderTwoPercentOfThePoolOfATinyModel) {
  // A bf16 model with 6 layers and 8 heads of 32 dimensions, and the default
  // page size. The 512 pages hold different tokens, so each is a node of the
  // index, directly below one of 32 roots (one for each salt).
  KvCacheConfig config;
  config.page_tokens = 64;
  config.groups.push_back({.num_pages = 512,
                           .page_bytes = 64 * 6 * 8 * 32 * 2 * 2,
                           .payload_bytes = 64 * 6 * 8 * 32 * 2 * 2});
  KvCache cache(config);
  for (int32_t i = 0; i < 512; ++i) {
    std::vector<int32_t> tokens(64, i);
    const SequenceId id(i);
    cache.StartSequence(id, tokens, {.salt = std::to_string(i % 32)});
    ASSERT_TRUE(cache.Reserve(id, 64));
    cache.Commit(id, tokens);
  }
  const KvCacheStats stats = cache.Stats();
  EXPECT_EQ(stats.pages_published, 512);
  // the index stores at least the token ids
  EXPECT_GT(stats.metadata_bytes, 512 * 64 * 4);
  EXPECT_LT(stats.metadata_bytes * 50, stats.groups[0].pool_bytes);
}

// The number of table entries that a step changes must depend only on its own
// tokens, and not on the length of the context.
TEST(KvCacheTest, AStepOf256LongSequencesSendsOnlyTheChangedBlockTableEntries) {
  constexpr int64_t kSequences = 256;
  constexpr int64_t kContext = 4096;
  KvCacheConfig config;
  config.page_tokens = 64;
  config.groups.push_back(
      {.num_pages = kSequences * (kContext / 64 + 1), .page_bytes = 1});
  KvCache cache(config);
  std::vector<int32_t> tokens(kContext);
  for (int64_t i = 0; i < kSequences; ++i) {
    std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(i));
    const SequenceId id(i);
    // The sequences have different lengths, so they reach the end of a page at
    // different steps.
    const int64_t length = kContext - i % 64;
    cache.StartSequence(id, tokens, {});
    ASSERT_TRUE(cache.Reserve(id, length));
    cache.Commit(id, absl::MakeConstSpan(tokens).subspan(
                         0, static_cast<size_t>(length)));
    kvasir::v1::SequenceStep step;
    cache.TakeDeltas(id, &step);
  }
  const KvCacheStats before = cache.Stats();
  kvasir::v1::SequenceStep steps;
  for (int64_t i = 0; i < kSequences; ++i) {
    const SequenceId id(i);
    ASSERT_TRUE(cache.Reserve(id, 1));
    cache.TakeDeltas(id, &steps);
    EXPECT_EQ(steps.physical_starts(static_cast<int>(i)),
              static_cast<uint64_t>(kContext - i % 64));
    cache.Commit(id, {7});
  }
  const KvCacheStats after = cache.Stats();
  // Four of the 256 sequences begin a new page, and four others fill one, which
  // is then hashed.
  EXPECT_EQ(steps.block_tables_size(), 4);
  EXPECT_EQ(after.pages_allocated - before.pages_allocated, 4);
  EXPECT_EQ(after.table_entries_sent - before.table_entries_sent, 4);
  EXPECT_EQ(after.page_hashes - before.page_hashes, 4);
  EXPECT_EQ(after.pages_evicted, before.pages_evicted);
}

TEST(KvCacheDeathTest, CommittingMoreTokensThanReservedAborts) {
  KvCache cache(Config({Pages(4)}));
  cache.StartSequence(SequenceId(1), {1, 2, 3}, {});
  ASSERT_TRUE(cache.Reserve(SequenceId(1), 2));
  EXPECT_DEATH(cache.Commit(SequenceId(1), {1, 2, 3}), "reserved_tokens");
  EXPECT_DEATH(cache.StartSequence(SequenceId(1), {1}, {}), "is_new");
  EXPECT_DEATH(cache.Release(SequenceId(2)), "check failed");
}

}  // namespace
}  // namespace kvasir::cache
