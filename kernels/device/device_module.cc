#include "kernels/device/device_module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/device/device_interface.h"

namespace kvasir::kernels {

const char* DeviceInterface() { return KVASIR_DEVICE_INTERFACE; }

absl::StatusOr<std::unique_ptr<Device>> LoadDevice(
    const std::string& path, const DeviceRequest& request) {
  const auto is_none = [&path](const auto&... why) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a device module: ", why...));
  };
  if (::access(path.c_str(), F_OK) != 0) {
    return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  }
  // For a name without a folder, dlopen would search the library path instead
  // of the current folder.
  const std::string file =
      path.find('/') == std::string::npos ? absl::StrCat("./", path) : path;
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return is_none(::dlerror());
  const auto function = reinterpret_cast<DeviceModuleFunction>(
      ::dlsym(library, kDeviceModuleFunction));
  // From here on the module stays loaded, because the libraries that it has
  // loaded may not support unloading.
  if (function == nullptr) {
    return is_none("it has no function ", kDeviceModuleFunction);
  }
  const DeviceModule* const module = function();
  if (module == nullptr || module->interface == nullptr) {
    return is_none(kDeviceModuleFunction, " returns no module");
  }
  if (std::strcmp(module->interface, DeviceInterface()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " belongs to another build: its interface is ", module->interface,
        ", this program's is ", DeviceInterface(), "; build both together"));
  }
  absl::StatusOr<std::unique_ptr<Device>> device = module->make(request);
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat(path, ": ", device.status().message()));
}

}  // namespace kvasir::kernels
