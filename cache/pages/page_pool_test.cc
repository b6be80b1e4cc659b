#include "cache/pages/page_pool.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

std::vector<int32_t> CachedOldestFirst(const PagePool& pool) {
  std::vector<int32_t> pages;
  for (PageId page = pool.oldest_cached(); page.valid();
       page = pool.next_cached(page)) {
    pages.push_back(page.value());
  }
  return pages;
}

TEST(PagePoolTest, OnceAllPagesHaveBeenUsedTheLastFreedPageIsAllocatedFirst) {
  PagePool pool(3);
  std::optional<PagePin> a = pool.Allocate();
  std::optional<PagePin> b = pool.Allocate();
  std::optional<PagePin> c = pool.Allocate();
  EXPECT_EQ(a->page(), PageId(0));
  EXPECT_EQ(c->page(), PageId(2));
  EXPECT_FALSE(pool.Allocate().has_value());
  a.reset();
  b.reset();
  EXPECT_EQ(pool.free_pages(), 2);
  b = pool.Allocate();
  EXPECT_EQ(b->page(), PageId(1));
  EXPECT_TRUE(pool.CountersAgree());
}

TEST(PagePoolTest, APageBecomesFreeWhenItsLastReferenceIsReleased) {
  PagePool pool(2);
  PagePin a = *pool.Allocate();
  PagePin shared = pool.Share(a.page());
  EXPECT_EQ(pool.references(PageId(0)), 2);
  EXPECT_EQ(pool.total_references(), 2);
  a.Reset();
  EXPECT_EQ(pool.used_pages(), 1);
  shared.Reset();
  shared.Reset();  // the pin is already empty, so this has no effect
  EXPECT_EQ(pool.used_pages(), 0);
  EXPECT_EQ(pool.free_pages(), 2);
}

TEST(PagePoolTest, AMovedPinStillCountsAsOneReference) {
  PagePool pool(2);
  PagePin a = *pool.Allocate();
  PagePin b = std::move(a);
  EXPECT_FALSE(static_cast<bool>(a));
  EXPECT_FALSE(a.page().valid());
  EXPECT_EQ(pool.total_references(), 1);
  PagePin c = *pool.Allocate();
  c = std::move(b);  // releases page 1, which c held
  EXPECT_EQ(c.page(), PageId(0));
  EXPECT_EQ(pool.free_pages(), 1);
  PagePin& self = c;
  c = std::move(self);
  EXPECT_EQ(c.page(), PageId(0));
  EXPECT_EQ(pool.total_references(), 1);
}

TEST(PagePoolTest, TaggedPagesAreCachedInTheOrderInWhichTheyAreReleased) {
  PagePool pool(4);
  std::vector<PagePin> pins;
  for (int i = 0; i < 3; ++i) {
    pins.push_back(*pool.Allocate());
    pool.SetTag(pins.back().page(), 10 + i);
  }
  pins[2].Reset();
  pins[0].Reset();
  pins[1].Reset();
  EXPECT_EQ(CachedOldestFirst(pool), (std::vector<int32_t>{2, 0, 1}));
  EXPECT_EQ(pool.cached_pages(), 3);
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_EQ(pool.available_pages(), 4);
  EXPECT_EQ(pool.tag(PageId(0)), 10);
  EXPECT_TRUE(pool.CountersAgree());
}

TEST(PagePoolTest, ACachedPageInTheMiddleOfTheListCanBeShared) {
  PagePool pool(3);
  std::vector<PagePin> pins;
  for (int i = 0; i < 3; ++i) {
    pins.push_back(*pool.Allocate());
    pool.SetTag(pins.back().page(), i);
  }
  pins.clear();
  const std::vector<int32_t> order = CachedOldestFirst(pool);
  PagePin middle = pool.Share(PageId(order[1]));
  EXPECT_EQ(CachedOldestFirst(pool),
            (std::vector<int32_t>{order[0], order[2]}));
  EXPECT_TRUE(pool.CountersAgree());
  middle.Reset();
  EXPECT_EQ(CachedOldestFirst(pool),
            (std::vector<int32_t>{order[0], order[2], order[1]}));
}

TEST(PagePoolTest, ClearingATagFreesACachedPageButNotAPageInUse) {
  PagePool pool(2);
  PagePin a = *pool.Allocate();
  PagePin b = *pool.Allocate();
  pool.SetTag(a.page(), 1);
  pool.SetTag(b.page(), 2);
  a.Reset();
  pool.ClearTag(PageId(0));
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_EQ(pool.cached_pages(), 0);
  pool.ClearTag(PageId(1));
  EXPECT_EQ(pool.used_pages(), 1);
  b.Reset();
  EXPECT_EQ(pool.free_pages(), 2);
}

TEST(PagePoolTest, FilledSlotsAreCountedOnlyWhileTheirPageIsInUse) {
  PagePool pool(2);
  PagePin a = *pool.Allocate();
  pool.SetFilledSlots(a.page(), 3);
  pool.SetFilledSlots(a.page(), 4);
  PagePin shared = pool.Share(a.page());
  // The page counts once, although several pins hold it.
  EXPECT_EQ(pool.total_filled_slots(), 4);
  pool.SetTag(a.page(), 0);
  a.Reset();
  shared.Reset();
  EXPECT_EQ(pool.total_filled_slots(), 0);
  shared = pool.Share(PageId(0));
  EXPECT_EQ(pool.total_filled_slots(), 4);
  EXPECT_TRUE(pool.CountersAgree());
}

TEST(PagePoolDeathTest, InvalidOperationsOnPagesAbort) {
  PagePool pool(2);
  PagePin a = *pool.Allocate();
  EXPECT_DEATH(pool.Share(PageId(1)), "tag");      // a free page holds nothing
  EXPECT_DEATH(pool.SetTag(PageId(1), 0), "tag");  // the page is free
  EXPECT_DEATH(pool.ClearTag(a.page()), "tag");    // the page has no tag
  // the page is outside the pool
  EXPECT_DEATH(pool.Share(PageId(2)), "num_pages");
  EXPECT_DEATH(PagePool(-1), "num_pages");
}

}  // namespace
}  // namespace kvasir::cache
