// Helper of PageLayout: lays out the page of each layer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/layout/layout.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"

namespace kvasir::cache {

// The next multiple of kRegionAlignmentBytes.
int64_t AlignRegion(int64_t bytes);

// The layouts of all layers on the rank that holds `kv_heads`. The exact rows
// of a page group are distributed over its layers' arenas. Returns
// INVALID_ARGUMENT, which names the layer, if a size exceeds kMaxPageIdBytes,
// or if page_tokens is not a multiple of the chunk size of
// attention's selection.
absl::StatusOr<std::vector<LayerLayout>> LayOutLayers(
    const plan::ResolvedPlan& plan, const PageFormat& format,
    plan::HeadRange kv_heads);

}  // namespace kvasir::cache
