#include "cache/layer_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::cache {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Eviction;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::Selection;
using kvasir::v1::SidePlan;

// Rows of an exact window and of outlier chunks are 16-bit numbers.
constexpr int64_t kExactNumberBytes = 2;
// Per slot and eviction unit: position (4), attention mass received (4), and a
// logarithmic error each for key and value (1 + 1).
constexpr int64_t kUnitMetadataBytes = 10;
// Units finer than the layer must cost less than this share of the latents.
constexpr int64_t kUnitMetadataPercent = 5;

// A sum of products that remembers an overflow instead of wrapping.
class Bytes {
 public:
  void Add(int64_t a, int64_t b = 1, int64_t c = 1) {
    int64_t product = 0;
    overflow_ = overflow_ || __builtin_mul_overflow(a, b, &product) ||
                __builtin_mul_overflow(product, c, &product) ||
                __builtin_add_overflow(value_, product, &value_);
  }
  // kMaxPageIdBytes + 1 after an overflow: over every limit.
  int64_t value() const {
    return overflow_ ? kMaxPageIdBytes + 1
                     : std::min(value_, kMaxPageIdBytes + 1);
  }

 private:
  int64_t value_ = 0;
  bool overflow_ = false;
};

// What a codec makes of a latent of `width` numbers.
struct StoredLatent {
  int64_t codes_bytes = 0;   // of a slot: whole bytes
  int64_t params_bytes = 0;  // of a slot
  int64_t channels = 0;      // of which something is stored
};

StoredLatent StoreBits(const Codec& codec, int64_t width) {
  const auto& schedule = codec.bits().schedule();
  const int64_t run = width / schedule.size();
  const int64_t range_channels =
      codec.has_per_token() ? codec.per_token().group() : 0;
  StoredLatent stored;
  int64_t bits = 0;
  int64_t ranges = 0;
  for (uint32_t b : schedule) {
    if (b == 0) continue;
    bits += run * b;
    stored.channels += run;
    ranges += range_channels > 0 ? run / range_channels : 1;
  }
  stored.codes_bytes = (bits + 7) / 8;
  if (codec.has_per_token()) {
    // A scale and a minimum per range.
    stored.params_bytes = 2 * ranges * DataTypeBytes(codec.param_dtype());
  }
  return stored;
}

StoredLatent Store(const Codec& codec, int64_t width) {
  if (codec.has_bits()) return StoreBits(codec, width);
  return {width * DataTypeBytes(codec.dtype()), 0, width};
}

struct Latent {
  std::vector<int64_t> heads;
  int64_t width = 0;
};

