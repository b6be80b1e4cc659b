#include "base/status_macros.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/gpu_ops.h"
#include "kernels/cuda/real_cublaslt.h"
#include "kernels/cuda/real_runtime.h"

namespace kvasir::kernels {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    const CudaDeviceOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                          CudaDevice::Make(options, &cuda::RealRuntime(),
                                           GpuOps(), &cuda::RealCublasLt));
  return device;
}

}  // namespace kvasir::kernels
