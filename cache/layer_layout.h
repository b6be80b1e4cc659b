// Lays out the page of one layer; the arithmetic below PageLayout.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "cache/layout.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cache {

struct LayerContext {
  LayoutOptions options;
  base::HeadRange kv_heads;  // of the rank
  int64_t num_kv_heads = 0;  // of the model
  int64_t head_dim = 0;
};

// The next multiple of kRegionAlignmentBytes.
int64_t AlignRegion(int64_t bytes);

// `plan` has passed ValidatePlan; page_group is left unset. INVALID_ARGUMENT
// names the layer when a size exceeds kMaxPageIdBytes, an exact row is longer
// than a page, or a selection's chunk does not divide the page, or the schedule
// or range group of a basis of the rank's own heads its width.
absl::StatusOr<LayerLayout> LayOutLayer(const kvasir::v1::LayerPlan& plan,
                                        const LayerContext& context,
                                        int64_t layer);

}  // namespace kvasir::cache
