// Tests sequences that move to the host pool and back. The scenarios check
// exact page ids.
#include <string>
#include <utility>

#include "base/status_matchers.h"
#include "cache/kv_cache.h"
#include "cache/testing/kv_cache_scenario.h"
#include "gmock/gmock.h"

namespace kvasir::cache {
namespace {

using ::testing::HasSubstr;

KvCacheConfig Config(std::vector<KvCacheConfig::Group> groups) {
  KvCacheConfig config;
  config.page_tokens = 4;
  config.groups = std::move(groups);
  for (KvCacheConfig::Group& group : config.groups) group.page_bytes = 100;
  return config;
}

TEST(KvCacheImagesTest, AnImportedSequenceGetsNewPageIds) {
  KvCacheScenario test(Config({{.num_pages = 6, .num_host_pages = 4}}));
  test.Run(R"(
    start a 1..10 nopublish -> cached 0
    step a 10      -> ok
    pages a        -> 0 1 2
    copies         ->
    export a       -> ok
    pool           -> used 0 free 6 cached 0
    host           -> used 3 free 1
    copies         -> g0 0>h0; g0 1>h1; g0 2>h2
    start b 20..25 nopublish -> cached 0
    step b 6       -> ok
    pages b        -> 0 1
    import a nopublish -> ok
    copies         -> g0 h0>2; g0 h1>3; g0 h2>4
    host           -> used 0 free 4
    lengths a      -> logical 10 physical 10
    append a 11..13
    reserve a 3    -> ok
    delta a        -> g0 reset live=0 +2 +3 +4 +5
    commit a 3
    release a
    release b
    pool           -> used 0 free 6 cached 0
  )");
  const KvCacheStats stats = test.cache().Stats();
  EXPECT_EQ(stats.preemptions, 1);
  EXPECT_EQ(stats.exports, 1);
  EXPECT_EQ(stats.imports, 1);
  EXPECT_EQ(stats.bytes_exported, 300);
  EXPECT_EQ(stats.bytes_imported, 300);
  EXPECT_EQ(stats.pages_copied, 0);
}

TEST(KvCacheImagesTest, AFullHostPoolRefusesAnExportAndChangesNothing) {
  KvCacheScenario test(Config({{.num_pages = 8, .num_host_pages = 3}}));
  test.Run(R"(
    start a 1..8 nopublish
    step a 8       -> ok
    start b 1..8 nopublish
    step b 8       -> ok
    export a       -> ok
    export b       -> no
    pages b        -> 2 3
    host           -> used 2 free 1
    forget a
    export b       -> ok
    copies         -> g0 0>h0; g0 1>h1; g0 2>h1; g0 3>h0
    import b       -> ok
    release b
  )");
}

TEST(KvCacheImagesTest, WithoutAHostPoolAnExportIsRefused) {
  KvCacheScenario test(Config({{.num_pages = 4}}));
  test.Run(R"(
    start a 1..8
    step a 8       -> ok
    export a       -> no
    release a
  )");
}

TEST(KvCacheImagesTest, AnImportWithoutEnoughFreePagesChangesNothing) {
  KvCacheScenario test(Config({{.num_pages = 3, .num_host_pages = 3}}));
  test.Run(R"(
    start a 1..8 nopublish
    step a 8       -> ok
    export a       -> ok
    start b 1..5 nopublish
    step b 5       -> ok
    import a       -> no g0 want 2 free 1
    host           -> used 2 free 1
    release b
    import a       -> ok
    release a
  )");
}

// Copies within the device pool and copies between the pools share one list,
// because a page may be read, written and read again.
TEST(KvCacheImagesTest, ListsThePageCopiesInTheOrderInWhichTheyMustRun) {
  KvCacheScenario test(Config(
      {{.num_pages = 8, .side_pages_per_sequence = 1, .num_host_pages = 8}}));
  test.Run(R"(
    start a 1..6 nopublish
    step a 6       -> ok
    side a         -> 0
    pages a        -> 1 2
    fork a b                     # shares page 2 of a, and copies the side page
    export b       -> ok
    copies         -> g0 0>3; g0 1>h0; g0 2>h1; g0 3>h2
    fork a c
    side c         -> 3
    export c       -> ok
    import b nopublish -> ok
    copies         -> g0 0>3; g0 1>h3; g0 2>h4; g0 3>h5; g0 h0>3; g0 h1>4; g0 h2>5
    side b         -> 5
    pages b        -> 3 4
    release a
    release b
    forget c
  )");
}

TEST(KvCacheImagesTest, ExportsOnlyThePagesInsideTheSlidingWindow) {
  KvCacheScenario test(
      Config({{.num_pages = 8, .num_host_pages = 8},
              {.num_pages = 8, .sliding_window = 5, .num_host_pages = 8}}));
  test.Run(R"(
    start a 1..14
    step a 14      -> ok
    lengths a g1   -> logical 14 physical 6
    export a       -> ok
    host g1        -> used 2 free 6
    copies         -> g0 0>h0; g0 1>h1; g0 2>h2; g0 3>h3; g1 2>h0; g1 3>h1
    drop
    import a       -> ok
    lengths a g1   -> logical 14 physical 6
    copies         -> g0 h0>0; g0 h1>1; g0 h2>2; g0 h3>3; g1 h0>2; g1 h1>1
    append a 15..17
    reserve a 3    -> ok
    delta a        -> g0 reset live=0 +0 +1 +2 +3 +4; g1 reset live=2 +-1 +-1 +2 +1 +0
    commit a 3
    probe 1..17    -> cached 16
    release a
  )");
}

TEST(KvCacheImagesTest, AnImportedSequenceIsFoundByItsPrefix) {
  KvCacheScenario test(Config({{.num_pages = 5, .num_host_pages = 4}}));
  test.Run(R"(
    start a 1..9
    step a 9       -> ok
    export a       -> ok
    probe 1..9     -> cached 8      # its pages are still cached
    drop
    probe 1..9     -> cached 0
    import a       -> ok
    probe 1..9     -> cached 8
    release a
    pool           -> used 0 free 5 cached 2
  )");
}

// Pages that the sequence shares with others are exported too, because the
// others may release them in the meantime. If the pages still exist at the
// import, the sequence shares them again.
TEST(KvCacheImagesTest, ASequenceSharesPagesWithOthersAgainAfterItsImport) {
  KvCacheScenario test(Config({{.num_pages = 8, .num_host_pages = 8}}));
  test.Run(R"(
    start a 1..9
    step a 9       -> ok
    start b 1..10  -> cached 8
    step b 2       -> ok
  )");
  EXPECT_EQ(test.cache().SharedTokens(SequenceId(1)), 8);
  test.Run(R"(
    export b       -> ok
    copies         -> g0 0>h0; g0 1>h1; g0 3>h2
    pages a        -> 0 1 2
    import b       -> ok
    copies         -> g0 h2>3
    pages b        -> 0 1 3
    export b       -> ok
    release a
    drop
    import b       -> ok
    copies         -> g0 0>h2; g0 1>h1; g0 3>h0; g0 h2>0; g0 h1>1; g0 h0>2
    release b
  )");
}

TEST(KvCacheImagesTest, AnImportSharesCachedPagesBeforeItAllocatesOthers) {
  KvCacheScenario test(Config({{.num_pages = 4, .num_host_pages = 4}}));
  test.Run(R"(
    start a 1..14
    step a 14      -> ok
    append a 15..17
    export a       -> ok
    pool           -> used 0 free 4 cached 3
    start b 30..32 nopublish
    step b 3       -> ok
    import a       -> no g0 want 1 free 0
    release b
    import a       -> ok
    copies         -> g0 0>h0; g0 1>h1; g0 2>h2; g0 3>h3; g0 h3>3
    release a
  )");
}

TEST(KvCacheImagesTest, AnImportIsRefusedWithoutRoomForOneMoreToken) {
  KvCacheScenario test(Config({{.num_pages = 3, .num_host_pages = 3}}));
  test.Run(R"(
    start a 1..8 nopublish
    step a 8       -> ok
    append a 9
    export a       -> ok
    start b 1..2 nopublish
    step b 2       -> ok
    import a       -> no g0 want 3 free 2
    release b
    import a       -> ok
    step a 1       -> ok
    release a
  )");
}

TEST(KvCacheImagesTest, ASequenceThatHasNotRunHasAnEmptyImage) {
  KvCacheScenario test(Config(
      {{.num_pages = 8, .side_pages_per_sequence = 2, .num_host_pages = 1}}));
  test.Run(R"(
    start a 1..9
    reserve a 9    -> ok
    export a       -> ok
    host           -> used 0 free 1
    import a       -> ok
    step a 9       -> ok
    release a
  )");
}

// Page copies that the next step will do may read or overwrite the host pages
// that the image would get.
TEST(KvCacheImagesTest,
     RefusesToReserveHostPagesForAnImageWhileCopiesArePending) {
  KvCacheScenario test(Config({{.num_pages = 8, .num_host_pages = 4}}));
  const ImageShape shape = {.logical_tokens = 8, .groups = {{8, 0, 2, 0}}};
  const auto refuses = [&] {
    return test.cache().TakeImagePages(shape, {}).status().code() ==
           absl::StatusCode::kFailedPrecondition;
  };
  test.Run("start a 1..8 nopublish\nstep a 8 -> ok\nexport a -> ok\nforget a");
  EXPECT_TRUE(refuses());
  test.Run("copies -> g0 0>h0; g0 1>h1");
  EXPECT_FALSE(refuses());
  test.Run("start b 1..8 nopublish\nstep b 8 -> ok\nexport b -> ok");
  test.Run("copies -> g0 0>h0; g0 1>h1\nimport b -> ok");
  EXPECT_TRUE(refuses());
  test.Run("release b");
}

TEST(KvCacheImagesTest, ReservesHostPagesForAnImageFromAnotherProcess) {
  KvCache cache(Config(
      {{.num_pages = 8, .side_pages_per_sequence = 1, .num_host_pages = 5},
       {.num_pages = 8, .sliding_window = 5, .num_host_pages = 4}}));
  const ImageShape shape = {.logical_tokens = 14,
                            .groups = {{14, 0, 4, 1}, {6, 2, 2, 0}}};
  KVASIR_ASSERT_OK_AND_ASSIGN(SequenceImage image,
                              cache.TakeImagePages(shape, {}));
  EXPECT_EQ(cache.ImageBytes(shape), 700);
  EXPECT_THAT(cache.TakeImagePages(shape, {}),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("700 bytes")));
  const std::vector<int32_t> ids(14, 3);
  EXPECT_TRUE(cache.Import(SequenceId(7), &image, ids, {}));
  EXPECT_EQ(cache.ShapeOf(SequenceId(7)), shape);
  KVASIR_EXPECT_OK(cache.CheckInvariants());

