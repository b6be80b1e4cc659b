#include "router/policy/prefix_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvasir::router {
namespace {

using Pages = std::vector<uint64_t>;

// The keys of `count` pages that follow each other.
Pages Chain(uint64_t name, size_t count) {
  Pages pages;
  for (size_t i = 0; i < count; ++i) pages.push_back(MixBits(name, i));
  return pages;
}

// `first` followed by `count` pages.
Pages Then(Pages first, uint64_t name, size_t count) {
  const uint64_t parent = first.empty() ? 0 : first.back();
  for (const uint64_t page : Chain(MixBits(parent, name), count)) {
    first.push_back(page);
  }
  return first;
}

SlotSet SetOf(const std::vector<size_t>& slots, size_t blocks = 1) {
  SlotSet set(blocks);
  for (const size_t slot : slots) set[slot / 64] |= uint64_t{1} << (slot % 64);
  return set;
}

SlotSet FirstSlots(size_t count) {
  SlotSet set((count + 63) / 64);
  for (size_t i = 0; i < count; ++i) set[i / 64] |= uint64_t{1} << (i % 64);
  return set;
}

TEST(PrefixMapTest, FindsNothingInAnEmptyMapOrWithoutPages) {
  PrefixMap map(1 << 16, 1);
  EXPECT_EQ(map.LongestHit(Chain(1, 5), FirstSlots(64)).pages, 0u);
  map.Add(3, {});
  map.Add(3, Chain(1, 5));
  EXPECT_EQ(map.LongestHit({}, FirstSlots(64)).pages, 0u);
  EXPECT_EQ(map.LongestHit(Chain(1, 5), SetOf({})).pages, 0u);
}

TEST(PrefixMapTest, FindsTheSlotsThatHaveTheLongestPrefix) {
  PrefixMap map(1 << 20, 2);
  const Pages shared = Chain(1, 10);
  map.Add(1, shared);
  map.Add(2, Then(shared, 2, 3));
  map.Add(70, Then(shared, 2, 3));
  map.Add(3, Then(shared, 3, 9));
  const PrefixMap::Hit hit =
      map.LongestHit(Then(shared, 2, 8), FirstSlots(128));
  EXPECT_EQ(hit.pages, 13u);
  EXPECT_EQ(hit.holders, SetOf({2, 70}, 2));
}

TEST(PrefixMapTest, LooksOnlyAmongTheGivenSlots) {
  PrefixMap map(1 << 20, 3);
  const Pages shared = Chain(1, 4);
  map.Add(1, shared);
  map.Add(2, Then(shared, 2, 3));
  const PrefixMap::Hit hit = map.LongestHit(Then(shared, 2, 3), SetOf({0, 1}));
  EXPECT_EQ(hit.pages, 4u);
  EXPECT_EQ(hit.holders, SetOf({1}));
}

TEST(PrefixMapTest, FindsEveryLengthOfAPrefix) {
  for (size_t have = 0; have <= 40; ++have) {
    PrefixMap map(1 << 20, have);
    const Pages pages = Chain(9, 40);
    map.Add(7, absl::MakeConstSpan(pages).first(have));
    EXPECT_EQ(map.LongestHit(pages, FirstSlots(8)).pages, have);
  }
}

TEST(PrefixMapTest, AgreesWithAnExactModelWhileNothingIsForgotten) {
  std::mt19937 random(4);
  PrefixMap map(1 << 22, 5);
  std::vector<std::vector<Pages>> sent(200);
  for (int step = 0; step < 2000; ++step) {
    const uint64_t family = random() % 20;
    const Pages pages = Then(Chain(family, random() % 6),
                             100 + family * 4 + random() % 4, random() % 9);
    SlotSet among(4);
    for (uint64_t& word : among) word = random() & random();
    size_t longest = 0;
    SlotSet holders(4);
    for (size_t slot = 0; slot < sent.size(); ++slot) {
      if ((among[slot / 64] >> (slot % 64) & 1) == 0) continue;
      for (const Pages& other : sent[slot]) {
        size_t common = 0;
        while (common < std::min(other.size(), pages.size()) &&
               other[common] == pages[common]) {
          ++common;
        }
        if (common == 0 || common < longest) continue;
        if (common > longest) holders.assign(4, 0);
        longest = common;
        holders[slot / 64] |= uint64_t{1} << (slot % 64);
      }
    }
    const PrefixMap::Hit hit = map.LongestHit(pages, among);
    ASSERT_EQ(hit.pages, longest);
    if (longest > 0) {
      ASSERT_EQ(hit.holders, holders);
    }
    const size_t slot = random() % sent.size();
    map.Add(slot, pages);
    sent[slot].push_back(pages);
  }
}

TEST(PrefixMapTest, KeepsItsSizeAndForgetsThePagesThatWereUsedLongAgo) {
  PrefixMap map(1 << 16, 6);
  EXPECT_EQ(map.bytes(), size_t{1} << 16);
  const Pages old = Chain(1, 16);
  const Pages used = Chain(2, 16);
  map.Add(1, old);
  // The table has room for 4096 pages.
  for (uint64_t i = 0; i < 1000; ++i) {
    map.Add(2, used);
    map.Add(3, Chain(100 + i, 16));
  }
  EXPECT_EQ(map.bytes(), size_t{1} << 16);
  EXPECT_EQ(map.LongestHit(used, FirstSlots(4)).pages, 16u);
  EXPECT_EQ(map.LongestHit(old, FirstSlots(4)).pages, 0u);
}

TEST(PrefixMapTest, ForgetsTheGivenSlotsAndNoOthers) {
  PrefixMap map(1 << 20, 7);
  const Pages pages = Chain(1, 20);
  for (const size_t slot : {5, 6, 69, 4095}) map.Add(slot, pages);
  map.Forget(SetOf({5, 4095}, 64));
  EXPECT_EQ(map.LongestHit(pages, FirstSlots(4096)).holders,
            SetOf({6, 69}, 64));
  map.Forget(SetOf({6, 69}, 64));
  EXPECT_EQ(map.LongestHit(pages, FirstSlots(4096)).pages, 0u);
}

TEST(PrefixMapTest, ASearchAmongAThousandSlotsReadsFewBuckets) {
  PrefixMap map(64 << 20, 8);
  const Pages pages = Chain(1, 2048);
  const SlotSet all = FirstSlots(1000);
  for (size_t slot = 0; slot < 1000; ++slot) map.Add(slot, pages);
  const PrefixMap::Hit whole = map.LongestHit(pages, all);
  EXPECT_EQ(whole.pages, 2048u);
  EXPECT_EQ(whole.holders, all);
  // 16 blocks of slots; the first page and 11 halvings.
  EXPECT_LE(whole.lookups, 16u * 12u);
  EXPECT_EQ(map.LongestHit(Chain(2, 2048), all).lookups, 16u);
}

}  // namespace
}  // namespace kvasir::router
