// Test support for ops that append to the cache: cache parts in memory filled
// with a known byte, and rows to append to them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/latents/latent_view.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {

inline constexpr char kUntouched = '\x55';

// The shape of a group of latents: its width and, if it is stored as codes, the
// runs of channels with equal bits.
struct GroupShape {
  int64_t width = 0;
  std::vector<CodeRun> runs;
};

inline GroupShape Coded(
    const std::vector<std::pair<int64_t, int>>& widths_and_bits) {
  GroupShape shape;
  for (const auto& [width, bits] : widths_and_bits) {
    shape.runs.push_back({shape.width, width, bits});
    shape.width += width;
  }
  return shape;
}

// How a page is divided into tiles of `slots` slots; if `slots` is 0, a page is
// one tile. If `granule_bytes` is 0, slots follow one another without granules.
struct Tiles {
  int64_t slots = 0;
  int64_t granule_bytes = 0;
};

// A cache part with gaps between its regions. Its memory is filled with
// kUntouched, so that a test can see which bytes an op has written.
class Part {
 public:
  Part(std::vector<GroupShape> shapes, DType dtype, int64_t page_tokens,
       bool static_ranges = false, Tiles tiles = {}, int num_levels = 0)
      : granule_bytes(tiles.granule_bytes),
        shapes_(std::move(shapes)),
        page_tokens_(page_tokens) {
    constexpr int64_t kGap = 8;
    view.tile_slots = tiles.slots > 0 ? tiles.slots : page_tokens;
    view.dtype = dtype;
    view.param_dtype = dtype;
    view.num_levels = num_levels;
    for (int i = 0; i < num_levels; ++i) {
      // The levels are multiples of 2^-6 at unequal distances. The largest is
      // 127 * 2^-6.
      const int steps =
          i + 1 == num_levels ? 127 : 240 * i / num_levels - 120 + 3 * (i % 3);
      view.levels[i] = static_cast<float>(steps) * 0x1p-6f;
    }
    int64_t column = 0;
    int64_t offset = 16;
    for (const GroupShape& shape : shapes_) {
      LatentGroup group;
      group.width = shape.width;
      group.column = column;
      group.runs = shape.runs.data();
      group.num_runs = static_cast<int64_t>(shape.runs.size());
      const float* no_scale = nullptr;
      static constexpr float kAny = 0.0f;
      view.static_scale = static_ranges ? &kAny : no_scale;
      const int64_t codes_bytes = CodesBytes(view, group);
      // Only unquantized numbers have a gap between slots. Codes need no
      // alignment, so their slots follow one another.
      Place(codes_bytes, group.num_runs > 0 ? 0 : kGap, granule_bytes,
            &group.codes, &offset);
      offset = (offset + 3) / 4 * 4 + kGap;
      Place(ParamsBytes(view, group), kGap,
            std::min(granule_bytes, kMostParamGranuleBytes), &group.params,
            &offset);
      offset += kGap;
      groups_.push_back(group);
      column += shape.width;
    }
    view.groups = groups_.data();
    view.num_groups = static_cast<int64_t>(groups_.size());
    view.tile_bytes = offset;
    view.page_bytes = page_tokens / view.tile_slots * offset;
    minimum_ = RandomFloats(column, 90, 0.3f);
    scale_ = RandomFloats(column, 91, 0.3f);
    for (float& scale : scale_) scale = std::abs(scale);
    scale_[0] = 0.0f;
    view.static_scale = static_ranges ? scale_.data() : nullptr;
    view.static_minimum = static_ranges ? minimum_.data() : nullptr;
  }
  Part(const Part&) = delete;

  // Returns an arena of `pages` pages, filled with kUntouched.
  std::vector<char> Memory(int64_t pages) {
    return std::vector<char>(static_cast<size_t>(pages * view.page_bytes),
                             kUntouched);
  }
  // Writes kUntouched to all bytes that belong to slot `slot`.
  void Erase(int64_t slot, std::vector<char>* memory) {
    view.arena = memory->data();
    for (const LatentGroup& group : groups_) {
      const int64_t page = slot / page_tokens_;
      const int64_t in_page = slot % page_tokens_;
      const auto erase = [](char* to, int64_t, int64_t count) {
        std::fill_n(to, count, kUntouched);
      };
      ForSlotBytes(view, group.codes, page, in_page, CodesBytes(view, group),
                   erase);
      ForSlotBytes(view, group.params, page, in_page, ParamsBytes(view, group),
                   erase);
    }
  }
  // Returns the bytes of a slot in a region as one array.
  std::vector<char> Load(const TileRegion& region, int64_t slot,
                         int64_t count) const {
    std::vector<char> bytes(static_cast<size_t>(count));
    ForSlotBytes(view, region, slot / page_tokens_, slot % page_tokens_, count,
                 [&bytes](const char* from, int64_t first, int64_t run) {
                   std::copy_n(from, run, bytes.data() + first);
                 });
    return bytes;
  }

  const int64_t granule_bytes;
  LatentPartArgs view;

 private:
  // Places a region at *offset and moves *offset to its end. `g` is the size of
  // a granule in bytes; if it is 0, there are no granules, and two slots are
  // `gap` bytes apart.
  void Place(int64_t slot_bytes, int64_t gap, int64_t g, TileRegion* region,
             int64_t* offset) const {
    region->granule_bytes = g;
    region->offset_bytes = *offset;
    region->stride_bytes = g > 0 ? g : slot_bytes + gap;
    *offset += view.tile_slots *
               (g > 0 ? (slot_bytes + g - 1) / g * g : region->stride_bytes);
  }

  const std::vector<GroupShape> shapes_;
  const int64_t page_tokens_;
  std::vector<LatentGroup> groups_;
  std::vector<float> minimum_;
  std::vector<float> scale_;
};

// Rows of latents to append. Row t is written to slot slots[t], or to none if
// slots[t] is -1.
struct Rows {
  std::vector<float> numbers;
  int64_t stride = 0;
  std::vector<int64_t> slots;
  int64_t page_tokens = 0;
};
// Returns random rows for slots in three pages; one row is written to no slot.
inline Rows RandomRows(int64_t width, int64_t page_tokens) {
  Rows rows;
  rows.stride = width + 3;
  rows.page_tokens = page_tokens;
  rows.slots = {3, -1, 3 * page_tokens - 1, 2 * page_tokens, 0, 4};
  rows.numbers =
      RandomFloats(static_cast<int64_t>(rows.slots.size()) * rows.stride,
                   static_cast<uint32_t>(width));
  return rows;
}

}  // namespace kvasir::kernels
