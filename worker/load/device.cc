#include "worker/load/device.h"

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "kernels/device/device_module.h"

namespace kvasir::cli {
namespace {

constexpr char kAuto[] = "auto";
// The default is not auto, because the kernel for prompts has not been measured
// on a GPU since it was rewritten (docs/performance.md).
constexpr char kDefault[] = "cpu";
constexpr absl::string_view kModule = "kvasir-emulated.so";

// Splits "emulated:f32" into "emulated" and "f32".
std::pair<absl::string_view, absl::string_view> Split(
    absl::string_view device) {
  const size_t colon = device.find(':');
  return colon == absl::string_view::npos
             ? std::pair(device, absl::string_view())
             : std::pair(device.substr(0, colon), device.substr(colon + 1));
}

std::optional<int> OrdinalOf(absl::string_view settings) {
  int ordinal = 0;
  if (settings.empty() ||
      !absl::ascii_isdigit(static_cast<unsigned char>(settings[0])) ||
      !absl::SimpleAtoi(settings, &ordinal)) {
    return std::nullopt;
  }
  return ordinal;
}

// The path of the emulated device's module, in the folder of this program.
std::string OwnModule() {
  std::error_code error;
  const std::filesystem::path program =
      std::filesystem::read_symlink("/proc/self/exe", error);
  return (program.parent_path() / std::string(kModule)).string();
}

}  // namespace

void AddDeviceFlags(CLI::App* app, DeviceFlags* options) {
  options->device = kDefault;
  AddFlag(app, "--device", options->device,
          "what the model runs on: cpu; cuda (the first) or cuda:N, an NVIDIA "
          "GPU of compute capability 8.0 or later; emulated, where GPU kernels "
          "run on the host, slowly, for tests (emulated:f32: activations in "
          "f32, f16 or bf16); auto: the first GPU if it is usable and has the "
          "plan's kernels, else the cpu")
      ->each([options](const std::string&) { options->given = true; })
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
  if (((name == "auto" || name == "cpu") && alone) || name == "emulated" ||
      (name == "cuda" && (alone || OrdinalOf(settings).has_value()))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the device must be auto, cpu, cuda[:N] or emulated[:SETTINGS], but is ",
      device));
}

absl::Status CheckDeviceIsUsed(const DeviceFlags& flags,
                               const std::string& endpoint) {
  const auto refuse = [&](const char* flag, const std::string& value) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", value,
                     " applies only to a model that this command runs itself; "
                     "the server at ",
                     endpoint, " keeps the device that it was started with"));
  };
  if (flags.given) return refuse("--device", flags.device);
  if (!flags.module.empty()) return refuse("--device-module", flags.module);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, const DeviceWish& wish,
    const OpenCuda& open_cuda) {
  const auto [name, settings] = Split(flags.device);
  if (!flags.module.empty() && name != "emulated") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device-module ", flags.module,
                     " is used only with --device emulated, but --device is ",
                     flags.device));
  }
  if (name == "cpu") return std::unique_ptr<kernels::Device>();
  if (name != "emulated") {
    kernels::CudaDeviceOptions options;
    options.ordinal = OrdinalOf(settings).value_or(0) + wish.next_gpu;
    options.host_limit_bytes = wish.host_limit_bytes;
    options.activations = wish.gpu_activations;
    options.deterministic = wish.deterministic;
    auto device = open_cuda(options);
    if (name == kAuto) {
      if (device.ok()) {
        base::LogInfo(absl::StrCat("--device auto: the model runs on cuda:",
                                   options.ordinal));
        return device;
      }
      base::LogInfo("--device auto: the model runs on the cpu",
                    {{"why_not_cuda", std::string(device.status().message())}});
      return std::unique_ptr<kernels::Device>();
    }
    if (device.ok()) return device;
    return absl::Status(
        device.status().code(),
        absl::StrCat("--device ", flags.device, ": ", device.status().message(),
                     "; --device cpu runs without a GPU"));
  }
  const std::string module = flags.module.empty() ? OwnModule() : flags.module;
  auto device = kernels::LoadDevice(
      module, {.settings = std::string(settings),
               .memory_limit_bytes = wish.host_limit_bytes});
  if (device.ok()) return device;
  const char* const remedy =
      absl::IsNotFound(device.status())
          ? ": build it with KVASIR_EMULATION=ON (cmake --preset dev; target "
            "kernels_emulated_module), or give its path in --device-module"
          : "";
  return absl::Status(device.status().code(),
                      absl::StrCat("--device ", flags.device, ": ",
                                   device.status().message(), remedy));
}

}  // namespace kvasir::cli
