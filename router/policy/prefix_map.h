// Remembers which replicas were sent which prompts, page by page, in a fixed
// number of bytes. The map is a guess: it forgets pages, and does not know
// which pages a worker has evicted.
//
// Replicas have slots (numbers). An entry of the table says which slots of a
// block of 64 have a page: (page, block) -> 64 bits. So a page of one replica
// takes 16 bytes, and a page that 1,000 replicas have takes 16 entries. The
// table is set-associative, like a CPU's cache: an entry lies in one of the 8
// places of its bucket. If they are full, it replaces the one that was added or
// renewed least recently.
//
// A page's key is a hash of the page and of all pages before it. So a replica
// that has a page usually has all pages before it, and LongestHit can search by
// halves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvasir::router {

// A set of slots: bit s % 64 of word s / 64.
using SlotSet = std::vector<uint64_t>;

// Mixes the bits of two numbers. The result is the same on every machine.
uint64_t MixBits(uint64_t a, uint64_t b);

// Threads: not thread-safe.
class PrefixMap {
 public:
  static constexpr size_t kMaxSlots = 4096;

  // Uses at most `bytes`, but at least one bucket (128 bytes). Allocates all of
  // it now. `seed` should be secret, so that nobody can choose prompts whose
  // pages share a bucket.
  PrefixMap(size_t bytes, uint64_t seed);

  struct Hit {
    // How many pages of the prompt the replicas in `holders` probably have.
    size_t pages = 0;
    SlotSet holders;
    // How many buckets were read.
    size_t lookups = 0;
  };
  // Finds the longest prefix of `pages` that a slot of `among` has. The work is
  // at most among.size() * (2 + log2(pages.size())) lookups.
  Hit LongestHit(absl::Span<const uint64_t> pages, const SlotSet& among) const;

  // Adds or renews all pages for the slot: one lookup for each page.
  void Add(size_t slot, absl::Span<const uint64_t> pages);
  // Removes these slots from all entries. Walks the table.
  void Forget(const SlotSet& slots);

  size_t bytes() const { return buckets_.size() * sizeof(Bucket); }

 private:
  static constexpr size_t kPlaces = 8;
  static constexpr uint32_t kMaxBlocks = kMaxSlots / 64;
  struct alignas(64) Bucket {
    std::array<uint32_t, kPlaces> tags{};
    // The clock when the entry was added or renewed.
    std::array<uint32_t, kPlaces> stamps{};
    std::array<uint64_t, kPlaces> slots{};  // 0: the place is free
  };

  // Where an entry belongs: its bucket, and the tag by which it is recognized.
  // The lowest bits of the tag are the block.
  struct Address {
    size_t bucket = 0;
    uint32_t tag = 0;
  };
  Address Find(uint64_t page, size_t block) const;
  uint64_t SlotsOf(uint64_t page, size_t block) const;

  const uint64_t seed_;
  std::vector<Bucket> buckets_;
  uint32_t clock_ = 0;
};

}  // namespace kvasir::router