  const auto refused = [&](ImageShape inconsistent, const std::string& why) {
    EXPECT_THAT(
        cache.TakeImagePages(inconsistent, {}),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  ImageShape inconsistent = shape;
  inconsistent.groups.pop_back();
  refused(inconsistent, "page groups is 1, but this cache has 2");
  inconsistent = shape;
  inconsistent.logical_tokens = -1;
  refused(inconsistent, "tokens is -1");
  inconsistent = shape;
  inconsistent.logical_tokens = 15;
  refused(inconsistent, "page group 0 does not fit a sequence of 15 tokens");
  inconsistent = shape;
  inconsistent.groups[1].first_page = 0;
  refused(inconsistent, "page group 1");
  inconsistent = shape;
  inconsistent.groups[0].num_side_pages = 0;
  refused(inconsistent,
          "0 side pages (want 1) and an eviction budget of 0 slots (want 0)");
  inconsistent = shape;
  inconsistent.groups[1].kept_slots = 3;
  refused(inconsistent, "an eviction budget of 3 slots");
  inconsistent = shape;
  inconsistent.prompt_tokens = 9;
  refused(
      inconsistent,
      "planned for a prompt of 9 tokens, but those of this sequence are for 0");
}

// If a sequence evicts, its prompt's length and its budget determine how many
// slots it holds. An image with another number of slots is refused.
TEST(KvCacheImagesTest,
     AnImageOfAnEvictingSequenceMustMatchItsPromptAndBudget) {
  KvCacheConfig config =
      Config({{.num_pages = 8,
               .eviction = {.budget_tokens = 6, .every_tokens = 4},
               .num_host_pages = 8}});
  config.prefix_reuse = false;
  KvCache cache(config);
  const StartOptions options = {.publish_prefix = false, .prompt_tokens = 10};
  // The eviction at 8 tokens left 6 slots, and two tokens were added after it.
  // The eviction at the prompt's end (10 tokens) is still due.
  const ImageShape due = {
      .logical_tokens = 10, .prompt_tokens = 10, .groups = {{8, 0, 2, 0, 6}}};
  ImageShape done = due;
  done.groups[0].physical_tokens = 6;
  const std::vector<int32_t> ids(12, 3);
  for (const ImageShape& shape : {due, done}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(SequenceImage image,
                                cache.TakeImagePages(shape, options));
    EXPECT_TRUE(cache.Import(SequenceId(1), &image, ids, options));
    EXPECT_EQ(cache.ShapeOf(SequenceId(1)), shape);
    EXPECT_EQ(cache.eviction_due(SequenceId(1)), shape == due);
    KVASIR_EXPECT_OK(cache.CheckInvariants());
    cache.Release(SequenceId(1));
    google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy> copies;
    cache.TakePageCopies(&copies);  // as if the next step had run
  }
  const auto refused = [&](ImageShape shape, const StartOptions& start,
                           const std::string& why) {
    EXPECT_THAT(
        cache.TakeImagePages(shape, start),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  ImageShape inconsistent = due;
  inconsistent.groups[0].physical_tokens = 7;
  refused(inconsistent, options, "it has 7 slots (want ");
  inconsistent = due;
  inconsistent.groups[0].kept_slots = 5;
  refused(inconsistent, options, "an eviction budget of 5 slots (want 6)");
  inconsistent = due;
  inconsistent.prompt_tokens = 9;
  refused(inconsistent, options,
          "a prompt of 9 tokens, but those of this sequence are for 10");
  const std::vector<plan::EvictionCounts> none(1);
  StartOptions whole = options;
  whole.evictions = none;
  refused(due, whole, "slots (want 10), ");
}

}  // namespace
}  // namespace kvasir::cache
