// What a page looks like, in bytes: the one calculator behind the pool, the
// planner, `inspect` and the metrics. Pure arithmetic over a plan.
//
//   page of one layer: | tile 0 | tile 1 ... | landmarks | slot metadata |
//   tile of 64 slots:  | key part 0: group 0 codes, params; group 1 ...
//                      | value parts ... |
//   slot metadata:     | scores | positions | key errors | value errors |
// A joint part's latents lie among the keys' and serve the values as well.
//
// What a layer reads of 64 slots lies in one run. Every region starts at a
// multiple of kRegionAlignmentBytes; what lies between a region's end and the
// next start is padding and counted as waste. How a slot's bytes lie in their
// region is the device's own (granules): kernels::TileRegion has the addresses.
//
// Exact rows: a sequence owns side pages beside those of its tokens. They hold
// the latents of its first tokens (sinks) and rings of those of its latest ones
// (exact windows) in 16-bit numbers. An id is a page in every layer's arena and
// layers are unequal, so a side's rows lie where there is room: in a few
// segments, each in the side pages of one arena of the page group.
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

// Layers of one page group hold the same tokens, so one block table serves
// them all and a page id names the same page in each layer's arena.
using PageGroupId = base::StrongId<struct PageGroupTag, int32_t>;

// Slots of a tile. Smaller pages, which tests like, are one smaller tile.
inline constexpr int64_t kTileSlots = 64;

// A cache line pair, and what vector and bulk copies like best.
inline constexpr int64_t kRegionAlignmentBytes = 128;

// What slots have of one kind: of a tile, or of a page for what is not in
// tiles.
struct Region {
  int64_t offset_bytes = 0;  // from the start of the tile, or page
  int64_t slot_bytes = 0;    // that are used
  int64_t stored_bytes = 0;  // of a slot: whole granules
  int64_t num_slots = 0;     // of a tile or page, or its chunks for landmarks
  int64_t size_bytes() const { return num_slots * stored_bytes; }

  friend bool operator==(const Region&, const Region&) = default;
};

// One latent of a layer's side: what `heads` share.
struct GroupLayout {
  int64_t latent = 0;  // in plan::ResolvedPart::latents
  // KV heads of the model, ascending. A group with a head on this rank is held
  // whole, so some of them may belong to other ranks.
  std::vector<int64_t> heads;
  int64_t width = 0;  // numbers per slot, R
  // Of a tile: numbers (dtype codec) or packed codes (bits codec).
  Region codes;
  // Of a tile: scale and minimum per slot; no slots where the codec has none.
  Region params;
  // Where its numbers begin in an exact row of the side.
  int64_t exact_offset_bytes = 0;
  int64_t stored_width = 0;  // numbers of a row: channels that have bits
};

struct PartLayout {
  int part_index = 0;  // in plan::ResolvedSide::parts
  // The latents of a joint part among the keys, which store them: its regions
  // are theirs, and so is the ring.
  bool of_keys = false;
  // Number type of the codes region; unspecified for a bits codec.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  std::vector<GroupLayout> groups;
};

// Exact rows of a side that lie one behind the other in one arena.
struct ExactSegment {
  int64_t layer = 0;  // in whose arena
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_page = 0;  // among the sequence's side pages
  // Of the first row in a page: not 0 only where there is one page, which
  // others have begun.
  int64_t offset_bytes = 0;
  int64_t rows_per_page = 0;

  friend bool operator==(const ExactSegment&, const ExactSegment&) = default;
};

// The exact rows of a side: those of the sinks, then a ring. Which one a token
// has follows from its logical position alone, as kernels::ExactSlots says.
struct ExactRing {
  int64_t sink_tokens = 0;    // 0: the side has none
  int64_t window_tokens = 0;  // 0: the side has none
  int64_t row_bytes = 0;
  // By first_row, of tokens() rows together: at most kMostExactSegments.
  std::vector<ExactSegment> segments;

  bool any() const { return tokens() > 0; }
  int64_t tokens() const { return sink_tokens + window_tokens; }

  friend bool operator==(const ExactRing&, const ExactRing&) = default;
};
// In four arenas, and two in each: the first page may be one that others began.
inline constexpr int64_t kMostExactSegments = 8;

struct SideLayout {
  std::vector<PartLayout> parts;
  ExactRing exact;
};

// What eviction keeps of a page's slots: planes [units][slots of the page].
// kernels::SlotMetadata has the addresses.
struct SlotMetadataLayout {
  int64_t num_units = 0;  // that have a head on the rank; 0: nothing is evicted
  Region scores;          // attention mass, float32
  Region positions;       // uint32
  // Quantization errors, a logarithmic byte each (base::EncodeError); no slots
  // where the side has no codes.
  Region key_errors;
  Region value_errors;

