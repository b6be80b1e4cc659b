// A device module with the interface of another build. LoadDevice must refuse
// it without calling its functions.
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
