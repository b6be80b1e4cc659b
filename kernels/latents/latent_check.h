// What every op that touches latents asks of a part before it reads a byte.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// The contract of latent_view.h: runs cover their latent, static ranges have
// both halves and codes to belong to, slots do not overlap and end inside their
// tile, pages of `page_tokens` slots have whole tiles. A region's granule is 0
// or the device's, of ranges at most kMostParamGranuleBytes. Looks at the
// tables alone. Errors: INVALID_ARGUMENT that names op, group, value and limit.
absl::Status CheckLatentPart(const char* op, const LatentPart& part,
                             int64_t page_tokens, int64_t device_granule);

// That of slot_metadata.h, for a layer with units: planes lie apart inside a
// page of as many slots.
absl::Status CheckSlotMetadata(const char* op, const SlotMetadata& metadata,
                               int64_t page_tokens);

}  // namespace kvasir::kernels
