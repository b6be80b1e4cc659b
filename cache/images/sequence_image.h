// A sequence that waits in the host pool: its lengths, and the host pages that
// hold a copy of its pages. Below, P is the number of slots of a page.
//
//   entries:  | given up |   pages of the image   |
//             0      first_page           first_page + num_pages
//   slots:            first_page * P ... + physical_tokens
#pragma once

#include <cstdint>
#include <vector>

#include "cache/pages/page_pool.h"
#include "cache/prefix/tail_policy.h"

namespace kvasir::cache {

// How many slots and pages an image has in one page group.
struct ImageGroupShape {
  int64_t physical_tokens = 0;  // slots that the sequence holds
  int64_t first_page = 0;  // the first entry of the block table that has a page
  int64_t num_pages = 0;   // token pages, without side pages
  int64_t num_side_pages = 0;
  // EvictionSchedule::kept_slots. 0: the sequence evicts no slots in this
  // group.
  int64_t kept_slots = 0;

  friend bool operator==(const ImageGroupShape&,
                         const ImageGroupShape&) = default;
};

struct ImageShape {
  // tokens that the sequence has seen, evicted ones included
  int64_t logical_tokens = 0;
  // The prompt's length if the sequence evicts slots, because eviction points
  // depend on this length; otherwise 0.
  int64_t prompt_tokens = 0;
  std::vector<ImageGroupShape> groups;  // indexed by PageGroupId

  friend bool operator==(const ImageShape&, const ImageShape&) = default;
};

// Owns: a reference to each of its host pages, which become free when the image
// is destroyed. KvCache::Export makes an image and KvCache::Import consumes it;
// the cache must outlive it.
struct SequenceImage {
  ImageShape shape;
  // For each page group: first the token pages, then the side pages.
  std::vector<std::vector<PagePin>> pages;
  TailPolicy tails;
};

}  // namespace kvasir::cache
