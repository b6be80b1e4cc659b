// Host functions of the ops that evict slots from a layer. kernels/README.md
// has the contract of every op.
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

// A part of the layer, and the unit to which each of its groups [G] belongs.
struct EvictPart {
  LatentPart latents;
  const int32_t* unit_of_group = nullptr;
};

// The parameters of evict_select and evict_compact for one layer. They do not
// change after load.
struct PreparedEviction {
  explicit PreparedEviction(Device* device) : tables(device) {}
  SlotMetadata metadata;
  EvictCompactParams compact;  // everything except the arguments of a step
  DeviceTables tables;
};

// Prepares both ops for a layer. `parts` are the parts that store latents, in
// host memory; they are copied. A joint part, which serves as keys and as
// values, is listed once.
absl::StatusOr<PreparedEviction> Prepare(Device& device,
                                         const SlotMetadata& metadata,
                                         absl::Span<const EvictPart> parts);

// The sizes of all evictions of a step in one page group, which are the same
// for all layers of the group.
struct EvictionStep {
  int64_t most_slots = 0;  // the most slots of a sequence before its eviction
  // The length of EvictSelectParams::kept_slots, for all evictions together.
  int64_t kept_slots = 0;
};
// Checks the counts and weights in a step's evictions, but does not read the
// block tables to which they point. Returns INVALID_ARGUMENT if one is out of
// range; the text names the eviction, the value and the limit.
absl::StatusOr<EvictionStep> CheckEvictions(
    int64_t num_units, absl::Span<const Eviction> evictions);

// The arguments of both ops that change with every step.
struct EvictionRows {
  DevicePtr<const Eviction> evictions;
  int64_t num_evictions = 0;
  DevicePtr<int32_t> kept_slots;
};
// `step` must be the result of CheckEvictions for these evictions. The
// workspace takes 8 bytes per slot and thread.
absl::Status EvictSelect(Stream& stream, const PreparedEviction& prepared,
                         const EvictionRows& rows, const EvictionStep& step,
                         Workspace& workspace);
absl::Status EvictCompact(Stream& stream, const PreparedEviction& prepared,
                          const EvictionRows& rows, Workspace& workspace);

}  // namespace kvasir::kernels
