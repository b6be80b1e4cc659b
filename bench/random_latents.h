// Fills pages with random latents, for measurements of a cache whose content
// does not matter as long as it is not all alike.
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

// The stored form of numbers, as a device's activations lie.
std::vector<std::byte> StoredNumbers(absl::Span<const float> numbers,
                                     kernels::DType dtype);

// Every slot of the first `num_pages` pages of a layer gets numbers of a normal
// distribution, as kv_append writes them: numbers, or codes with their ranges
// (channels' own ranges are taken to span three deviations). kv_append's
// errors.
absl::Status FillWithRandomLatents(const worker::KvArenas::Layer& layer,
                                   int64_t num_pages, int64_t page_tokens,
                                   uint64_t seed, kernels::Device& device);

// The same for its exact rows, in every page: which of them will be side pages
// is not known yet. Codes that lie there become other codes, but a side page
// full of random codes would be read as numbers that are not finite.
absl::Status FillWithRandomExactRows(const worker::KvArenas& arenas,
                                     const worker::KvArenas::Layer& layer,
                                     uint64_t seed, kernels::Device& device);

}  // namespace kvasir::bench
