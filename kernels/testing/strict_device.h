// Test support: a CPU device whose memory the host cannot access.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// Makes the device. Its memory is PROT_NONE except during launches, uploads and
// read-backs, and between BeginWrite and EndWrite. So a test dies by a signal
// if it accesses this memory at another time. If the parameters of a launch
// point to other memory, the process ends with a message.
//
// `pool` must outlive the device.
std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend = CpuBackend::kSimd,
                                         int64_t memory_limit_bytes = 0);

}  // namespace kvasir::kernels
