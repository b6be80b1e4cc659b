// Replaces cuda.cc in builds without nvcc, which have only emulated devices.
#include "absl/strings/str_cat.h"
#include "bench/gpu/gpu_device.h"
#include "kernels/device/device_module.h"

namespace kvasir::bench {

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenGpu(
    const std::string& name, const std::string& module, Products) {
  if (name == "emulated") return kernels::LoadDevice(module, {});
  return absl::UnimplementedError(
      absl::StrCat("device ", name, ": this build has no CUDA back end"));
}

absl::StatusOr<std::unique_ptr<DeviceClock>> ClockOf(const kernels::Device&) {
  return MakeHostClock();
}

absl::StatusOr<GpuFacts> FactsOf(const kernels::Device& device) {
  return GpuFacts{
      .name = device.name(), .gpus = kEmulatedGpus, .timed_by = "host"};
}

}  // namespace kvasir::bench
