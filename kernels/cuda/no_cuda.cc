// Defines MakeCudaDevice for builds without nvcc, in place of
// make_cuda_device.cc. It always returns an error.
#include "kernels/cuda/cuda_device.h"

namespace kvasir::kernels {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    const CudaDeviceOptions&) {
  return absl::UnimplementedError(
      "this program was built without CUDA: build it with nvcc of CUDA 13.0 on "
      "PATH (cmake -DKVASIR_CUDA=ON says what is missing)");
}

}  // namespace kvasir::kernels
