// The parts of the GPU benchmarks that use the CUDA runtime. Compiled only in
// builds with nvcc.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/gpu/gpu_device.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/device/device_module.h"
#include "kernels/emulation/testing/mma_ceiling.h"

namespace kvasir::bench {
namespace {

absl::Status Of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorName(error),
                                          ": ", cudaGetErrorString(error)));
}

cudaStream_t HandleOf(const kernels::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(kernels::CudaDevice::HandleOf(stream));
}

// A clock that uses CUDA events. Owns: the events, which are reused for later
// marks.
class CudaClock final : public DeviceClock {
 public:
  ~CudaClock() override {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  absl::Status Mark(kernels::Stream& stream) override {
    if (used_ == events_.size()) {
      cudaEvent_t event = nullptr;
      KVASIR_RETURN_IF_ERROR(Of(cudaEventCreate(&event), "cudaEventCreate"));
      events_.push_back(event);
    }
    return Of(cudaEventRecord(events_[used_++], HandleOf(stream)),
              "cudaEventRecord");
  }
  absl::StatusOr<std::vector<double>> Take(kernels::Stream& stream) override {
    KVASIR_RETURN_IF_ERROR(stream.Synchronize());
    std::vector<double> seconds;
    for (size_t i = 1; i < used_; ++i) {
      float milliseconds = 0.0f;
      KVASIR_RETURN_IF_ERROR(
          Of(cudaEventElapsedTime(&milliseconds, events_[i - 1], events_[i]),
             "cudaEventElapsedTime"));
      seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
    }
    used_ = 0;
    return seconds;
  }
  absl::Status Copy(kernels::Stream& stream, kernels::DevicePtr<void> to,
                    kernels::DevicePtr<const void> from,
                    size_t bytes) override {
    return Of(cudaMemcpyAsync(to.device_address(), from.device_address(), bytes,
                              cudaMemcpyDeviceToDevice, HandleOf(stream)),
              "cudaMemcpyAsync");
  }
  absl::StatusOr<double> Multiply(kernels::Stream& stream,
                                  kernels::DevicePtr<float> out,
                                  uint32_t steps) override {
    auto& launches = static_cast<kernels::LaunchStream&>(stream);
    const double operations = kernels::gpu::LaunchMmaCeiling(
        {out.device_address(), steps}, launches.launcher());
    KVASIR_RETURN_IF_ERROR(launches.TakeLaunchError());
    return operations;
  }
  size_t MultipliedBytes(kernels::Stream& stream) const override {
    return sizeof(float) * kernels::kMmaCeilingThreads *
           static_cast<size_t>(static_cast<kernels::LaunchStream&>(stream)
                                   .launcher()
                                   .multiprocessors());
  }

 private:
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
};

// Returns the CUDA device, or null if the device is of another kind.
const kernels::CudaDevice* CudaOf(const kernels::Device& device) {
  return dynamic_cast<const kernels::CudaDevice*>(&device);
}

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Device>> OpenGpu(
    const std::string& name, const std::string& module, Products products) {
  if (name == "emulated") return kernels::LoadDevice(module, {});
  KVASIR_ASSIGN_OR_RETURN(const kernels::CudaDeviceOptions options,
                          GpuOptions(name, products));
  return kernels::MakeCudaDevice(options);
}

std::unique_ptr<DeviceClock> MakeCudaClock() {
  return std::make_unique<CudaClock>();
}

absl::StatusOr<std::unique_ptr<DeviceClock>> ClockOf(
    const kernels::Device& device) {
  if (CudaOf(device) != nullptr) return MakeCudaClock();
  return MakeHostClock();
}

absl::StatusOr<GpuFacts> FactsOf(const kernels::Device& device) {
  const kernels::CudaDevice* const cuda = CudaOf(device);
  if (cuda == nullptr) {
    return GpuFacts{
        .name = device.name(), .gpus = kEmulatedGpus, .timed_by = "host"};
  }
  int gpus = 0;
  KVASIR_RETURN_IF_ERROR(Of(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount"));
  KVASIR_ASSIGN_OR_RETURN(const kernels::DeviceMemory memory, cuda->memory());
  return GpuFacts{.name = cuda->properties().name,
                  .multiprocessors = cuda->properties().multiprocessors,
                  .l2_bytes = cuda->properties().l2_bytes,
                  .memory_bytes = memory.total_bytes,
                  .free_bytes = memory.free_bytes,
                  .gpus = gpus,
                  .timed_by = "events"};
}

}  // namespace kvasir::bench
