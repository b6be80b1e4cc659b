// --device: what a model runs on.
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

// --device and --device-module.
void AddDeviceFlags(CLI::App* app, DeviceFlags* options);

// INVALID_ARGUMENT for what is no device's name: auto, cpu, cuda[:N],
// emulated[:SETTINGS].
absl::Status CheckDeviceName(const std::string& device);

// INVALID_ARGUMENT for flags that say anything where the server at `endpoint`
// is asked: it runs on what it was started with.
absl::Status CheckDeviceIsUsed(const DeviceFlags& flags,
                               const std::string& endpoint);

// What a device is opened for.
struct DeviceWish {
  // Of the host's memory: the emulated device's all, a GPU's host pool. 0: no
  // limit.
  int64_t host_limit_bytes = 0;
  kernels::DType gpu_activations = kernels::DType::kBf16;
  bool deterministic = false;  // CudaDeviceOptions::deterministic
  // Which GPU from the named one on: each rank of a host has its own.
  int next_gpu = 0;
};
using OpenCuda = std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(
    const kernels::CudaDeviceOptions& options)>;

// Null for the CPU, whose device its rank makes with its threads. auto is the
// first GPU where one can be used, else the CPU, and the log says which and
// why. For cuda: MakeCudaDevice's errors, and --device cpu as the way out; for
// emulated LoadDevice's, with what its module comes from.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, const DeviceWish& wish,
    const OpenCuda& open_cuda = &kernels::MakeCudaDevice);

}  // namespace kvasir::cli
