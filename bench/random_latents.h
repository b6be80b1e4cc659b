// Fills pages with random latents, for measurements that need a cache with
// varied but arbitrary content.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"
#include "kernels/device/dtype.h"
#include "kernels/latents/latent_view.h"
#include "worker/executor/pages/kv_arenas.h"

namespace kvasir::bench {

// Converts numbers to `dtype` and returns the bytes of the results.
std::vector<std::byte> StoredNumbers(absl::Span<const float> numbers,
                                     kernels::DType dtype);

// Fills every slot of the first `num_pages` pages of a layer with normally
// distributed numbers. They are stored as kv_append stores them: unquantized,
// or as codes with their ranges. Static ranges of channels are set to three
// deviations on each side of 0. Returns the errors of kv_append.
absl::Status FillWithRandomLatents(const worker::KvArenas::Layer& layer,
                                   int64_t num_pages, int64_t page_tokens,
                                   uint64_t seed, kernels::Device& device);

// Writes random exact rows into every page, because any page may become a side
// page, which holds exact rows instead of codes. Without them, random codes in
// a side page would be read as 16-bit numbers, some of which are not finite. In
// pages that stay pages of codes, this changes some codes to other valid ones.
absl::Status FillWithRandomExactRows(const worker::KvArenas& arenas,
                                     const worker::KvArenas::Layer& layer,
                                     uint64_t seed, kernels::Device& device);

}  // namespace kvasir::bench
