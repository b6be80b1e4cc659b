// Checks latent parts and slot metadata. Every op on latents calls these
// functions before it reads or writes anything.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// Checks that a part obeys latent_view.h: its runs, static ranges, slots, tiles
// and granules. Reads only the tables, not the pages.
//
// Errors: INVALID_ARGUMENT; the text names the op, the value and the limit.
absl::Status CheckLatentPart(const char* op, const LatentPart& part,
                             int64_t page_tokens, int64_t device_granule);

// Checks that the metadata of a layer with units obeys slot_metadata.h: its
// planes do not overlap and are inside a page of `page_tokens` slots.
absl::Status CheckSlotMetadata(const char* op, const SlotMetadata& metadata,
                               int64_t page_tokens);

}  // namespace kvasir::kernels
