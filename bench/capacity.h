// The number of sequences of a length that a page pool holds: computed from the
// layout, and measured with the scheduler and the cache manager over real
// arenas.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::worker {

struct CapacityOptions {
  int64_t pool_bytes = 0;  // upper bound
  int64_t sequence_tokens = 0;
  int64_t page_tokens = 64;
};

struct Capacity {
  double kv_bytes_per_token = 0;  // of the arenas, as allocated
  int64_t pool_pages = 0;
  int64_t pool_bytes = 0;          // from the allocator's counter
  int64_t predicted = 0;           // sequences, computed
  int64_t reached = 0;             // sequences, measured
  int64_t bytes_per_sequence = 0;  // from the layout
  // Bytes of the pages held then, also by a sequence that lacks the page of its
  // last token.
  int64_t held_bytes = 0;
};

// Allocates and touches the arenas. The scheduler admits prompts of one token
// less until the next one does not fit, then decodes a token of each; no layer
// runs. INVALID_ARGUMENT for sizes out of range, UNIMPLEMENTED for a plan that
// cannot be served, RESOURCE_EXHAUSTED if memory is short.
absl::StatusOr<Capacity> MeasureCapacity(const model::DecoderSpec& spec,
                                         const kvasir::v1::KvPlan& plan,
                                         const CapacityOptions& options);

}  // namespace kvasir::worker
