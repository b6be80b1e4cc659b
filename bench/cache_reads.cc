#include "bench/cache_reads.h"

#include <algorithm>

#include "cache/eviction/eviction_schedule.h"

namespace kvasir::bench {
namespace {

// The bytes of a token that is stored exactly, as 16-bit numbers; 0 for values
// that are stored together with the keys.
double ExactRowBytes(const cache::SideLayout& side) {
  const bool of_keys = !side.parts.empty() && side.parts.front().of_keys;
  return of_keys ? 0.0 : static_cast<double>(side.exact.row_bytes);
}

}  // namespace

double CacheBytesRead(const cache::PageLayout& layout, int64_t length_tokens,
                      int64_t prompt_tokens) {
  double bytes = 0;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    const int64_t visible = group.sliding_window > 0
                                ? std::min(length_tokens, group.sliding_window)
                                : length_tokens;
    const bool evicts = group.eviction.evicts() && prompt_tokens > 0;
    const int64_t tokens =
        evicts ? cache::EvictionSchedule(group.eviction, prompt_tokens)
                     .SlotsBefore(length_tokens)
               : visible;
    bytes += static_cast<double>(tokens) *
             static_cast<double>(group.payload_bytes) /
             static_cast<double>(layout.page_tokens());
    for (const int64_t layer : group.layers) {
      for (const plan::Side which : {plan::Side::kKey, plan::Side::kValue}) {
        const cache::SideLayout& side = layout.layer(layer).side(which);
        const int64_t sinks = std::max<int64_t>(
            0, side.exact.sink_tokens - (length_tokens - visible));
        const int64_t exact =
            std::min(tokens, sinks + side.exact.window_tokens);
        if (exact == 0) continue;
        bytes +=
            static_cast<double>(exact) *
            (ExactRowBytes(side) - layout.PayloadBytesPerToken(layer, which));
      }
    }
  }
  return bytes;
}

}  // namespace kvasir::bench
