#include "server/inspect/cache_bytes.h"

#include <algorithm>

#include "cache/eviction/eviction_schedule.h"

namespace kvasir::cli {
namespace {

// The bytes of a page by purpose, summed over all layers of the page's group.
struct PageParts {
  int64_t key_codes = 0;    // per slot
  int64_t value_codes = 0;  // per slot
  int64_t parameters = 0;   // per slot
  int64_t annotations = 0;  // per page
  int64_t padding = 0;      // per page
};

int64_t SlotBytes(const cache::Region& region) {
  return region.num_slots > 0 ? region.slot_bytes : 0;
}

PageParts PartsOf(const cache::PageLayout& layout,
                  const cache::PageGroupLayout& group) {
  PageParts parts;
  for (const int64_t index : group.layers) {
    const cache::LayerLayout& layer = layout.layer(index);
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      int64_t& codes =
          side == plan::Side::kKey ? parts.key_codes : parts.value_codes;
      for (const cache::PartLayout& part : layer.side(side).parts) {
        if (part.of_keys) continue;
        for (const cache::GroupLayout& latent : part.groups) {
          codes += SlotBytes(latent.codes);
          parts.parameters += SlotBytes(latent.params);
        }
      }
    }
    parts.annotations +=
        layer.landmarks.size_bytes() + layer.slot_metadata.size_bytes();
    parts.padding += layer.page_bytes - layer.payload_bytes;
  }
  return parts;
}

}  // namespace

CacheBytes<double> BytesOfToken(const cache::PageLayout& layout) {
  CacheBytes<double> bytes;
  const auto page_tokens = static_cast<double>(layout.page_tokens());
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    const PageParts parts = PartsOf(layout, group);
    bytes.key_codes += static_cast<double>(parts.key_codes);
    bytes.value_codes += static_cast<double>(parts.value_codes);
    bytes.parameters += static_cast<double>(parts.parameters);
    bytes.annotations += static_cast<double>(parts.annotations) / page_tokens;
    bytes.padding += static_cast<double>(parts.padding) / page_tokens;
  }
  return bytes;
}

CacheBytes<int64_t> BytesOfSequence(const cache::PageLayout& layout,
                                    int64_t length_tokens,
                                    int64_t chunk_tokens) {
  CacheBytes<int64_t> bytes;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    const PageParts parts = PartsOf(layout, group);
    const int64_t pages =
        layout.PagesHeld(group.id, length_tokens, chunk_tokens) -
        group.side_pages_per_sequence;
    const int64_t slots =
        std::min(cache::MostSlots(group.eviction, length_tokens),
                 pages * layout.page_tokens());
    bytes.key_codes += slots * parts.key_codes;
    bytes.value_codes += slots * parts.value_codes;
    bytes.parameters += slots * parts.parameters;
    bytes.annotations += pages * parts.annotations;
    bytes.padding += pages * parts.padding;
    bytes.unfilled += (pages * layout.page_tokens() - slots) *
                      (parts.key_codes + parts.value_codes + parts.parameters);
    bytes.per_sequence += group.side_pages_per_sequence * group.page_bytes;
  }
  return bytes;
}

}  // namespace kvasir::cli
