// Calls a device's implementation of an op, after the op has checked its
// parameters. The op itself names its CPU functions; the functions for a GPU
// are found in the stream's table (device_ops.h). If the table does not have
// the op, the error names the op.
#pragma once

#include <bit>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <typeinfo>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/device/device_observer.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/stream.h"

namespace kvasir::kernels {

// The implementations of one op. The functions take the op's checked parameters
// and scratch, with plain pointers (LaunchPtr). The CPU's two functions use the
// stream's threads and have finished when they return. A GPU's function is
// found in the stream's table by the op's name.
template <typename... Params>
struct OpKernels {
  using CpuFunction = void (*)(typename InLaunch<Params>::argument...,
                               CpuStream& stream);
  const char* op;
  CpuFunction reference;
  CpuFunction simd;

  // Returns the GPU's function, or null if the stream's table lacks the op.
  DeviceFunction<Params...> Find(const LaunchStream& stream) const {
    const DeviceOp* const found = stream.ops().Find(op);
    if (found == nullptr) return nullptr;
    using Function = DeviceFunction<Params...>;
    KVASIR_CHECK(std::strcmp(found->type, typeid(Function).name()) == 0);
    return reinterpret_cast<Function>(found->function);
  }
};

// Converts the DevicePtrs in parameters to plain pointers, which have the same
// bits.
template <typename Params>
typename InLaunch<Params>::type ForLaunch(const Params& params) {
  return std::bit_cast<typename InLaunch<Params>::type>(params);
}
template <typename T>
T* ForLaunch(const DevicePtr<T>& pointer) {
  return pointer.device_address();
}

// Visits every device pointer of an op's parameters.
template <typename Params, typename Visit>
void ForAddresses(const Params& params, const Visit& visit) {
  params.ForPointers([&](const auto&... pointers) {
    (visit(pointers.device_address()), ...);
  });
}
template <typename T, typename Visit>
void ForAddresses(const DevicePtr<T>& pointer, const Visit& visit) {
  visit(pointer.device_address());
}

template <typename... Params>
OpLaunch DescribeWithAddresses(const char* op, const Params&... params) {
  OpLaunch launch =
      DescribeLaunch(op, std::get<0>(std::forward_as_tuple(params...)));
  size_t next = 0;
  const auto add = [&](const void* address) {
    KVASIR_CHECK(next < launch.addresses.size());
    launch.addresses[next++] = address;
  };
  (ForAddresses(params, add), ...);
  return launch;
}

inline absl::Status NoKernel(const char* op) {
  return absl::UnimplementedError(
      absl::StrCat(op, ": the device has no kernel for it"));
}

// Called instead of a launch while the workspace only counts memory. Returns an
// error if the device does not have the op. So a caller that first counts the
// memory of a list of ops learns that an op is missing before any of them runs.
template <typename... Params>
absl::Status CheckServed(const OpKernels<Params...>& kernels,
                         const Stream& stream) {
  if (stream.device() == DeviceKind::kCpu) return absl::OkStatus();
  return kernels.Find(static_cast<const LaunchStream&>(stream)) == nullptr
             ? NoKernel(kernels.op)
             : absl::OkStatus();
}

template <typename... Params>
absl::Status Launch(const OpKernels<Params...>& kernels, Stream& stream,
                    const std::type_identity_t<Params>&... params) {
  if (auto* const observer = DeviceObserver::Current(); observer != nullptr) {
    observer->OnLaunch(DescribeWithAddresses(kernels.op, params...));
  }
  if (stream.device() == DeviceKind::kCpu) {
    auto& cpu = static_cast<CpuStream&>(stream);
    if (cpu.guard() != nullptr) {
      (ForAddresses(params,
                    [&](const void* address) {
                      cpu.guard()->Check(kernels.op, address);
                    }),
       ...);
    }
    const OpenMemory open(cpu.guard());
    (cpu.backend() == CpuBackend::kReference
         ? kernels.reference
         : kernels.simd)(ForLaunch(params)..., cpu);
    return absl::OkStatus();
  }
  auto& cuda = static_cast<LaunchStream&>(stream);
  const auto function = kernels.Find(cuda);
  if (function == nullptr) return NoKernel(kernels.op);
  (ForAddresses(
       params,
       [&](const void* address) { cuda.CheckMemory(kernels.op, address); }),
   ...);
  function(ForLaunch(params)..., cuda.launcher());
  return cuda.TakeLaunchError();
}

// Returns the number of threads that run an op. Each of them needs its own
// scratch memory.
inline int ScratchThreads(const Stream& stream) {
  return stream.device() == DeviceKind::kCpu
             ? static_cast<const CpuStream&>(stream).pool().num_threads()
             : 1;
}

// Returns an error if activations of this type do not fit the device. On the
// CPU they must be float32.
inline absl::Status CheckActivations(const char* op, DeviceKind device,
                                     DType dtype) {
  if (device != DeviceKind::kCpu || dtype == DType::kF32) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(op, ": the activations must be float32 on the CPU, not ",
                   DTypeName(dtype)));
}

// Returns an error such as "norm: columns: must be at least 1, but is 0".
inline absl::Status Refuse(const char* op, const char* what, int64_t want,
                           int64_t have) {
  return absl::InvalidArgumentError(absl::StrCat(
      op, ": ", what, ": must be at least ", want, ", but is ", have));
}

}  // namespace kvasir::kernels
