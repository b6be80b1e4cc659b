#include "compress/runtime/device.h"

#include <ATen/Context.h>
#include <torch/cuda.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::compress {

absl::Status CheckDevice(const std::string& name) {
  if (name != "auto" && name != "cpu" && name != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--device: must be auto, cpu or cuda, not \"", name, "\""));
  }
  if (name != "cuda" || torch::cuda::is_available()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      at::hasCUDA() ? "--device cuda: libtorch finds no GPU"
                    : "--device cuda: this build of libtorch has no CUDA");
}

absl::StatusOr<c10::Device> OpenDevice(const std::string& name) {
  KVASIR_RETURN_IF_ERROR(CheckDevice(name));
  if (name == "cpu" || !torch::cuda::is_available()) {
    return c10::Device(c10::kCPU);
  }
  at::globalContext().setAllowTF32CuBLAS(false);
  return c10::Device(c10::kCUDA);
}

int ThreadsFor(const c10::Device& device, int threads) {
  return device.is_cpu() ? std::max(threads, 1) : 1;
}

}  // namespace kvasir::compress
