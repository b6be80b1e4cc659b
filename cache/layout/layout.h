// Computes the sizes of pages and the places of data in them, by pure
// arithmetic over a plan. The pool, the planner, `inspect` and the metrics all
// use this calculator.
//
//   page of one layer: | tile 0 | tile 1 ... | landmarks | slot metadata |
//   tile of 64 slots:  | key part 0: group 0 codes, params; group 1 ...
//                      | value parts ... |
//   slot metadata:     | scores | positions | key errors | value errors |
// A joint part serves keys and values. Its latents are stored once, with the
// keys.
//
// The bytes that a layer reads for the 64 slots of a tile are contiguous. Every
// region starts at a multiple of kRegionAlignmentBytes. Bytes between a
// region's end and the next start are padding and counted as waste. The device
// decides how a slot's bytes lie in their region (granules);
// kernels::TileRegion has the addresses.
//
// Exact rows: in addition to its token pages, a sequence owns side pages. They
// hold the latents of its first tokens (sinks) and of its latest tokens (exact
// windows, stored as rings) as 16-bit numbers. A page id names a page in every
// layer's arena, and these pages differ in size. So the rows of a side (a
// layer's keys or values) are stored where there is room. They form a few
// segments, each in one arena of the page group.
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

// The number of slots in a tile. A page of fewer slots, as in tests, is one
// smaller tile.
inline constexpr int64_t kTileSlots = 64;

// Every region starts at a multiple of this: two cache lines, which suits
// vector loads and bulk copies.
inline constexpr int64_t kRegionAlignmentBytes = 128;

// The part of a tile that holds one kind of data, with equal room for each
// slot. Data outside the tiles has such a region in the page.
struct Region {
  int64_t offset_bytes = 0;  // from the start of the tile or page
  int64_t slot_bytes = 0;    // bytes that a slot uses
  int64_t stored_bytes = 0;  // bytes that a slot occupies, with padding
  // slots of the tile or page; for landmarks, chunks of the page
  int64_t num_slots = 0;
  int64_t size_bytes() const { return num_slots * stored_bytes; }

  friend bool operator==(const Region&, const Region&) = default;
};

// The layout of one latent, which the KV heads in `heads` share.
struct GroupLayout {
  int64_t latent = 0;  // index into plan::ResolvedPart::latents
  // Indices of KV heads in the whole model, ascending. A rank that has one of
  // these heads holds the whole group, so some of the heads may belong to other
  // ranks.
  std::vector<int64_t> heads;
  int64_t width = 0;  // the latent's number of channels
  // The latents of a tile: unquantized numbers (dtype codec) or packed codes
  // (bits codec).
  Region codes;
  // Scale and minimum for each slot of a tile. Has no slots if the codec has no
  // such parameters.
  Region params;
  // The offset of the latent's numbers in an exact row of the side.
  int64_t exact_offset_bytes = 0;
  // The number of channels that an exact row stores: all except those whose
  // codes have 0 bits.
  int64_t stored_width = 0;
};

struct PartLayout {
  int part_index = 0;  // index into plan::ResolvedSide::parts
  // True for a joint part on the value side: its regions and exact rows are
  // those of the key side, which stores its latents.
  bool of_keys = false;
  // The number type of the codes region; unspecified for a bits codec.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  std::vector<GroupLayout> groups;
};

// Consecutive exact rows of a side, which lie in the side pages of one arena.
struct ExactSegment {
  int64_t layer = 0;  // the layer whose arena holds these rows
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_page = 0;  // index among the sequence's side pages
  // The offset of the first row in its page. It is above 0 only if the segment
  // has a single page, whose beginning other rows occupy.
  int64_t offset_bytes = 0;
  int64_t rows_per_page = 0;

  friend bool operator==(const ExactSegment&, const ExactSegment&) = default;
};

// The exact rows of a side: first those of the sinks, then a ring for the
// latest tokens. The row of a token depends only on its logical position
// (kernels::ExactSlots).
struct ExactRing {
  int64_t sink_tokens = 0;    // 0: the side has none
  int64_t window_tokens = 0;  // 0: the side has none
  int64_t row_bytes = 0;
  // At most kMostExactSegments, sorted by first_row. Together they have
  // tokens() rows.
  std::vector<ExactSegment> segments;

  bool any() const { return tokens() > 0; }
  int64_t tokens() const { return sink_tokens + window_tokens; }

  friend bool operator==(const ExactRing&, const ExactRing&) = default;
};
// The exact rows of a side may be split over four arenas. In each arena they
// may have two segments: one in a page that other rows partly fill, and one in
// further pages.
inline constexpr int64_t kMostExactSegments = 8;

struct SideLayout {
  std::vector<PartLayout> parts;
  ExactRing exact;
};

