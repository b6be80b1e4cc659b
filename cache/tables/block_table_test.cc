#include "cache/tables/block_table.h"

#include <utility>

#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

using Deltas = google::protobuf::RepeatedPtrField<kvasir::v1::BlockTableDelta>;

constexpr PageGroupId kGroup(1);

class BlockTableTest : public ::testing::Test {
 protected:
  void Append(int64_t count) {
    for (; count > 0; --count) table_.Append(*pool_.Allocate());
  }
  kvasir::v1::BlockTableDelta Delta() {
    Deltas deltas;
    table_.TakeDelta(kGroup, &deltas);
    return deltas.empty() ? kvasir::v1::BlockTableDelta() : deltas.Get(0);
  }

  PagePool pool_{8};
  BlockTable table_{4};
};

TEST_F(BlockTableTest, PagesAreMissingOnlyForTokensBeyondTheFreeSlots) {
  EXPECT_EQ(table_.MissingEntries(0), 0);
  EXPECT_EQ(table_.MissingEntries(1), 1);
  EXPECT_EQ(table_.MissingEntries(9), 3);
  Append(2);
  table_.Advance(5);
  EXPECT_EQ(table_.MissingEntries(3), 0);
  EXPECT_EQ(table_.MissingEntries(4), 1);
}

TEST_F(BlockTableTest, ReleasingPagesAtTheFrontDoesNotChangeTheLogicalLength) {
  Append(3);
  table_.Advance(10);
  EXPECT_EQ(table_.ReleaseFront(2), 2);
  EXPECT_EQ(table_.logical_tokens(), 10);
  EXPECT_EQ(table_.physical_tokens(), 2);
  EXPECT_EQ(table_.num_entries(), 3);
  EXPECT_EQ(table_.num_live(), 1);
  EXPECT_FALSE(table_.page(1).valid());
  EXPECT_EQ(pool_.used_pages(), 1);
  EXPECT_EQ(table_.ReleaseFront(1), 0);  // the entry was already given up
  Append(1);
  table_.Advance(3);
  EXPECT_EQ(table_.first_live(), 2);
  EXPECT_EQ(table_.physical_tokens(), 5);
}

TEST_F(BlockTableTest, DeltasAfterTheFirstOneContainOnlyChanges) {
  Append(2);
  kvasir::v1::BlockTableDelta delta = Delta();
  EXPECT_TRUE(delta.reset());
  EXPECT_EQ(delta.page_group(), 1u);
  EXPECT_EQ(delta.appended_pages_size(), 2);
  Deltas none;
  EXPECT_EQ(table_.TakeDelta(kGroup, &none), 0);
  EXPECT_TRUE(none.empty());
  table_.Advance(8);
  Append(1);
  delta = Delta();
  EXPECT_FALSE(delta.reset());
  ASSERT_EQ(delta.appended_pages_size(), 1);
  EXPECT_EQ(delta.appended_pages(0), 2);
  table_.ReleaseFront(1);
  delta = Delta();
  EXPECT_EQ(delta.first_live_index(), 1u);
  EXPECT_EQ(delta.appended_pages_size(), 0);
}

TEST_F(BlockTableTest, TheFirstDeltaOfAnEmptyTableIsAReset) {
  EXPECT_TRUE(Delta().reset());
  EXPECT_FALSE(Delta().reset());
}

// After an eviction of slots, the table grows from its physical length, while
// the logical length continues to count all tokens.
TEST_F(BlockTableTest, ATableGrowsFromItsPhysicalLengthAfterACompaction) {
  Append(3);
  table_.Advance(10);
  Delta();
  EXPECT_EQ(table_.Compact(5), 1);
  EXPECT_EQ(table_.logical_tokens(), 10);
  EXPECT_EQ(table_.physical_tokens(), 5);
  EXPECT_EQ(table_.num_entries(), 2);
  EXPECT_EQ(table_.MissingEntries(3), 0);
  EXPECT_EQ(table_.MissingEntries(4), 1);
  Append(1);
  table_.Advance(4);
  EXPECT_EQ(table_.logical_tokens(), 14);
  EXPECT_EQ(table_.next_slot(), 9);
  // The delta contains only the new page, because the executor has dropped the
  // evicted entry itself.
  const kvasir::v1::BlockTableDelta delta = Delta();
  EXPECT_FALSE(delta.reset());
  EXPECT_EQ(delta.appended_pages_size(), 1);
  EXPECT_EQ(table_.Compact(8), 1);
  EXPECT_EQ(table_.Compact(8), 0);
}

TEST_F(BlockTableTest, ReleasesPagesFromTheLastToTheFirst) {
  Append(3);
  for (int32_t p = 0; p < 3; ++p) pool_.SetTag(PageId(p), p);
  table_.Clear();
  EXPECT_EQ(pool_.oldest_cached(), PageId(2));
  EXPECT_EQ(pool_.next_cached(PageId(2)), PageId(1));
}

TEST_F(BlockTableTest, CachedTokensOutsideTheSlidingWindowHaveNoPages) {
  table_.AppendReleased(2);
  Append(1);
  table_.SetFound(12);
  EXPECT_EQ(table_.logical_tokens(), 12);
  EXPECT_EQ(table_.physical_tokens(), 4);
  const kvasir::v1::BlockTableDelta delta = Delta();
  EXPECT_EQ(delta.first_live_index(), 2u);
  ASSERT_EQ(delta.appended_pages_size(), 3);
  EXPECT_EQ(delta.appended_pages(0), -1);
  EXPECT_EQ(delta.appended_pages(2), 0);
}

TEST_F(BlockTableTest, InvalidChangesOfABlockTableAbort) {
  Append(1);
  EXPECT_DEATH(table_.Advance(5), "MissingEntries");
  // the slots of this page are not written yet
  EXPECT_DEATH(table_.ReleaseFront(1), "first_live");
  EXPECT_DEATH(table_.AppendReleased(1), "empty");
}

}  // namespace
}  // namespace kvasir::cache
