#include "kernels/device/stream.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/device/stream.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(TargetName);
}  // namespace

std::string CpuTargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

absl::Status CpuStream::CopyToDevice(DevicePtr<void> device, const void* host,
                                     size_t bytes) {
  if (guard_ != nullptr) guard_->Check("upload", device.device_address());
  const OpenMemory open(guard_);
  std::memcpy(device.device_address(), host, bytes);
  return absl::OkStatus();
}

absl::Status CpuStream::CopyToHost(void* host, DevicePtr<const void> device,
                                   size_t bytes) {
  if (guard_ != nullptr) guard_->Check("read_back", device.device_address());
  const OpenMemory open(guard_);
  std::memcpy(host, device.device_address(), bytes);
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
