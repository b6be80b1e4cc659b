// --device: the device that a model runs on.
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

// Adds --device and --device-module.
void AddDeviceFlags(CLI::App* app, DeviceFlags* options);

// INVALID_ARGUMENT for a name that is not auto, cpu, cuda[:N] or
// emulated[:SETTINGS].
absl::Status CheckDeviceName(const std::string& device);

// INVALID_ARGUMENT if a device flag is given for a command that calls the
// server at `endpoint`, which has its own device.
absl::Status CheckDeviceIsUsed(const DeviceFlags& flags,
                               const std::string& endpoint);

// The needs of the model for which a device is opened.
struct DeviceWish {
  // The limit of host memory: all memory of the emulated device, the host pool
  // of a GPU. 0: no limit.
  int64_t host_limit_bytes = 0;
  kernels::DType gpu_activations = kernels::DType::kBf16;
  bool deterministic = false;  // CudaDeviceOptions::deterministic
  // The GPU, counted from the named one: each rank of a host has its own.
  int next_gpu = 0;
};
using OpenCuda = std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(
    const kernels::CudaDeviceOptions& options)>;

// Opens the device. Returns null for the CPU, whose device is made by the rank
// with its threads. auto is the first usable GPU, else the CPU; the log says
// which and why. Errors: for cuda those of MakeCudaDevice, with --device cpu as
// an alternative; for emulated those of LoadDevice, with the target that builds
// the module.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, const DeviceWish& wish,
    const OpenCuda& open_cuda = &kernels::MakeCudaDevice);

}  // namespace kvasir::cli