// The metadata that eviction needs for a page's slots. Each region is an array
// [units][slots of the page]; kernels::SlotMetadata computes the addresses.
struct SlotMetadataLayout {
  int64_t num_units = 0;  // eviction units on this rank; 0: no eviction
  Region scores;          // attention mass, float32
  Region positions;       // uint32
  // Quantization errors, each as one logarithmic byte (base::EncodeError). Has
  // no slots if the side stores no codes.
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
  // Summaries by which attention selects chunks of tokens, with one slot for
  // each chunk. No slots if attention always uses all tokens.
  Region landmarks;
  SlotMetadataLayout slot_metadata;
  // with padding; a multiple of kRegionAlignmentBytes
  int64_t tile_bytes = 0;
  int64_t page_bytes = 0;     // with padding
  int64_t payload_bytes = 0;  // without padding
  // The bytes of basis, mean and exact rows, which a sequence has in addition
  // to its token pages.
  int64_t sequence_bytes = 0;
  // The number of side pages in this layer's arena that hold data of this layer
  // or of other layers of its group.
  int64_t side_pages = 0;

  const SideLayout& side(plan::Side which) const {
    return which == plan::Side::kKey ? key : value;
  }
};

struct PageGroupLayout {
  PageGroupId id;
  // A query attends to at most this many keys, its own token's included. 0: no
  // sliding window.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
  int64_t page_bytes = 0;  // bytes of a page, summed over the group's layers
  int64_t payload_bytes = 0;
  // The number of pages that a sequence owns in addition to its token pages. A
  // page id names a page in the arenas of all ranks, so the arena that needs
  // most determines the number.
  int64_t side_pages_per_sequence = 0;
  // The bytes in a sequence's side pages that hold data of this rank's layers.
  // The rest is waste.
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
// The largest granule of a params region. Equal
// to kernels::kMostParamGranuleBytes.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// The slots in a page, and the unit in which the device arranges a slot's
// bytes.
struct PageFormat {
  // 1 .. kTileSlots, or a multiple of kTileSlots up to kMaxPageTokens.
  int64_t page_tokens = kTileSlots;
  // The bytes of a slot that are stored together
  // (kernels::Device::page_granule_bytes). 0: all of them, so the slots lie one
  // after another.
  int64_t granule_bytes = 0;

  // The granule of the params region: small, because a slot has only two
  // params, a scale and a minimum.
  int64_t param_granule_bytes() const {
    return std::min(granule_bytes, kMostParamGranuleBytes);
  }
};

// These limits ensure that no product in this calculator overflows int64.
inline constexpr int64_t kMaxPageIdBytes = int64_t{1} << 32;
inline constexpr int64_t kMaxPagesPerGroup = (int64_t{1} << 31) - 1;

// The number of pages of each page group, by PageGroupId.
using PageCounts = std::vector<int64_t>;

// Threads: immutable after Create.
// Units: all sizes are bytes of one rank.
class PageLayout {
 public:
  // Returns INVALID_ARGUMENT if a field of `format` is not allowed, or if
  // page_tokens is not a multiple of the chunk size of attention's selection.
  // Also returns it if a page over all layers, or a sequence's side pages, take
  // more than kMaxPageIdBytes.
  static absl::StatusOr<PageLayout> Create(const plan::ResolvedPlan& plan,
                                           const PageFormat& format);
  // Like the function above, but resolves the plan first, and also returns the
  // errors of ResolvePlan. `shard` is the rank whose pages are laid out.
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

  // The bytes that one more token takes, with and without (payload) the padding
  // of pages. This assumes that no window or eviction gives up tokens. The
  // numbers may be fractions, because a page's bytes need not be a multiple of
  // its tokens.
  double marginal_bytes_per_token() const;
  double marginal_payload_bytes_per_token() const;
  // The bytes of a token in the keys or values of one layer, without padding:
  // its codes (or unquantized numbers) and its ranges. The bytes of a joint
  // part count for the keys.
  double PayloadBytesPerToken(int64_t layer, plan::Side side) const;

  // The bytes of one sequence's side pages, and how many of them hold data.
  int64_t fixed_bytes_per_sequence() const;
  int64_t fixed_payload_bytes_per_sequence() const;

  // The most pages of a group that a sequence of `length_tokens` holds, side
  // pages included, if it is written in steps of at most `chunk_tokens`. The
  // chunk matters only with a sliding window or eviction.
  int64_t PagesHeld(PageGroupId group, int64_t length_tokens,
                    int64_t chunk_tokens) const;
  // The bytes of all pages that PagesHeld counts, summed over the groups.
  // length_tokens is 0 .. kMaxSequenceTokens (CHECK).
  int64_t BytesAtLength(int64_t length_tokens, int64_t chunk_tokens) const;

  // The bytes that a token would take on this rank if keys and values were
  // cached uncompressed, as bf16.
  int64_t dense_bf16_bytes_per_token() const { return dense_bf16_bytes_; }
  // dense_bf16_bytes_per_token / marginal_bytes_per_token.
  double compression_ratio() const;

  // The arguments of PagesForBudget, which divides `budget_bytes` among the
  // page groups. First, every group gets the pages that one sequence of
  // `max_model_len` holds, as far as the budget allows. The rest is distributed
  // in proportion to the number of pages that such a sequence holds in each
  // group. The budget is never exceeded. Lengths above kMaxSequenceTokens count
  // as kMaxSequenceTokens (OneSequenceFits refuses them).
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

  // True if sequences may share cached pages, because no layer evicts or has a
  // separate basis or ranges for each sequence. Exact rows do not prevent
  // sharing, because the prefix cache has copies of them (tails).
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
