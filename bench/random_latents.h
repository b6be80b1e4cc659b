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

// Converts numbers to the form in which a device stores activations.
std::vector<std::byte> StoredNumbers(absl::Span<const float> numbers,
                                     kernels::DType dtype);

// Fills every slot of the first `num_pages` pages of a layer with normally
// distributed numbers, in the form that kv_append writes: numbers, or codes
// with their ranges. Static ranges of channels are taken to span three
// deviations. Returns kv_append's errors.
absl::Status FillWithRandomLatents(const worker::KvArenas::Layer& layer,
                                   int64_t num_pages, int64_t page_tokens,
                                   uint64_t seed, kernels::Device& device);

// Fills exact rows in every page, because it is not known yet which of them
// will be side pages. Codes that lie there become other codes, but random codes
// in a side page would be read as numbers that are not finite.
absl::Status FillWithRandomExactRows(const worker::KvArenas& arenas,
                                     const worker::KvArenas::Layer& layer,
                                     uint64_t seed, kernels::Device& device);

}  // namespace kvasir::bench