template <typename Repeated>
std::vector<int64_t> SortedHeads(const Repeated& heads) {
  std::vector<int64_t> sorted(heads.begin(), heads.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

std::vector<int64_t> Heads(base::HeadRange range) {
  std::vector<int64_t> heads(static_cast<size_t>(range.count));
  std::iota(heads.begin(), heads.end(), range.first);
  return heads;
}

// The full space: each head on its own, but for a basis, which is of all heads
// side by side (the sequence's own basis: of the rank's heads).
std::vector<Latent> FullLatents(const Codec& codec, const LayerContext& c) {
  if (codec.has_basis_static() || codec.has_basis_sequence()) {
    const base::HeadRange range = codec.has_basis_sequence()
                                      ? c.kv_heads
                                      : base::HeadRange{0, c.num_kv_heads};
    return {{Heads(range), range.count * c.head_dim}};
  }
  std::vector<Latent> latents;
  for (int64_t head : Heads(c.kv_heads)) {
    latents.push_back({{head}, c.head_dim});
  }
  return latents;
}

std::vector<Latent> AllLatents(const Part& part, const LayerContext& c) {
  std::vector<Latent> latents;
  switch (part.space_case()) {
    case Part::kFull:
      return FullLatents(part.codec(), c);
    case Part::kLowRank:
      for (const auto& group : part.low_rank().groups()) {
        latents.push_back({SortedHeads(group.heads()), group.rank()});
      }
      return latents;
    case Part::kRopePairs:
      for (int h = 0; h < part.rope_pairs().per_head_size(); ++h) {
        latents.push_back(
            {{h}, 2 * part.rope_pairs().per_head(h).pair_indices_size()});
      }
      return latents;
    case Part::kRopeLowRank:
      for (const auto& group : part.rope_low_rank().groups()) {
        int64_t width = 0;
        for (uint32_t rank : group.rank_per_pair()) width += 2 * rank;
        latents.push_back({SortedHeads(group.heads()), width});
      }
      return latents;
    case Part::SPACE_NOT_SET:
      break;
  }
  KVASIR_CHECK(false);  // ValidatePlan refuses it
  return latents;
}

// A latent with a head on the rank is held whole.
std::vector<Latent> LatentsOfRank(const Part& part, const LayerContext& c) {
  std::vector<Latent> latents = AllLatents(part, c);
  std::erase_if(latents, [&c](const Latent& latent) {
    return std::none_of(
        latent.heads.begin(), latent.heads.end(),
        [&c](int64_t head) { return c.kv_heads.Contains(head); });
  });
  return latents;
}

// ValidatePlan checks the model's widths; a basis of the rank's own heads is
// narrower, and channels that fall off the end of a schedule would be lost.
absl::Status CheckWidthsOfRank(const SidePlan& side, const LayerContext& c,
                               absl::string_view where) {
  for (int p = 0; p < side.parts_size(); ++p) {
    const Codec& codec = side.parts(p).codec();
    if (!codec.has_bits()) continue;
    const int64_t runs = codec.bits().schedule_size();
    const int64_t group = codec.has_per_token() && codec.per_token().group() > 0
                              ? codec.per_token().group()
                              : 1;
    for (const Latent& latent : LatentsOfRank(side.parts(p), c)) {
      if (latent.width % runs == 0 && latent.width / runs % group == 0) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat(where, " part ", p, ": the ", latent.width,
                       " channels of rank ", c.options.shard.rank, " of ",
                       c.options.shard.size, " do not divide into ", runs,
                       " runs of whole ranges of ", group, " channels"));
    }
  }
  return absl::OkStatus();
}

// Hands out regions of a page, front to back.
class PageCursor {
 public:
  Region Take(int64_t num_slots, int64_t slot_bytes) {
    if (slot_bytes == 0 || num_slots == 0) return Region{};
    Region region{offset_.value(), slot_bytes, num_slots};
    Bytes size;
    size.Add(num_slots, slot_bytes);
    payload_.Add(size.value());
    offset_.Add(AlignRegion(size.value()));
    return region;
  }
  int64_t page_bytes() const { return offset_.value(); }
  int64_t payload_bytes() const { return payload_.value(); }

 private:
  Bytes offset_;
  Bytes payload_;
};

// `basis_bytes` are those of the sequence's own basis, mean and ranges.
PartLayout LayOutPart(const Part& part, const LayerContext& c,
                      PageCursor& cursor, Bytes& basis_bytes) {
  const Codec& codec = part.codec();
  PartLayout layout;
  if (codec.has_dtype()) layout.dtype = codec.dtype();
  layout.bits.assign(codec.bits().schedule().begin(),
                     codec.bits().schedule().end());
  const int64_t param_bytes = codec.has_bits() && !codec.has_channel_static()
                                  ? DataTypeBytes(codec.param_dtype())
                                  : kExactNumberBytes;
  for (Latent& latent : LatentsOfRank(part, c)) {
    const StoredLatent stored = Store(codec, latent.width);
    GroupLayout group;
    group.heads = std::move(latent.heads);
    group.width = latent.width;
    group.stored_width =
        codec.has_basis_sequence() ? latent.width : stored.channels;
    group.codes = cursor.Take(c.options.page_tokens, stored.codes_bytes);
    group.params = cursor.Take(c.options.page_tokens, stored.params_bytes);
    layout.groups.push_back(std::move(group));
    if (codec.has_basis_sequence()) {
      basis_bytes.Add(stored.channels, latent.width, param_bytes);
      basis_bytes.Add(latent.width, param_bytes);  // the mean
    }
    if (codec.has_channel_sequence()) {
      basis_bytes.Add(2, stored.channels, param_bytes);
    }
  }
  return layout;
}

SideLayout LayOutSide(const SidePlan& side, const LayerContext& c,
                      PageCursor& cursor, Bytes& basis_bytes) {
  SideLayout layout;
  for (int p = 0; p < side.parts_size(); ++p) {
    layout.parts.push_back(LayOutPart(side.parts(p), c, cursor, basis_bytes));
    layout.parts.back().part_index = p;
  }
  layout.exact.window_tokens = side.exact_window();
  return layout;
}

template <typename Visit>
void ForGroups(SideLayout& side, const Visit& visit) {
  for (PartLayout& part : side.parts) {
    for (GroupLayout& group : part.groups) visit(group);
  }
}

int64_t ExactRowBytes(SideLayout& side) {
  int64_t bytes = 0;
  ForGroups(side, [&bytes](const GroupLayout& group) {
    bytes += group.stored_width * kExactNumberBytes;
  });
  return bytes;
}

// Regions of `rows` exact rows from a side page's start; the bytes they take.
int64_t PlaceExactRows(int64_t rows, SideLayout& side) {
  PageCursor cursor;
  ForGroups(side, [&](GroupLayout& group) {
    group.exact = cursor.Take(rows, group.stored_width * kExactNumberBytes);
  });
  return cursor.page_bytes();
}

// The ring of a side: as many whole rows to a side page as it can hold.
absl::Status LayOutExactWindow(int64_t page_bytes, int64_t first_page,
                               SideLayout& side) {
  ExactRing& ring = side.exact;
  if (ring.window_tokens == 0) return absl::OkStatus();
  const int64_t row_bytes = ExactRowBytes(side);
  int64_t rows = std::min(page_bytes / row_bytes, ring.window_tokens);
  while (rows > 0 && PlaceExactRows(rows, side) > page_bytes) --rows;
  if (rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an exact row of ", row_bytes, " bytes does not fit into a page of ",
        page_bytes, " bytes: raise page_tokens"));
  }
  ring.rows_per_page = rows;
  ring.first_page = first_page;
  ring.num_pages = (ring.window_tokens + rows - 1) / rows;
  return absl::OkStatus();
}

