// Tests KvCache with page groups that evict slots. The scenarios use pages of 4
// slots and check exact page ids.
#include "base/status_matchers.h"
#include "cache/testing/kv_cache_scenario.h"

namespace kvasir::cache {
namespace {

// An eviction happens at each multiple of 4 tokens above 6, and at the prompt's
// end. It leaves 6 slots.
constexpr plan::EvictionCounts kSix = {.budget_tokens = 6, .every_tokens = 4};

KvCacheConfig Config(std::vector<KvCacheConfig::Group> groups) {
  KvCacheConfig config;
  config.page_tokens = 4;
  config.groups = std::move(groups);
  config.prefix_reuse = false;
  return config;
}

TEST(KvCacheEvictionTest, ASequenceHoldsOnlyTheKeptSlotsAfterAnEviction) {
  KvCacheScenario scenario(Config({{.num_pages = 8, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..10        -> cached 0
    next A               -> 8
    step A 8             -> ok
    delta A              -> g0 reset live=0 +0 +1
    due A                -> yes
    evict A
    evictions            -> g0 A@8 8>6 in 0 1
    due A                -> no
    lengths A            -> logical 8 physical 6
    next A               -> 10           # the prompt's end
    step A 2             -> ok           # slots 6 and 7
    delta A              ->
    evict A
    evictions            -> g0 A@10 8>6 in 0 1
    next A               -> 12
    append A 11..16
    step A 2             -> ok
    evict A
    next A               -> 16
    step A 4             -> ok           # slots 6 to 9: another page
    delta A              -> g0 live=0 +2
    pages A              -> 0 1 2
    evict A
    evictions            -> g0 A@12 8>6 in 0 1; g0 A@16 10>6 in 0 1 2
    pages A              -> 0 1
    pool                 -> used 2 free 6 cached 0
    lengths A            -> logical 16 physical 6
    delta A              ->              # the executor shrinks its table itself
    release A
    pool                 -> used 0 free 8 cached 0
  )");
  EXPECT_EQ(scenario.cache().Stats().slots_evicted, 2 + 2 + 2 + 4);
  EXPECT_EQ(scenario.cache().Stats().pages_reclaimed, 1);
}

TEST(KvCacheEvictionTest,
     WithEvictionThePoolCanComputeAPromptFourTimesItsSize) {
  KvCacheScenario scenario(Config({{.num_pages = 3, .eviction = kSix}}));
  const KvCache& cache = scenario.cache();
  EXPECT_EQ(cache.sequence_pages(PageGroupId(0)).Held(48, 48), 3);
  scenario.Run("start A 1..48");
  for (int64_t seen = 0; seen < 48;) {
    const int64_t next = *cache.next_eviction(SequenceId(0));
    EXPECT_EQ(scenario.Do(absl::StrCat("step A ", next - seen)), "ok");
    scenario.Run("evict A");
    seen = next;
  }
  scenario.Run(R"(
    lengths A            -> logical 48 physical 6
    release A
    pool                 -> used 0 free 3 cached 0
  )");
}

TEST(KvCacheEvictionTest, ASequenceMayOverrideTheEvictionBudgetOfTheCache) {
  KvCacheScenario scenario(
      Config({{.num_pages = 9, .eviction = kSix}, {.num_pages = 9}}));
  scenario.Run(R"(
    start A 1..12 keep=8 -> cached 0
    start B 1..12 keep=all -> cached 0
    next A               -> 12
    next B               -> never
    step A 12            -> ok
    step B 12            -> ok
    evict A
    evictions            -> g0 A@12 12>8 in 0 1 2
    due B                -> no
    lengths A            -> logical 12 physical 8
    lengths A g1         -> logical 12 physical 12
    lengths B            -> logical 12 physical 12
    append A 13..16
    preempt A
    start A 1..16 keep=8 prompt=12 -> cached 0
    next A               -> 12           # as before
    release A
    release B
    pool                 -> used 0 free 9 cached 0
  )");
  EXPECT_EQ(scenario.cache().Stats().evictions, 1);
}

// The pages of groups that evict also hold scores, which change with every
// query. So a fork cannot share them.
TEST(KvCacheEvictionTest, AForkCopiesAllPagesOfGroupsThatEvict) {
  KvCacheScenario scenario(
      Config({{.num_pages = 6, .eviction = kSix}, {.num_pages = 6}}));
  scenario.Run(R"(
    start A 1..8         -> cached 0
    step A 7             -> ok
    fork A B
    copies               -> g0 0>2; g0 1>3
    pages B              -> 2 3
    pages B g1           -> 0            # shared
    delta B              -> g0 reset live=0 +2 +3; g1 reset live=0 +0
    step A 1             -> ok
    evict A
    step B 1             -> ok
    evict B
    evictions            -> g0 A@8 8>6 in 0 1; g0 B@8 8>6 in 2 3 after 1
    copies               -> g1 1>2
    lengths B            -> logical 8 physical 6
    lengths B g1         -> logical 8 physical 8
    release A
    release B
    pool                 -> used 0 free 6 cached 0
    pool g1              -> used 0 free 6 cached 0
  )");
}

TEST(KvCacheEvictionTest, AForkCopiesItsPagesAfterThePendingEviction) {
  KvCacheScenario scenario(Config({{.num_pages = 6, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..8         -> cached 0
    step A 8             -> ok
    evict A
    fork A B
    evictions            -> g0 A@8 8>6 in 0 1
    copies               -> g0 0>2; g0 1>3
    due B                -> no
    lengths B            -> logical 8 physical 6
    release A
    append B 9
    step B 1             -> ok
    delta B              -> g0 reset live=0 +2 +3
  )");
}

TEST(KvCacheEvictionTest,
     AForkIsRefusedIfTheFreePagesDoNotSufficeForItsCopies) {
  KvCacheScenario scenario(Config({{.num_pages = 3, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..8         -> cached 0
    step A 5             -> ok
  )");
  EXPECT_FALSE(scenario.cache().can_fork(SequenceId(0)));
  scenario.Run("start B 1..4\nrelease A\nstep B 4 -> ok");
  EXPECT_TRUE(scenario.cache().can_fork(SequenceId(1)));
}

// Tokens that were emitted before a preemption do not belong to the prompt, so
// the eviction points after a restart are the same as before.
TEST(KvCacheEvictionTest, ARestartedSequenceHasTheSameEvictionPoints) {
  KvCacheScenario scenario(Config({{.num_pages = 8, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..12 prompt=7 -> cached 0
    next A               -> 7
    step A 7             -> ok
    evict A
    next A               -> 8
    preempt A
    start A 1..12 prompt=7 -> cached 0
    next A               -> 7
  )");
}

// Regression test: Import once required one more page, although the eviction
// that is due makes room in the last page.
TEST(KvCacheEvictionTest,
     ASequenceWithADueEvictionCanBeImportedIntoThePoolThatExportedIt) {
  KvCacheScenario test(
      Config({{.num_pages = 3,
               .eviction = {.budget_tokens = 8, .every_tokens = 4},
               .num_host_pages = 3}}));
  test.Run(R"(
    start a 1..20
    step a 12      -> ok
    due a          -> yes
    export a       -> ok
    import a       -> ok
    evict a
    append a 21
    step a 4       -> ok
    release a
  )");
}

TEST(KvCacheEvictionTest, APendingEvictionStaysInTheListIfItsSequenceEnds) {
  KvCacheScenario scenario(Config({{.num_pages = 6, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..8         -> cached 0
    step A 8             -> ok
    evict A
    fork A B
    release A
    evictions            -> g0 (gone)@8 8>6 in 0 1
    copies               -> g0 0>2; g0 1>3
  )");
}

TEST(KvCacheEvictionTest, ARefusedReservationChangesNothing) {
  KvCacheScenario scenario(Config({{.num_pages = 3, .eviction = kSix}}));
  scenario.Run(R"(
    start A 1..8         -> cached 0
    step A 8             -> ok
    start B 1..8         -> cached 0
    step B 4             -> ok
    evict A
    append A 9..12
    reserve A 4          -> no g0 want 1 free 0
    lengths A            -> logical 8 physical 6
    pages A              -> 0 1
    reserve A 2          -> ok
    release B
    step A 4             -> ok
    pool                 -> used 3 free 0 cached 0
  )");
}

TEST(KvCacheEvictionTest, AReservationThatPassesAnEvictionPointAborts) {
  KvCacheScenario scenario(Config({{.num_pages = 8, .eviction = kSix}}));
  scenario.Run("start A 1..20");
  // this reservation would end after the next eviction point
  EXPECT_DEATH(scenario.Do("reserve A 9"), "next");
  scenario.Run("step A 8 -> ok");
  EXPECT_DEATH(scenario.Do("reserve A 1"), "EvictionDue");
  KvCacheConfig published = Config({{.num_pages = 8, .eviction = kSix}});
  published.prefix_reuse = true;
  EXPECT_DEATH(KvCache cache(published), "prefix_reuse");
}

}  // namespace
}  // namespace kvasir::cache
