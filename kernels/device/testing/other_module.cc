// A module of another build; its functions must not be called.
#include <cstdlib>

#include "kernels/device/device_module.h"

extern "C" const kvasir::kernels::DeviceModule* KvasirDeviceModule() {
  using kvasir::kernels::Device;
  static constexpr kvasir::kernels::DeviceModule kModule = {
      "another",
      [](const kvasir::kernels::DeviceRequest&)
          -> absl::StatusOr<std::unique_ptr<Device>> { std::abort(); }};
  return &kModule;
}
