// The emulated device as a shared library (kernels/device/device_module.h), so
// that programs need not be linked with it. Its settings, separated by commas,
// are the type of activations (f32, f16 or bf16) and seed=N.
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "kernels/device/device_interface.h"
#include "kernels/device/device_module.h"
#include "kernels/emulation/emulated_device.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels::emulation {
namespace {

absl::Status SetOne(absl::string_view setting, EmulatedDeviceOptions* options) {
  if (setting == "f32") {
    options->activations = DType::kF32;
  } else if (setting == "f16") {
    options->activations = DType::kF16;
  } else if (setting == "bf16") {
    options->activations = DType::kBf16;
  } else if (absl::string_view seed = setting;
             !absl::ConsumePrefix(&seed, "seed=") ||
             !absl::SimpleAtoi(seed, &options->emulator.seed)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the setting \"", setting,
                     "\" is invalid; want f32, f16, bf16 or seed=N, with N "
                     "from 0 to 2^64 - 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Device>> Make(const DeviceRequest& request) {
  if (!__builtin_cpu_supports("fma")) {
    return absl::FailedPreconditionError(
        "the emulated device needs a CPU with FMA instructions");
  }
  EmulatedDeviceOptions options;
  options.memory_limit_bytes = request.memory_limit_bytes;
  for (const absl::string_view setting :
       absl::StrSplit(request.settings, ',', absl::SkipEmpty())) {
    KVASIR_RETURN_IF_ERROR(SetOne(setting, &options));
  }
  KVASIR_RETURN_IF_ERROR(
      GuardedMemory::CheckReservable(EmulatedDevice::kReservedBytes));
  return std::make_unique<EmulatedDevice>(options, emulated::Ops());
}

constexpr DeviceModule kModule = {KVASIR_DEVICE_INTERFACE, &Make};

}  // namespace
}  // namespace kvasir::kernels::emulation

extern "C" const kvasir::kernels::DeviceModule* KvasirDeviceModule() {
  return &kvasir::kernels::emulation::kModule;
}
