// Test support: a CPU device whose memory the host cannot access.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

// The device's memory is PROT_NONE except during launches, uploads and
// read-backs and between BeginWrite and EndWrite, so the host dies by a signal
// if it reads it at another time. If the parameters of a launch point to other
// memory, the process ends with a message. It costs two more system calls per
// launch than a CpuDevice.
//
// `pool` must outlive it.
std::unique_ptr<Device> MakeStrictDevice(base::ThreadPool* pool,
                                         CpuBackend backend = CpuBackend::kSimd,
                                         int64_t memory_limit_bytes = 0);

}  // namespace kvasir::kernels
