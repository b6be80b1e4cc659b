#include "router/policy/prefix_map.h"

#include <algorithm>

namespace kvasir::router {

uint64_t MixBits(uint64_t a, uint64_t b) {
  // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), once for each.
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  return mix(mix(a + 0x9e3779b97f4a7c15u) + b);
}

PrefixMap::PrefixMap(size_t bytes, uint64_t seed)
    : seed_(seed), buckets_(std::max<size_t>(1, bytes / sizeof(Bucket))) {}

PrefixMap::Address PrefixMap::Find(uint64_t page, size_t block) const {
  const uint64_t hash = MixBits(page ^ seed_, block);
  // The upper half chooses the bucket without a division.
  return {static_cast<size_t>((hash >> 32) * buckets_.size() >> 32),
          static_cast<uint32_t>(hash) / kMaxBlocks * kMaxBlocks +
              static_cast<uint32_t>(block)};
}

uint64_t PrefixMap::SlotsOf(uint64_t page, size_t block) const {
  const Address address = Find(page, block);
  const Bucket& bucket = buckets_[address.bucket];
  for (size_t i = 0; i < kPlaces; ++i) {
    if (bucket.tags[i] == address.tag && bucket.slots[i] != 0) {
      return bucket.slots[i];
    }
  }
  return 0;
}

PrefixMap::Hit PrefixMap::LongestHit(absl::Span<const uint64_t> pages,
                                     const SlotSet& among) const {
  Hit hit;
  hit.holders.resize(among.size());
  SlotSet found(among.size());
  // Returns whether a slot of `among` has page `index`. If so, hit.holders
  // becomes the set of these slots.
  const auto has = [&](size_t index) {
    bool any = false;
    for (size_t block = 0; block < among.size(); ++block) {
      found[block] = 0;
      if (among[block] == 0) continue;
      ++hit.lookups;
      found[block] = SlotsOf(pages[index], block) & among[block];
      any = any || found[block] != 0;
    }
    if (any) hit.holders.swap(found);
    return any;
  };
  // Most prompts of new conversations have no hit.
  if (pages.empty() || !has(0)) return hit;
  hit.pages = 1;
  size_t end = pages.size();  // no slot has the page of this index
  while (hit.pages < end) {
    const size_t middle = hit.pages + (end - hit.pages) / 2;
    if (has(middle)) {
      hit.pages = middle + 1;
    } else {
      end = middle;
    }
  }
  return hit;
}

void PrefixMap::Add(size_t slot, absl::Span<const uint64_t> pages) {
  ++clock_;
  const uint64_t bit = uint64_t{1} << (slot % 64);
  for (const uint64_t page : pages) {
    const Address address = Find(page, slot / 64);
    Bucket& bucket = buckets_[address.bucket];
    size_t place = 0;
    uint64_t oldest = 0;
    for (size_t i = 0; i < kPlaces; ++i) {
      if (bucket.slots[i] != 0 && bucket.tags[i] == address.tag) {
        place = i;
        break;
      }
      const uint64_t age =
          bucket.slots[i] == 0 ? uint64_t{1} << 32 : clock_ - bucket.stamps[i];
      if (age > oldest) {
        oldest = age;
        place = i;
      }
    }
    if (bucket.tags[place] != address.tag) bucket.slots[place] = 0;
    bucket.tags[place] = address.tag;
    bucket.stamps[place] = clock_;
    bucket.slots[place] |= bit;
  }
}

void PrefixMap::Forget(const SlotSet& slots) {
  for (Bucket& bucket : buckets_) {
    for (size_t i = 0; i < kPlaces; ++i) {
      const size_t block = bucket.tags[i] % kMaxBlocks;
      if (block < slots.size()) bucket.slots[i] &= ~slots[block];
    }
  }
}

}  // namespace kvasir::router
