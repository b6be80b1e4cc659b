#include "cli/device/device.h"

#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cli/flags.h"
#include "kernels/device/device_module.h"

namespace kvasir::cli {
namespace {

constexpr absl::string_view kModule = "kvasir-emulated.so";

// "emulated:f32" as "emulated" and "f32".
std::pair<absl::string_view, absl::string_view> Split(
    absl::string_view device) {
  const size_t colon = device.find(':');
  return colon == absl::string_view::npos
             ? std::pair(device, absl::string_view())
             : std::pair(device.substr(0, colon), device.substr(colon + 1));
}

// Beside this program.
std::string OwnModule() {
  std::error_code error;
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe", error);
  return (program.parent_path() / std::string(kModule)).string();
}

}  // namespace

void AddDeviceFlags(CLI::App* app, DeviceFlags* options) {
  AddFlag(app, "--device", options->device,
          "what the model runs on: cpu; cuda, which this version does not "
          "have; emulated, where kernels for a GPU run on the host, slowly and "
          "for tests (emulated:f32: activations in f32, f16 or bf16); auto is "
          "cpu where there is no GPU that can be used")
      ->check(Checked(CheckDeviceName))
      ->type_name("auto|cpu|cuda[:N]|emulated[:SETTINGS]");
  AddText(app, "--device-module", options->module,
          absl::StrCat("library of --device emulated; default: ", kModule,
                       " beside this program"))
      ->type_name("FILE");
}

absl::Status CheckDeviceName(const std::string& device) {
  const auto [name, settings] = Split(device);
  const bool alone = device.size() == name.size();
  uint32_t number = 0;
  if (((name == "auto" || name == "cpu") && alone) || name == "emulated" ||
      (name == "cuda" && (alone || absl::SimpleAtoi(settings, &number)))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      device, ": want auto, cpu, cuda[:N] or emulated[:SETTINGS]"));
}

bool IsCpu(const DeviceFlags& flags) {
  return flags.device == "cpu" || flags.device == "auto";
}

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, int64_t memory_limit_bytes) {
  const auto [name, settings] = Split(flags.device);
  if (!flags.module.empty() && name != "emulated") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--device-module ", flags.module,
        " is read with --device emulated alone, this is ", flags.device));
  }
  if (IsCpu(flags)) return std::unique_ptr<kernels::Device>();
  if (name != "emulated") {
    return absl::UnimplementedError(absl::StrCat(
        "--device ", flags.device,
        ": this build has no CUDA back end, and no version has one yet (it "
        "would need KVASIR_CUDA=ON and NVIDIA's driver, libcuda.so.1); give "
        "--device cpu"));
  }
  const std::string module = flags.module.empty() ? OwnModule() : flags.module;
  auto device =
      kernels::LoadDevice(module, {.settings = std::string(settings),
                                   .memory_limit_bytes = memory_limit_bytes});
  if (device.ok()) return device;
  const char* const remedy =
      absl::IsNotFound(device.status())
          ? ": a build with KVASIR_EMULATION=ON makes it (cmake --preset dev; "
            "target kernels_emulated_module), or --device-module names it"
          : "";
  return absl::Status(device.status().code(),
                      absl::StrCat("--device ", flags.device, ": ",
                                   device.status().message(), remedy));
}

}  // namespace kvasir::cli
