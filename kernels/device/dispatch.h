// How an op gets from its checked parameters to the code of a device. CMake
// decides what a build contains; a device that is not in it is refused here.
#pragma once

#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/device/device_observer.h"
#include "kernels/device/stream.h"

namespace kvasir::kernels {

// The implementations of one op. A CPU one takes the checked parameters (and
// scratch that the op took from the workspace), and the stream for its threads.
template <typename... Args>
struct OpKernels {
  using CpuFunction = void (*)(Args..., CpuStream& stream);
  const char* op;
  CpuFunction cpu_reference;
  CpuFunction cpu_simd;
};

template <typename... Args, typename... Given>
absl::Status Launch(const OpKernels<Args...>& kernels, Stream& stream,
                    const Given&... args) {
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnLaunch(DescribeLaunch(
        kernels.op, std::get<0>(std::forward_as_tuple(args...))));
  }
  switch (stream.device()) {
    case DeviceKind::kCpu: {
      auto& cpu = static_cast<CpuStream&>(stream);
      (cpu.backend() == CpuBackend::kReference
           ? kernels.cpu_reference
           : kernels.cpu_simd)(args..., cpu);
      return absl::OkStatus();
    }
    case DeviceKind::kCuda:
      break;
  }
  return absl::UnimplementedError(
      absl::StrCat(kernels.op, ": this build has no CUDA back end"));
}

// Threads that an op's scratch must serve.
inline int ScratchThreads(const Stream& stream) {
  return stream.device() == DeviceKind::kCpu
             ? static_cast<const CpuStream&>(stream).pool().num_threads()
             : 1;
}

// "rms_norm: columns: want at least 1, have 0"
inline absl::Status Refuse(const char* op, const char* what, int64_t want,
                           int64_t have) {
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": ", what, ": want at least ", want, ", have ", have));
}

}  // namespace kvasir::kernels
