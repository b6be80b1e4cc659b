// Lays out the pages of layers; the arithmetic below PageLayout.
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

// All layers on the rank that has these of the model's heads, exact rows of a
// page group shared out over its layers' arenas. INVALID_ARGUMENT names the
// layer when a size exceeds kMaxPageIdBytes or a selection's chunk does not
// divide the page.
absl::StatusOr<std::vector<LayerLayout>> LayOutLayers(
    const plan::ResolvedPlan& plan, const PageFormat& format,
    plan::HeadRange kv_heads);

}  // namespace kvasir::cache
