// Upload and ReadBack: copies from host to device memory and back. ReadBack is
// the only way for the host to see the results of ops.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "kernels/device/device_observer.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/stream.h"

namespace kvasir::kernels {

// Waits for earlier work and copies `bytes` from the device. If any of that
// work failed, returns its error.
inline absl::Status ReadBack(Stream& stream, void* host,
                             DevicePtr<const void> device, size_t bytes) {
  KVASIR_RETURN_IF_ERROR(stream.Synchronize());
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnReadBack(bytes);
  }
  return bytes > 0 ? stream.CopyToHost(host, device, bytes) : absl::OkStatus();
}

// Enqueues a copy to the device; `host` may be reused after the call.
inline absl::Status Upload(Stream& stream, DevicePtr<void> device,
                           const void* host, size_t bytes) {
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnUpload(bytes);
  }
  return bytes > 0 ? stream.CopyToDevice(device, host, bytes)
                   : absl::OkStatus();
}

}  // namespace kvasir::kernels
