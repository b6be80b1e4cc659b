// Lays out the page of one layer; the arithmetic below PageLayout.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "cache/layout.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"

namespace kvasir::cache {

// The next multiple of kRegionAlignmentBytes.
int64_t AlignRegion(int64_t bytes);

// On the rank that has these of the model's heads. INVALID_ARGUMENT names the
// layer when a size exceeds kMaxPageIdBytes or a selection's chunk does not
// divide the page.
absl::StatusOr<LayerLayout> LayOutLayer(const plan::ResolvedPlan& plan,
                                        int64_t layer, const PageFormat& format,
                                        plan::HeadRange kv_heads);

}  // namespace kvasir::cache
