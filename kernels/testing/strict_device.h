// Test support: a CPU device whose memory the host cannot access.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// Makes the device. The host can access its memory only during launches,
// uploads and read-backs, and between BeginWrite and EndWrite. At other
// times the memory is PROT_NONE, so a test that accesses it dies by a
// signal. If the parameters of a launch point to other memory, the process
// ends with a message.
//
// `pool` must outlive the device.
std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend = CpuBackend::kSimd,
                                         int64_t memory_limit_bytes = 0);

}  // namespace kvasir::kernels
