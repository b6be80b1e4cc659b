// Loads devices from shared libraries ("modules") at run time, so that programs
// need not be linked with them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

struct DeviceRequest {
  std::string settings;  // settings of the device, in the module's own format
  int64_t memory_limit_bytes = 0;  // 0: no limit
};

// The result of KvasirDeviceModule(), the module's only function; valid while
// the module is loaded.
struct DeviceModule {
  // DeviceInterface() of the module. It is the first member in every version of
  // this struct; if it differs from the program's, nothing else is read.
  const char* interface;
  absl::StatusOr<std::unique_ptr<Device>> (*make)(const DeviceRequest& request);
};

// The name of the module's function, which is declared as extern "C" const
// DeviceModule* KvasirDeviceModule().
inline constexpr char kDeviceModuleFunction[] = "KvasirDeviceModule";
using DeviceModuleFunction = const DeviceModule* (*)();

// Returns a fingerprint of everything that the program and the module must have
// in common: the headers that both include, and the settings of the build.
const char* DeviceInterface();

// Loads the module in this file, which then stays loaded, and makes its device.
// Errors: NOT_FOUND if there is no such file; FAILED_PRECONDITION if it is not
// a module or has another interface; or an error of the module itself. Every
// error text names the file.
absl::StatusOr<std::unique_ptr<Device>> LoadDevice(
    const std::string& path, const DeviceRequest& request);

}  // namespace kvasir::kernels
