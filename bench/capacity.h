// How many sequences of a length a page pool holds: by the layout, and by the
// scheduler and the cache manager over arenas that are really there.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::worker {

struct CapacityOptions {
  int64_t pool_bytes = 0;  // at most
  int64_t sequence_tokens = 0;
  int64_t page_tokens = 64;
};

struct Capacity {
  double kv_bytes_per_token = 0;  // of the arenas, as allocated
  int64_t pool_pages = 0;
  int64_t pool_bytes = 0;          // by the allocator's counter
  int64_t predicted = 0;           // sequences
  int64_t reached = 0;             // sequences
  int64_t bytes_per_sequence = 0;  // by the layout
  // Of pages held then, also by one that lacks the page of its last token.
  int64_t held_bytes = 0;
};

// Allocates and touches the arenas, lets the scheduler admit prompts of one
// token less until the next one does not fit, and decodes a token of each; no
// layer runs. INVALID_ARGUMENT for sizes out of range, UNIMPLEMENTED for a plan
// that is not served, RESOURCE_EXHAUSTED without memory.
absl::StatusOr<Capacity> MeasureCapacity(const model::DecoderSpec& spec,
                                         const kvasir::v1::KvPlan& plan,
                                         const CapacityOptions& options);

}  // namespace kvasir::worker