// Where a sequence keeps what it has beside its tokens: rings of the exact
// windows, then all else.
absl::Status LayOutSidePages(const Bytes& other_bytes, LayerLayout& layer) {
  layer.side_pages = 0;
  for (SideLayout* side : {&layer.key, &layer.value}) {
    KVASIR_RETURN_IF_ERROR(
        LayOutExactWindow(layer.page_bytes, layer.side_pages, *side));
    layer.side_pages += side->exact.num_pages;
  }
  layer.side_pages +=
      (other_bytes.value() + layer.page_bytes - 1) / layer.page_bytes;
  return absl::OkStatus();
}

// The finest sets of the rank's heads that no latent straddles.
int64_t FinestUnits(const LayerLayout& layer, base::HeadRange heads) {
  std::vector<int64_t> root(static_cast<size_t>(heads.count));
  std::iota(root.begin(), root.end(), int64_t{0});
  const auto find = [&root](int64_t head) {
    while (root[static_cast<size_t>(head)] != head) {
      head = root[static_cast<size_t>(head)];
    }
    return head;
  };
  for (const SideLayout* side : {&layer.key, &layer.value}) {
    for (const PartLayout& part : side->parts) {
      for (const GroupLayout& group : part.groups) {
        int64_t first = -1;
        for (int64_t head : group.heads) {
          if (!heads.Contains(head)) continue;
          const int64_t local = find(head - heads.first);
          if (first < 0) first = local;
          root[static_cast<size_t>(local)] = first;
        }
      }
    }
  }
  int64_t units = 0;
  for (int64_t h = 0; h < heads.count; ++h) units += find(h) == h ? 1 : 0;
  return units;
}

