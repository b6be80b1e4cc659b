// A CPU device whose pages are divided into granules, like a GPU's. It runs the
// scalar reference back end, which reads and writes any page layout with the
// same results.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/device/device.h"

namespace kvasir::kernels {

class GranuleDevice final : public CpuDevice {
 public:
  // `pool` must outlive the device.
  GranuleDevice(base::ThreadPool* pool, int64_t granule_bytes,
                int64_t limit_bytes = 0)
      : CpuDevice(pool, CpuBackend::kReference, limit_bytes),
        granule_bytes_(granule_bytes) {}

  int64_t page_granule_bytes() const override { return granule_bytes_; }

 private:
  const int64_t granule_bytes_;
};

}  // namespace kvasir::kernels
