// The bytes of a page. The pool, the planner, `inspect` and the metrics all use
// this calculator. It is pure arithmetic over a plan.
//
//   page of one layer: | tile 0 | tile 1 ... | landmarks | slot metadata |
//   tile of 64 slots:  | key part 0: group 0 codes, params; group 1 ...
//                      | value parts ... |
//   slot metadata:     | scores | positions | key errors | value errors |
// The latents of a joint part are stored among the keys' and serve the values
// as well.
//
// All that a layer reads of 64 slots is one run of bytes. Every region starts
// at a multiple of kRegionAlignmentBytes. Bytes between a region's end and the
// next start are padding and counted as waste. The device decides how a slot's
// bytes lie in their region (granules); kernels::TileRegion has the addresses.
//
// Exact rows: in addition to its token pages, a sequence owns side pages. They
// hold the latents of its first tokens (sinks) and rings with those of its
// latest tokens (exact windows), as 16-bit numbers. A page id names a page in
// every layer's arena, and layers differ in size. So the rows of a side are
// placed where there is room: in a few segments, each in the side pages of one
// arena of the page group.
//   side page in an arena: | rows of a side | rows of another ... |
//   row: | part 0: group 0, group 1 ... | part 1 ... |
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/strong_id.h"
#include "cache/layout/sequence_pages.h"
#include "plan/plan.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cache {

// Layers of one page group hold the same tokens. So one block table serves all
// of them, and a page id names the same page in each layer's arena.
using PageGroupId = base::StrongId<struct PageGroupTag, int32_t>;

// Slots of a tile. A smaller page, as in tests, is one smaller tile.
inline constexpr int64_t kTileSlots = 64;

// Two cache lines, which suits vector loads and bulk copies.
inline constexpr int64_t kRegionAlignmentBytes = 128;

// One kind of data for all slots of a tile, or of a page for data outside the
// tiles.
struct Region {
  int64_t offset_bytes = 0;  // from the start of the tile or page
  int64_t slot_bytes = 0;    // used bytes of a slot
  int64_t stored_bytes = 0;  // bytes of a slot in whole granules
  int64_t num_slots = 0;     // slots of a tile or page; for landmarks, chunks
  int64_t size_bytes() const { return num_slots * stored_bytes; }

  friend bool operator==(const Region&, const Region&) = default;
};

// One latent of a layer's side, which `heads` share.
struct GroupLayout {
  int64_t latent = 0;  // index into plan::ResolvedPart::latents
  // KV heads of the model, ascending. A rank that has one of these heads holds
  // the whole group, so the others may belong to other ranks.
  std::vector<int64_t> heads;
  int64_t width = 0;  // numbers per slot, R
  // Numbers (dtype codec) or packed codes (bits codec) of a tile.
  Region codes;
  // Scale and minimum for each slot of a tile. No slots if the codec has none.
  Region params;
  // The place of the latent's numbers in an exact row of the side.
  int64_t exact_offset_bytes = 0;
  int64_t stored_width = 0;  // numbers in a row: channels with bits
};

struct PartLayout {
  int part_index = 0;  // index into plan::ResolvedSide::parts
  // True on the value side for a joint part. The key side stores its latents,
  // so its regions and ring are those of the keys.
  bool of_keys = false;
  // The number type of the codes region; unspecified for a bits codec.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  std::vector<GroupLayout> groups;
};

// Consecutive exact rows of a side in one arena.
struct ExactSegment {
  int64_t layer = 0;  // the layer whose arena has them
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_page = 0;  // index among the sequence's side pages
  // The place of the first row in a page. It is not 0 only if the segment has a
  // single page, which other rows have begun.
  int64_t offset_bytes = 0;
  int64_t rows_per_page = 0;

  friend bool operator==(const ExactSegment&, const ExactSegment&) = default;
};

// The exact rows of a side: first those of the sinks, then a ring. The row of a
// token depends only on its logical position (kernels::ExactSlots).
struct ExactRing {
  int64_t sink_tokens = 0;    // 0: the side has none
  int64_t window_tokens = 0;  // 0: the side has none
  int64_t row_bytes = 0;
  // Sorted by first_row. They have tokens() rows together; at most
  // kMostExactSegments.
  std::vector<ExactSegment> segments;

