// Memory of activations. Ops take it as `float*` whatever a device stores: what
// sizes and moves it counts in numbers of the device's type.
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
  // Workspace::Take's.
  DevicePtr<float> Take(Workspace& workspace, int64_t numbers) const {
    return workspace.Take<std::byte>(Bytes(numbers)).as<float>();
  }
  // `numbers` further on.
  template <typename T>
  DevicePtr<T> At(DevicePtr<T> begin, int64_t numbers) const {
    static_assert(sizeof(T) == sizeof(float));
    using Byte =
        std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return (begin.template as<Byte>() + Bytes(numbers)).template as<T>();
  }
};

}  // namespace kvasir::kernels