  // Without padding.
  int64_t size_bytes() const {
    return scores.size_bytes() + positions.size_bytes() +
           key_errors.size_bytes() + value_errors.size_bytes();
  }
};

struct LayerLayout {
  PageGroupId page_group;
  SideLayout key;
  SideLayout value;
  Region landmarks;  // one slot per chunk of the selection; else no slots
  SlotMetadataLayout slot_metadata;
  int64_t tile_bytes = 0;     // with padding; a multiple of the alignment
  int64_t page_bytes = 0;     // likewise
  int64_t payload_bytes = 0;  // without padding
  // Beside the pages of tokens, per sequence: basis, mean, exact rows.
  int64_t sequence_bytes = 0;
  // That are begun in its arena, by this layer or by others of its group.
  int64_t side_pages = 0;

  const SideLayout& side(plan::Side which) const {
    return which == plan::Side::kKey ? key : value;
  }
};

struct PageGroupLayout {
  PageGroupId id;
  // Keys that a query sees at most, itself included; 0: all before it.
  int64_t sliding_window = 0;
  plan::EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
  int64_t page_bytes = 0;       // of one page id, over all the group's layers
  int64_t payload_bytes = 0;
  // Pages a sequence owns for what it holds beside its tokens: the most that
  // are taken in any arena of any rank, because all have the same page ids.
  int64_t side_pages_per_sequence = 0;
  // Of them, what this rank's layers use: the rest of their bytes is waste.
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
// kernels::kMostParamGranuleBytes.
inline constexpr int64_t kMostParamGranuleBytes = 4;

// What pages are cut by.
struct PageFormat {
  // P: 1 .. kTileSlots, or a multiple of kTileSlots up to kMaxPageTokens.
  int64_t page_tokens = kTileSlots;
  // The device's (kernels::Device::page_granule_bytes); 0: slot after slot.
  int64_t granule_bytes = 0;

  // Of ranges, of which a slot has few: a scale and a minimum.
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
  // INVALID_ARGUMENT for a format out of range, pages that are no multiple of
  // the selection's chunk, or a size
  // that overflows int64.
  static absl::StatusOr<PageLayout> Create(const plan::ResolvedPlan& plan,
                                           const PageFormat& format);
  // Resolves the plan first, with ResolvePlan's errors: for planners, which
  // make many.
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

  // Bytes that one more token costs while nothing is given up (no window
  // exceeded), pages' padding included, and without it. A fraction of a byte
  // where a page's bytes do not divide by its tokens.
  double marginal_bytes_per_token() const;
  double marginal_payload_bytes_per_token() const;
  // Bytes of a token of one layer's side (payload, parameters included). Those
  // of a joint part are the keys'.
  double PayloadBytesPerToken(int64_t layer, plan::Side side) const;

  // Bytes of the side pages of one sequence, and what of them is used.
  int64_t fixed_bytes_per_sequence() const;
  int64_t fixed_payload_bytes_per_sequence() const;

  // Pages of a group that a sequence of `length_tokens` holds at most, side
  // pages included, when it is written in steps of at most `chunk_tokens`.
  // Without a sliding window or eviction the chunk makes no difference.
  int64_t PagesHeld(PageGroupId group, int64_t length_tokens,
                    int64_t chunk_tokens) const;
  // The same in bytes, over all groups. length_tokens is
  // 0 .. kMaxSequenceTokens (CHECK).
  int64_t BytesAtLength(int64_t length_tokens, int64_t chunk_tokens) const;

  // A token's bytes in a cache of whole bf16 keys and values of this rank.
  int64_t dense_bf16_bytes_per_token() const { return dense_bf16_bytes_; }
  // dense_bf16_bytes_per_token / marginal_bytes_per_token.
  double compression_ratio() const;

  // Pages of each group that `budget_bytes` pays for. First every group gets
  // what one sequence of `max_model_len` holds (as far as the money goes); the
  // rest is shared out in the same proportion. Never spends more than the
  // budget. Lengths over kMaxSequenceTokens count as that (OneSequenceFits
  // refuses them).
  struct BudgetRequest {
    int64_t budget_bytes = 0;
    int64_t max_model_len = 0;
    int64_t max_chunk_tokens = 0;
  };
  PageCounts PagesForBudget(const BudgetRequest& request) const;

  // FAILED_PRECONDITION, with the numbers and what to change, when one
  // sequence of `max_model_len` does not fit into `pages`.
  absl::Status OneSequenceFits(const PageCounts& pages, int64_t max_model_len,
                               int64_t max_chunk_tokens) const;

  // Cached pages may be shared between sequences: no layer evicts or has a
  // basis of its own per sequence. Exact rows are found with tails
  // (KvCache).
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
