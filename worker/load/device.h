// The flags --device and --device-module: choosing and opening the device that
// a model runs on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/device/device.h"
#include "kernels/device/dtype.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {

void AddDeviceFlags(CLI::App* app, DeviceFlags* options);

// INVALID_ARGUMENT for a name that is not auto, cpu, cuda[:N] or
// emulated[:SETTINGS].
absl::Status CheckDeviceName(const std::string& device);

// INVALID_ARGUMENT if a device flag was given. For commands that call the
// server at `endpoint`, which has its own device.
absl::Status CheckDeviceIsUsed(const DeviceFlags& flags,
                               const std::string& endpoint);

// Settings with which a model's device is opened.
struct DeviceWish {
  // The limit for memory taken on the host: all memory of an emulated device,
  // or the host pool of a GPU. 0: no limit.
  int64_t host_limit_bytes = 0;
  kernels::DType gpu_activations = kernels::DType::kBf16;
  bool deterministic = false;  // see CudaDeviceOptions::deterministic
  // Added to the N of --device cuda:N, because each rank of a host uses a GPU
  // of its own.
  int next_gpu = 0;
};
using OpenCuda = std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(
    const kernels::CudaDeviceOptions& options)>;

// Opens the device. Returns null for the CPU, because the rank itself makes the
// CPU's device, together with its threads. For `auto`, opens the first GPU if
// it is usable and otherwise chooses the CPU, and logs the choice and its
// reason. Returns the errors of MakeCudaDevice for `cuda`, with the advice to
// use --device cpu. Returns the errors of LoadDevice for `emulated`; if the
// module is missing, the error names its build target.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, const DeviceWish& wish,
    const OpenCuda& open_cuda = &kernels::MakeCudaDevice);

}  // namespace kvasir::cli
