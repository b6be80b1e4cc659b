// Devices that are shared libraries of their own, which a program loads when it
// is asked for one: what it is started without is not linked into it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"

namespace kvasir::kernels {

struct DeviceRequest {
  std::string settings;            // the module's own, of one device
  int64_t memory_limit_bytes = 0;  // 0: no limit
};

// What a module's one function gives, for as long as it is loaded.
struct DeviceModule {
  // DeviceInterface() of the module. First in every version of this struct:
  // nothing else is looked at where it is another than the program's.
  const char* interface;
  absl::StatusOr<std::unique_ptr<Device>> (*make)(const DeviceRequest& request);
};

// The function: extern "C" const DeviceModule* KvasirDeviceModule().
inline constexpr char kDeviceModuleFunction[] = "KvasirDeviceModule";
using DeviceModuleFunction = const DeviceModule* (*)();

// Names everything that program and module must agree on: the headers that
// both are compiled from, and with what.
const char* DeviceInterface();

// Makes the device of the module in this file, which stays loaded. NOT_FOUND
// where there is no such file; FAILED_PRECONDITION where it is no module, or
// one of another interface; the module's own errors. All name the file.
absl::StatusOr<std::unique_ptr<Device>> LoadDevice(
    const std::string& path, const DeviceRequest& request);

}  // namespace kvasir::kernels
