#include "cache/layout/layer_layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/layout/exact_rows.h"

namespace kvasir::cache {
namespace {

// A sum of byte counts. Add() adds the product of its arguments. An overflow is
// recorded and does not wrap around.
class Bytes {
 public:
  void Add(int64_t a, int64_t b = 1, int64_t c = 1) {
    int64_t product = 0;
    overflow_ = overflow_ || __builtin_mul_overflow(a, b, &product) ||
                __builtin_mul_overflow(product, c, &product) ||
                __builtin_add_overflow(value_, product, &value_);
  }
  // The sum. After an overflow it is kMaxPageIdBytes + 1, which is above every
  // limit.
  int64_t value() const {
    return overflow_ ? kMaxPageIdBytes + 1
                     : std::min(value_, kMaxPageIdBytes + 1);
  }

 private:
  int64_t value_ = 0;
  bool overflow_ = false;
};

// Places the regions of a tile or page one after another.
class RegionCursor {
 public:
  // Places the next region. Each slot uses `slot_bytes` and occupies
  // `stored_bytes`, including padding.
  Region Take(int64_t num_slots, int64_t slot_bytes, int64_t stored_bytes) {
    if (slot_bytes == 0 || num_slots == 0) return Region{};
    Region region{offset_.value(), slot_bytes, stored_bytes, num_slots};
    Bytes size;
    size.Add(num_slots, stored_bytes);
    payload_.Add(num_slots, slot_bytes);
    offset_.Add(AlignRegion(size.value()));
    return region;
  }
  Region Take(int64_t num_slots, int64_t slot_bytes) {
    return Take(num_slots, slot_bytes, slot_bytes);
  }
  void TakeTiles(int64_t count, const RegionCursor& tile) {
    offset_.Add(count, tile.bytes());
    payload_.Add(count, tile.payload_bytes());
  }
  int64_t bytes() const { return offset_.value(); }
  int64_t payload_bytes() const { return payload_.value(); }

