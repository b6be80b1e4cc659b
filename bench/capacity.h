// Determines how many sequences of a given length a page pool holds: computed
// from the layout, and measured with the real scheduler, cache and arenas.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::worker {

struct CapacityOptions {
  int64_t pool_bytes = 0;  // the pool takes at most this many
  int64_t sequence_tokens = 0;
  int64_t page_tokens = 64;
};

struct Capacity {
  double kv_bytes_per_token = 0;  // bytes of the allocated arenas, per token
  int64_t pool_pages = 0;
  int64_t pool_bytes = 0;  // allocated bytes, by the allocator's counter
  int64_t predicted = 0;   // the number of sequences that should fit
  int64_t reached = 0;     // the number of sequences that did fit
  int64_t bytes_per_sequence = 0;  // computed from the layout
  // The bytes of all pages that sequences hold at the end, including those of a
  // sequence that has no page for its last token.
  int64_t held_bytes = 0;
};

// Allocates the pool and writes to all of its memory. The scheduler admits
// prompts that are one token shorter than sequence_tokens until no more fit,
// and then decodes one token of each; no model runs. INVALID_ARGUMENT for sizes
// out of range, UNIMPLEMENTED for a plan that cannot be served,
// RESOURCE_EXHAUSTED if there is too little memory.
absl::StatusOr<Capacity> MeasureCapacity(const model::DecoderSpec& spec,
                                         const kvasir::v1::KvPlan& plan,
                                         const CapacityOptions& options);

}  // namespace kvasir::worker
