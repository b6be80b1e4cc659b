#include "cache/pages/kv_cache_config.h"

#include <utility>

#include "base/check.h"

namespace kvasir::cache {

KvCacheConfig MakeKvCacheConfig(const PageLayout& layout,
                                const PageCounts& pages, std::string cache_id,
                                const PageCounts& host_pages) {
  KVASIR_CHECK(pages.size() == layout.page_groups().size());
  KVASIR_CHECK(host_pages.empty() || host_pages.size() == pages.size());
  KvCacheConfig config;
  config.page_tokens = layout.page_tokens();
  config.cache_id = std::move(cache_id);
  config.prefix_reuse = layout.prefix_reusable();
  for (const PageGroupLayout& group : layout.page_groups()) {
    const auto g = static_cast<size_t>(group.id.value());
    config.groups.push_back(
        {.num_pages = pages[g],
         .sliding_window = group.sliding_window,
         .side_pages_per_sequence = group.side_pages_per_sequence,
         .eviction = group.eviction,
         .page_bytes = group.page_bytes,
         .payload_bytes = group.payload_bytes,
         .side_payload_bytes = group.side_payload_bytes,
         .num_host_pages = host_pages.empty() ? 0 : host_pages[g]});
  }
  return config;
}

}  // namespace kvasir::cache
