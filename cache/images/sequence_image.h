// What a sequence's cache is made of while it is an image: lengths, and the
// pages of the host pool that hold a copy of its own.
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

// In one page group.
struct ImageGroupShape {
  int64_t physical_tokens = 0;  // slots held
  int64_t first_page = 0;       // of the block table, that holds them
  int64_t num_pages = 0;        // of tokens
  int64_t num_side_pages = 0;
  // EvictionSchedule::kept_slots; 0: the sequence gives up none here.
  int64_t kept_slots = 0;

  friend bool operator==(const ImageGroupShape&,
                         const ImageGroupShape&) = default;
};

struct ImageShape {
  int64_t logical_tokens = 0;  // seen
  // Of a sequence that gives up slots, whose points depend on it; else 0.
  int64_t prompt_tokens = 0;
  std::vector<ImageGroupShape> groups;  // by PageGroupId

  friend bool operator==(const ImageShape&, const ImageShape&) = default;
};

// Owns: a reference to each of its host pages. KvCache makes it and takes it
// back, and outlives it; when it goes, its pages are free.
struct SequenceImage {
  ImageShape shape;
  // By group: the pages of tokens, then the side pages.
  std::vector<std::vector<PagePin>> pages;
  TailPolicy tails;
};

}  // namespace kvasir::cache