  bool any() const { return tokens() > 0; }
  int64_t tokens() const { return sink_tokens + window_tokens; }

  friend bool operator==(const ExactRing&, const ExactRing&) = default;
};
// Four arenas, with two segments in each, because the first page may be one
// that other rows have begun.
inline constexpr int64_t kMostExactSegments = 8;

struct SideLayout {
  std::vector<PartLayout> parts;
  ExactRing exact;
};

// The metadata that eviction needs for a page's slots: planes [units][slots of
// the page]. kernels::SlotMetadata has the addresses.
struct SlotMetadataLayout {
  int64_t num_units = 0;  // units with a head on the rank; 0: no eviction
  Region scores;          // attention mass, float32
  Region positions;       // uint32
  // Quantization errors as logarithmic bytes (base::EncodeError). No slots if
  // the side has no codes.
  Region key_errors;
  Region value_errors;

  // The size without padding.
  int64_t size_bytes() const {
    return scores.size_bytes() + positions.size_bytes() +
           key_errors.size_bytes() + value_errors.size_bytes();
  }
};

struct LayerLayout {
  PageGroupId page_group;
  SideLayout key;
  SideLayout value;
  Region landmarks;  // a slot for each chunk of the selection; or none
  SlotMetadataLayout slot_metadata;
  int64_t tile_bytes = 0;     // with padding; a multiple of the alignment
  int64_t page_bytes = 0;     // with padding
  int64_t payload_bytes = 0;  // without padding
  // Bytes of one sequence in addition to its token pages: basis, mean, exact
  // rows.
  int64_t sequence_bytes = 0;
  // Side pages that are used in its arena, by this layer or others of its
  // group.
  int64_t side_pages = 0;

  const SideLayout& side(plan::Side which) const {
    return which == plan::Side::kKey ? key : value;
  }
};

struct PageGroupLayout {
  PageGroupId id;
  // The most keys that a query sees, itself included. 0: all keys before it.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
  int64_t page_bytes = 0;  // bytes of one page id over all layers of the group
  int64_t payload_bytes = 0;
  // Pages that a sequence owns in addition to its token pages. It is the
  // largest number that any arena of any rank needs, because all have the same
  // page ids.
  int64_t side_pages_per_sequence = 0;
  // The bytes of the side pages that this rank's layers use. The rest is waste.
  int64_t side_payload_bytes = 0;

  SequencePages sequence_pages(int64_t page_tokens) const {
    return {.page_tokens = page_tokens,
            .side_pages = side_pages_per_sequence,
            .sliding_window = sliding_window,
            .eviction = eviction};
  }
};

inline constexpr int64_t kMaxPageTokens = 4096;
inline constexpr int64_t kMaxGranuleBytes = kRegionAlignmentBytes;
// Equal to kernels::kMostParamGranuleBytes.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// The granularity of pages.
struct PageFormat {
  // P: 1 .. kTileSlots, or a multiple of kTileSlots up to kMaxPageTokens.
  int64_t page_tokens = kTileSlots;
  // The device's granule (kernels::Device::page_granule_bytes). 0: the slots
  // follow each other.
  int64_t granule_bytes = 0;

  // The granule of the params region. It is small because a slot has only two
  // params, a scale and a minimum.
  int64_t param_granule_bytes() const {
    return std::min(granule_bytes, kMostParamGranuleBytes);
  }
};
// Limits that keep every product of the calculator inside int64.
inline constexpr int64_t kMaxPageIdBytes = int64_t{1} << 32;
inline constexpr int64_t kMaxPagesPerGroup = (int64_t{1} << 31) - 1;

// Pages of each page group, by PageGroupId.
using PageCounts = std::vector<int64_t>;

