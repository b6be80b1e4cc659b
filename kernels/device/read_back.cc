#include "kernels/device/read_back.h"

#include <cstring>

#include "base/status_macros.h"
#include "kernels/device/device_observer.h"

namespace kvasir::kernels {
namespace {

absl::Status NoBackEnd(const char* op) {
  return absl::UnimplementedError(std::string(op) +
                                  ": this build has no CUDA back end");
}

}  // namespace

absl::Status ReadBack(Stream& stream, void* host, const void* device,
                      size_t bytes) {
  if (stream.device() != DeviceKind::kCpu) return NoBackEnd("read_back");
  KVASIR_RETURN_IF_ERROR(stream.Synchronize());
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnReadBack(bytes);
  }
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

absl::Status Upload(Stream& stream, void* device, const void* host,
                    size_t bytes) {
  if (stream.device() != DeviceKind::kCpu) return NoBackEnd("upload");
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnUpload(bytes);
  }
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
