// Test support: a CPU device whose memory the host cannot touch.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// Its memory is PROT_NONE but inside of launches, uploads, read-backs and
// between BeginWrite and EndWrite, so that a host which reads it in between
// ends by a signal. A launch whose parameters name other memory ends the
// process by a message. Slower than a CpuDevice by two system calls a launch.
//
// `pool` outlives it.
std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend = CpuBackend::kSimd,
                                         int64_t memory_limit_bytes = 0);

}  // namespace kvasir::kernels
