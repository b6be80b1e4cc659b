// Ops that evict slots from a layer. The contract of every op:
// kernels/README.md.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/eviction/evict_compact.h"
#include "kernels/eviction/evict_select.h"

namespace kvasir::kernels {

// A part of the layer with the unit of each of its groups [G].
struct EvictPart {
  LatentPart latents;
  const int32_t* unit_of_group = nullptr;
};

// Both ops of a layer.
struct PreparedEviction {
  explicit PreparedEviction(Device* device) : tables(device) {}
  SlotMetadata metadata;
  EvictCompactParams compact;  // all but what a step gives
  DeviceTables tables;
};

// `parts`: those that store latents (a joint part once), host memory, which is
// copied.
absl::StatusOr<PreparedEviction> Prepare(Device& device,
                                         const SlotMetadata& metadata,
                                         absl::Span<const EvictPart> parts);

// A step's evictions of a page group, for all its layers.
struct EvictionStep {
  int64_t most_slots = 0;  // of an eviction
  // From the first to the last kept slot of a list, for `num_units` units.
  int64_t kept_slots = 0;
};
// Looks at counts alone. INVALID_ARGUMENT that names the eviction, the value
// and the limit.
absl::StatusOr<EvictionStep> CheckEvictions(
    int64_t num_units, absl::Span<const Eviction> evictions);

// What a step gives.
struct EvictionRows {
  DevicePtr<const Eviction> evictions;
  int64_t num_evictions = 0;
  DevicePtr<int32_t> kept_slots;
};
// `step`: of these evictions. Workspace: 8 bytes per slot and thread.
absl::Status EvictSelect(Stream& stream, const PreparedEviction& prepared,
                         const EvictionRows& rows, const EvictionStep& step,
                         Workspace& workspace);
absl::Status EvictCompact(Stream& stream, const PreparedEviction& prepared,
                          const EvictionRows& rows, Workspace& workspace);

}  // namespace kvasir::kernels