// Threads: immutable after Create.
// Units: all sizes are bytes of one rank.
class PageLayout {
 public:
  // INVALID_ARGUMENT for a format out of range, pages that are not a multiple
  // of the selection's chunk, or a size that overflows int64.
  static absl::StatusOr<PageLayout> Create(const plan::ResolvedPlan& plan,
                                           const PageFormat& format);
  // Resolves the plan first and returns ResolvePlan's errors. For planners,
  // which make many layouts.
  static absl::StatusOr<PageLayout> Create(const kvasir::v1::KvPlan& plan,
                                           const plan::AttentionShape& shape,
                                           const PageFormat& format,
                                           plan::TpShard shard = {});

  int64_t page_tokens() const { return format_.page_tokens; }
  int64_t tile_slots() const { return std::min(page_tokens(), kTileSlots); }
  int64_t granule_bytes() const { return format_.granule_bytes; }
  int64_t param_granule_bytes() const { return format_.param_granule_bytes(); }
  plan::TpShard shard() const { return shard_; }
  plan::HeadRange kv_heads() const { return kv_heads_; }
  const std::vector<LayerLayout>& layers() const { return layers_; }
  const LayerLayout& layer(int64_t index) const;
  const std::vector<PageGroupLayout>& page_groups() const { return groups_; }
  const PageGroupLayout& page_group(PageGroupId id) const;

  // Bytes that one more token costs while nothing is given up (no window is
  // exceeded), with and without the padding of pages. It may be a fraction,
  // because a page's bytes need not divide by its tokens.
  double marginal_bytes_per_token() const;
  double marginal_payload_bytes_per_token() const;
  // Bytes of a token in one layer's side (payload and parameters). The
  // bytes of a joint part count as the keys'.
  double PayloadBytesPerToken(int64_t layer, plan::Side side) const;

  // Bytes of the side pages of one sequence, and how many of them are used.
  int64_t fixed_bytes_per_sequence() const;
  int64_t fixed_payload_bytes_per_sequence() const;

  // The most pages of a group that a sequence of `length_tokens` holds, side
  // pages included, if it is written in steps of at most `chunk_tokens`. The
  // chunk matters only with a sliding window or eviction.
  int64_t PagesHeld(PageGroupId group, int64_t length_tokens,
                    int64_t chunk_tokens) const;
  // The bytes of the pages held, over all groups. length_tokens is
  // 0 .. kMaxSequenceTokens (CHECK).
  int64_t BytesAtLength(int64_t length_tokens, int64_t chunk_tokens) const;

  // Bytes of a token if whole bf16 keys and values of this rank were cached.
  int64_t dense_bf16_bytes_per_token() const { return dense_bf16_bytes_; }
  // dense_bf16_bytes_per_token / marginal_bytes_per_token.
  double compression_ratio() const;

  // The pages of each group that `budget_bytes` pays for. First every group
  // gets the pages that one sequence of `max_model_len` holds, as far as the
  // budget allows. The rest is distributed in the same proportion. The budget
  // is never exceeded. Lengths above kMaxSequenceTokens count as
  // kMaxSequenceTokens (OneSequenceFits refuses them).
  struct BudgetRequest {
    int64_t budget_bytes = 0;
    int64_t max_model_len = 0;
    int64_t max_chunk_tokens = 0;
  };
  PageCounts PagesForBudget(const BudgetRequest& request) const;

  // FAILED_PRECONDITION, with the numbers and what to change, if one sequence
  // of `max_model_len` does not fit into `pages`.
  absl::Status OneSequenceFits(const PageCounts& pages, int64_t max_model_len,
                               int64_t max_chunk_tokens) const;

  // Whether sequences may share cached pages: no layer evicts or has a basis
  // for each sequence. Exact rows are found with tails (KvCache).
  bool prefix_reusable() const { return prefix_reusable_; }

 private:
  PageLayout() = default;

  PageFormat format_;
  plan::TpShard shard_;
  plan::HeadRange kv_heads_;
  int64_t dense_bf16_bytes_ = 0;
  bool prefix_reusable_ = true;
  std::vector<LayerLayout> layers_;
  std::vector<PageGroupLayout> groups_;
};

}  // namespace kvasir::cache
