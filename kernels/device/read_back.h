// The two ways between host and device memory. Nothing else lets the host see
// what an op computed.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

namespace kvasir::kernels {

// Waits for what was enqueued before, then copies `bytes` from the device.
// Returns what any of those ops failed with.
absl::Status ReadBack(Stream& stream, void* host, const void* device,
                      size_t bytes);

// Enqueues a copy to the device; `host` may be reused when the call returns.
absl::Status Upload(Stream& stream, void* device, const void* host,
                    size_t bytes);

}  // namespace kvasir::kernels
