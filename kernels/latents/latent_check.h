// The checks that every op on latents makes before it reads a byte.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// Checks the contract of latent_view.h: runs cover their latent; static ranges
// have both arrays and belong to codes; slots do not overlap and end inside
// their tile; pages of `page_tokens` slots have whole tiles. A region's granule
// is 0 or the device's, and a granule of ranges has at most
// kMostParamGranuleBytes. Reads only the tables. Errors: INVALID_ARGUMENT that
// names op, group, value and limit.
absl::Status CheckLatentPart(const char* op, const LatentPart& part,
                             int64_t page_tokens, int64_t device_granule);

// Checks the contract of slot_metadata.h for a layer with units: planes do not
// overlap and lie inside a page of `page_tokens` slots.
absl::Status CheckSlotMetadata(const char* op, const SlotMetadata& metadata,
                               int64_t page_tokens);

}  // namespace kvasir::kernels