 private:
  Bytes offset_;
  Bytes payload_;
};

// The inputs that all parts of a layer's layout need.
struct LayerContext {
  PageFormat format;
  int64_t tile_slots = 0;
  plan::HeadRange kv_heads;  // the heads that this rank holds
  int64_t head_dim = 0;
};

int64_t Granules(int64_t bytes, int64_t granule) {
  return granule == 0 ? bytes : (bytes + granule - 1) / granule * granule;
}

// Lays out a part in a tile. If each sequence has its own basis, mean or
// ranges, their size is added to `basis_bytes`.
PartLayout LayOutPart(const plan::ResolvedPart& part, const LayerContext& c,
                      RegionCursor& cursor, Bytes& basis_bytes) {
  PartLayout layout;
  layout.part_index = part.index;
  layout.dtype = part.dtype;
  const int64_t param_bytes =
      part.param_dtype == kvasir::v1::DATA_TYPE_UNSPECIFIED
          ? kExactNumberBytes
          : plan::DataTypeBytes(part.param_dtype);
  for (size_t g = 0; g < part.latents.size(); ++g) {
    const plan::ResolvedLatent& latent = part.latents[g];
    if (!part.Holds(latent, c.kv_heads)) continue;
    const int64_t stored = latent.stored_channels();
    GroupLayout group;
    group.latent = static_cast<int64_t>(g);
    group.heads = latent.heads;
    group.width = latent.width;
    group.stored_width = latent.channels;
    const int64_t codes_bytes = part.CodesBytes(latent);
    const int64_t params_bytes = part.ParamsBytes(latent);
    group.codes = cursor.Take(c.tile_slots, codes_bytes,
                              Granules(codes_bytes, c.format.granule_bytes));
    group.params =
        cursor.Take(c.tile_slots, params_bytes,
                    Granules(params_bytes, c.format.param_granule_bytes()));
    layout.groups.push_back(std::move(group));
    if (part.transform == plan::Transform::kBasisSequence) {
      basis_bytes.Add(stored, latent.width, param_bytes);
      basis_bytes.Add(latent.width, param_bytes);  // the mean
    }
    if (part.range == plan::RangeKind::kSequence) {
      basis_bytes.Add(2, stored, param_bytes);
    }
  }
  return layout;
}

SideLayout LayOutSide(const plan::ResolvedSide& side, const LayerContext& c,
                      RegionCursor& cursor, Bytes& basis_bytes) {
  SideLayout layout;
  for (const plan::ResolvedPart& part : side.parts) {
    if (!part.stores_latents()) continue;
    layout.parts.push_back(LayOutPart(part, c, cursor, basis_bytes));
  }
  if (!layout.parts.empty()) {
    layout.exact.sink_tokens = side.exact_sinks;
    layout.exact.window_tokens = side.exact_window;
  }
  if (layout.exact.any()) LayOutExactRow(layout);
  return layout;
}

// If a joint part serves keys and values, copies its layout from the keys to
// the values. The joint part is the values' only part and the keys' last part.
void ShareJointPart(const plan::ResolvedAttention& attention,
                    LayerLayout& layer) {
  const plan::ResolvedPart& value = attention.value.parts[0];
  if (value.stores_latents()) return;
  layer.value.parts = {layer.key.parts.back()};
  layer.value.parts[0].part_index = value.index;
  layer.value.parts[0].of_keys = true;
  layer.value.exact = layer.key.exact;
}

// The number of eviction units (KV heads that evict the same tokens) with at
// least one head on this rank.
int64_t UnitsOfRank(const plan::ResolvedEviction& eviction,
                    plan::HeadRange heads) {
  return std::count_if(eviction.units.begin(), eviction.units.end(),
                       [heads](const std::vector<int64_t>& unit) {
                         return std::any_of(unit.begin(), unit.end(),
                                            [heads](int64_t head) {
                                              return heads.Contains(head);
                                            });
                       });
}

SlotMetadataLayout LayOutSlotMetadata(const plan::ResolvedEviction& eviction,
                                      const plan::ResolvedAttention& attention,
                                      const LayerContext& c,
                                      RegionCursor& cursor) {
  SlotMetadataLayout layout;
  layout.num_units = UnitsOfRank(eviction, c.kv_heads);
  const int64_t slots = layout.num_units * c.format.page_tokens;
  layout.scores = cursor.Take(slots, sizeof(float));
  layout.positions = cursor.Take(slots, sizeof(uint32_t));
  if (attention.key.has_codes()) layout.key_errors = cursor.Take(slots, 1);
  if (attention.value.has_codes()) {
    layout.value_errors = cursor.Take(slots, 1);
  }
  return layout;
}

absl::Status LayOutSelection(const plan::ResolvedSelection& selection,
                             const LayerContext& c, int64_t layer_index,
                             RegionCursor& cursor, LayerLayout& layer,
                             Bytes& outlier_bytes) {
  const int64_t chunk = selection.chunk_slots;
  if (c.format.page_tokens % chunk != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", layer_index, ": a page of ", c.format.page_tokens,
        " slots cannot be divided into selection chunks of ", chunk, " slots"));
  }
  layer.landmarks = cursor.Take(c.format.page_tokens / chunk,
                                c.kv_heads.count * selection.landmark_bytes);
  if (selection.exact_outliers) {
    Bytes row;  // the bytes of a token's key and value in this layer
    row.Add(2 * kExactNumberBytes, c.kv_heads.count, c.head_dim);
    outlier_bytes.Add(selection.outlier_chunks, chunk, row.value());
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerLayout> LayOutLayer(const plan::ResolvedPlan& plan,
                                        int64_t layer_index,
                                        const PageFormat& format,
                                        plan::HeadRange kv_heads) {
  const plan::ResolvedAttention& attention = plan.attention_of(layer_index);
  const plan::ResolvedLayer& resolved = plan.layer(layer_index);
  const int64_t page_tokens = format.page_tokens;
  const int64_t tile_slots = std::min(page_tokens, kTileSlots);
  const LayerContext context{format, tile_slots, kv_heads, plan.shape.head_dim};
  LayerLayout layer;
  layer.page_group = PageGroupId(resolved.page_group);
  RegionCursor tile;
  // bytes of one sequence in addition to its token pages and exact rows
  Bytes other_bytes;
  layer.key = LayOutSide(attention.key, context, tile, other_bytes);
  layer.value = LayOutSide(attention.value, context, tile, other_bytes);
  layer.tile_bytes = tile.bytes();
  RegionCursor cursor;
  cursor.TakeTiles(page_tokens / tile_slots, tile);
  if (resolved.selection.has_value()) {
    KVASIR_RETURN_IF_ERROR(LayOutSelection(
        *resolved.selection, context, layer_index, cursor, layer, other_bytes));
  }
  if (resolved.eviction.has_value()) {
    layer.slot_metadata =
        LayOutSlotMetadata(*resolved.eviction, attention, context, cursor);
  }
  layer.page_bytes = cursor.bytes();
  layer.payload_bytes = cursor.payload_bytes();
  Bytes sequence_bytes = other_bytes;
  for (SideLayout* side : {&layer.key, &layer.value}) {
    sequence_bytes.Add(side->exact.tokens(), side->exact.row_bytes);
  }
  layer.sequence_bytes = sequence_bytes.value();
  if (layer.page_bytes > kMaxPageIdBytes ||
      layer.sequence_bytes > kMaxPageIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer_index, ": ",
                     layer.page_bytes > kMaxPageIdBytes
                         ? absl::StrCat("a page of ", page_tokens, " tokens")
                         : "the data that a sequence needs besides its token "
                           "pages",
                     " takes more than the limit of ", kMaxPageIdBytes,
                     " bytes; use smaller pages or a plan that stores less"));
  }
  layer.side_pages = CeilDiv(other_bytes.value(), layer.page_bytes);
  return layer;
}

}  // namespace

int64_t AlignRegion(int64_t bytes) {
  return CeilDiv(bytes, kRegionAlignmentBytes) * kRegionAlignmentBytes;
}

absl::StatusOr<std::vector<LayerLayout>> LayOutLayers(
    const plan::ResolvedPlan& plan, const PageFormat& format,
    plan::HeadRange kv_heads) {
  std::vector<LayerLayout> layers;
  for (int64_t l = 0; l < plan.num_layers(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(LayerLayout layer,
                            LayOutLayer(plan, l, format, kv_heads));
    layers.push_back(std::move(layer));
  }
  for (const plan::ResolvedPageGroup& group : plan.page_groups) {
    PlaceExactRows(group.layers, layers);
  }
  for (int64_t l = 0; l < plan.num_layers(); ++l) {
    ShareJointPart(plan.attention_of(l), layers[static_cast<size_t>(l)]);
  }
  return layers;
}

}  // namespace kvasir::cache