int64_t EvictionUnits(const Eviction& eviction, const LayerLayout& layer,
                      base::HeadRange heads, int64_t latent_bytes) {
  if (eviction.units().empty()) {
    const int64_t finest = FinestUnits(layer, heads);
    const bool cheap =
        finest * kUnitMetadataBytes * 100 < latent_bytes * kUnitMetadataPercent;
    return cheap ? finest : 1;
  }
  return std::count_if(
      eviction.units().begin(), eviction.units().end(),
      [heads](const Eviction::Unit& unit) {
        return std::any_of(
            unit.heads().begin(), unit.heads().end(),
            [heads](uint32_t head) { return heads.Contains(head); });
      });
}

absl::Status LayOutSelection(const Selection& selection, const LayerContext& c,
                             int64_t layer_index, PageCursor& cursor,
                             LayerLayout& layer, Bytes& outlier_bytes) {
  const int64_t chunk = selection.chunk_slots();
  if (c.options.page_tokens % chunk != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer_index, " selection: chunks of ", chunk,
                     " slots do not divide a page of ", c.options.page_tokens));
  }
  const StoredLatent landmark = Store(selection.landmark_codec(), c.head_dim);
  layer.landmarks = cursor.Take(
      c.options.page_tokens / chunk,
      c.kv_heads.count * (landmark.codes_bytes + landmark.params_bytes));
  if (selection.exact_outliers()) {
    Bytes row;  // key and value
    row.Add(2 * kExactNumberBytes, c.kv_heads.count, c.head_dim);
    outlier_bytes.Add(selection.outlier_chunks(), chunk, row.value());
  }
  return absl::OkStatus();
}

}  // namespace

int64_t AlignRegion(int64_t bytes) {
  return (bytes + kRegionAlignmentBytes - 1) / kRegionAlignmentBytes *
         kRegionAlignmentBytes;
}

absl::StatusOr<LayerLayout> LayOutLayer(const LayerPlan& plan,
                                        const LayerContext& context,
                                        int64_t layer_index) {
  LayerLayout layer;
  PageCursor cursor;
  Bytes other_bytes;  // per sequence, but for exact windows
  for (const Side which : {Side::kKey, Side::kValue}) {
    KVASIR_RETURN_IF_ERROR(CheckWidthsOfRank(
        which == Side::kKey ? plan.key() : plan.value(), context,
        absl::StrCat("layer ", layer_index, " ", SideName(which))));
  }
  layer.key = LayOutSide(plan.key(), context, cursor, other_bytes);
  layer.value = LayOutSide(plan.value(), context, cursor, other_bytes);
  const int64_t latent_bytes =
      cursor.payload_bytes() / context.options.page_tokens;
  if (plan.has_selection()) {
    KVASIR_RETURN_IF_ERROR(LayOutSelection(
        plan.selection(), context, layer_index, cursor, layer, other_bytes));
  }
  if (plan.has_eviction()) {
    const int64_t units =
        EvictionUnits(plan.eviction(), layer, context.kv_heads, latent_bytes);
    layer.slot_metadata =
        cursor.Take(context.options.page_tokens, units * kUnitMetadataBytes);
  }
  layer.page_bytes = cursor.page_bytes();
  layer.payload_bytes = cursor.payload_bytes();
  Bytes sequence_bytes = other_bytes;
  for (SideLayout* side : {&layer.key, &layer.value}) {
    sequence_bytes.Add(side->exact.window_tokens, ExactRowBytes(*side));
  }
  layer.sequence_bytes = sequence_bytes.value();
  if (layer.page_bytes > kMaxPageIdBytes ||
      layer.sequence_bytes > kMaxPageIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", layer_index, ": a page of ", context.options.page_tokens,
        " tokens or what a sequence keeps beside its tokens takes more than ",
        kMaxPageIdBytes, " bytes"));
  }
  const absl::Status side_pages = LayOutSidePages(other_bytes, layer);
  if (!side_pages.ok()) {
    return absl::Status(
        side_pages.code(),
        absl::StrCat("layer ", layer_index, ": ", side_pages.message()));
  }
  return layer;
}

}  // namespace kvasir::cache
