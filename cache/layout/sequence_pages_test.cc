#include "cache/layout/sequence_pages.h"

#include <tuple>

#include "cache/kv_cache.h"
#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

constexpr PageGroupId kGroup(0);

// How many pages a sequence holds, computed by a layout and by a cache with the
// same layout.
struct BothAnswers {
  int64_t layout = 0;
  int64_t cache = 0;
};

BothAnswers Held(const PageGroupLayout& group, int64_t length, int64_t chunk) {
  KvCacheConfig config;
  config.page_tokens = 16;
  config.prefix_reuse = !group.eviction.evicts();
  config.groups.push_back(
      {.num_pages = 1,
       .sliding_window = group.sliding_window,
       .side_pages_per_sequence = group.side_pages_per_sequence,
       .eviction = group.eviction});
  const KvCache cache(config);
  return {group.sequence_pages(16).Held(length, chunk),
          cache.sequence_pages(kGroup).Held(length, chunk)};
}

TEST(SequencePagesTest,
     ASlidingWindowLimitsTheNumberOfPagesThatASequenceHolds) {
  // With a window of 5, the query at position n attends to n-4 .. n.
  EXPECT_EQ(FirstVisibleToken(5, 4), 0);
  EXPECT_EQ(FirstVisibleToken(5, 5), 1);
  EXPECT_EQ(FirstVisibleToken(0, 100), 0);
  const SequencePages all = {.page_tokens = 4};
  EXPECT_EQ(all.Held(17, 1), 5);
  // The 5 tokens of a window lie in at most 2 pages of 4 slots. With chunks of
  // 4, the 8 tokens of window and chunk lie in at most 3 pages.
  const SequencePages windowed = {.page_tokens = 4, .sliding_window = 5};
  EXPECT_EQ(windowed.Held(17, 1), 2);
  EXPECT_EQ(windowed.Held(17, 4), 3);
  EXPECT_EQ(windowed.Held(3, 4), 1);
}

TEST(SequencePagesTest, SidePagesAreCountedEvenForASequenceWithoutTokens) {
  const SequencePages pages = {.page_tokens = 4, .side_pages = 3};
  EXPECT_EQ(pages.Held(0, 1), 3);
  EXPECT_EQ(pages.Held(1, 1), 4);
  EXPECT_EQ(pages.Held(17, 4), 8);
}

// Regression test: for 2^20 tokens in chunks of 64, the cache once counted
// 65,536 pages and the layout 13, but 9 is right.
TEST(SequencePagesTest, LayoutAndCacheCountTheSameNumberOfPagesWithEviction) {
  PageGroupLayout evicting;
  evicting.eviction = {.budget_tokens = 128, .every_tokens = 16};
  for (const auto& [length, chunk, want] :
       {std::tuple{100, 64, 7}, std::tuple{144, 64, 9},
        std::tuple{1 << 20, 64, 9}, std::tuple{1 << 20, 1, 9}}) {
    const BothAnswers have = Held(evicting, length, chunk);
    EXPECT_EQ(have.layout, want) << length << " " << chunk;
    EXPECT_EQ(have.cache, want) << length << " " << chunk;
  }
}

TEST(SequencePagesTest,
     WithABudgetThatIsAShareOfThePromptAllTokensCountAsThePrompt) {
  const SequencePages pages = {
      .page_tokens = 16,
      .eviction = {
          .budget_ratio = 0.25, .least_tokens = 36, .every_tokens = 32}};
  EXPECT_EQ(pages.Held(64, 64), 4);
  // 36 slots stay, and up to 32 more are added until the next eviction
  EXPECT_EQ(pages.Held(128, 64), 5);
  // 1024 slots stay, and up to 32 more are added until the next eviction
  EXPECT_EQ(pages.Held(4096, 64), 66);
}

TEST(SequencePagesTest,
     LayoutAndCacheCountTheSameNumberOfPagesWithWindowsAndSidePages) {
  PageGroupLayout windowed;
  windowed.sliding_window = 33;
  windowed.side_pages_per_sequence = 2;
  const BothAnswers have = Held(windowed, 128, 1);
  EXPECT_EQ(have.layout, 2 + 3);
  EXPECT_EQ(have.cache, 2 + 3);
}

// Regression test: the scheduler once subtracted all pages of a found prefix,
// including those outside the window. After 40 found tokens, it believed that
// no page was missing.
TEST(SequencePagesTest,
     CachedPagesOutsideTheWindowDoNotReduceTheNumberOfMissingPages) {
  const SequencePages windowed = {.page_tokens = 4, .sliding_window = 5};
  EXPECT_EQ(windowed.Held(45, 8), 4);
  // The query at position 40 attends to tokens from 36 on, so only page 9 of
  // the found pages 0 .. 9 is held.
  EXPECT_EQ(windowed.Missing(45, 8, 40), 3);
  EXPECT_EQ(windowed.Missing(45, 8, 0), 4);
  const SequencePages all = {.page_tokens = 4, .side_pages = 1};
  EXPECT_EQ(all.Missing(45, 8, 40), 1 + 12 - 10);
  EXPECT_EQ(all.Missing(8, 8, 40), 0);
}

}  // namespace
}  // namespace kvasir::cache
