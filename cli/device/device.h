// --device: what a model runs on.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/options.h"
#include "kernels/device/device.h"

namespace kvasir::cli {

// --device and --device-module.
void AddDeviceFlags(CLI::App* app, DeviceFlags* options);

// INVALID_ARGUMENT for what is no device's name: auto, cpu, cuda[:N],
// emulated[:SETTINGS].
absl::Status CheckDeviceName(const std::string& device);

// Whether it is the CPU, auto's choice included.
bool IsCpu(const DeviceFlags& flags);

// Null for the CPU, whose device its rank makes with its threads. UNIMPLEMENTED
// for cuda, with what it would need; LoadDevice's errors for emulated, with
// what its module comes from. 0 bytes: no limit.
absl::StatusOr<std::unique_ptr<kernels::Device>> OpenDevice(
    const DeviceFlags& flags, int64_t memory_limit_bytes);

}  // namespace kvasir::cli
