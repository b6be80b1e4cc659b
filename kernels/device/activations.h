// Sizes and offsets of activations in device memory. Ops take activations as
// `float*` even if the device stores them as another type. So pointer
// arithmetic on these pointers would be wrong; use these helpers instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"
#include "kernels/device/workspace.h"

namespace kvasir::kernels {

struct Activations {
  DType dtype = DType::kF32;

  int64_t Bytes(int64_t numbers) const { return numbers * DTypeBytes(dtype); }
  // Takes memory for this number of activations from the workspace.
  DevicePtr<float> Take(Workspace& workspace, int64_t numbers) const {
    return workspace.Take<std::byte>(Bytes(numbers)).as<float>();
  }
  // Returns the pointer moved by `numbers` activations.
  template <typename T>
  DevicePtr<T> At(DevicePtr<T> begin, int64_t numbers) const {
    static_assert(sizeof(T) == sizeof(float));
    using Byte =
        std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return (begin.template as<Byte>() + Bytes(numbers)).template as<T>();
  }
};

}  // namespace kvasir::kernels
