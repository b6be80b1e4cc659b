// Enqueues a kernel on a stream, for either target. C++17.
#pragma once

#include <type_traits>

#include "base/check.h"
#include "kernels/device/launcher.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// The most CTAs of a grid in x and in y.
inline constexpr uint32_t kMostCtasX = 0x7fffffff;
inline constexpr uint32_t kMostCtasY = 0xffff;

// Returns the number of CTAs in x for `count` items if each CTA takes
// `items_per_cta`. Ends the process if there are more than `most`; for CTAs in
// y, pass kMostCtasY as `most`.
inline uint32_t Ctas(int64_t count, int64_t items_per_cta = 1,
                     uint32_t most = kMostCtasX) {
  const int64_t ctas = (count + items_per_cta - 1) / items_per_cta;
  KVASIR_CHECK(ctas >= 0 && ctas <= int64_t{most});
  return static_cast<uint32_t>(ctas);
}

// Enqueues kernel(args). Enqueues nothing if the grid is empty.
template <typename Args>
void Launch(Launcher& launcher, KernelLaunch launch, void (*kernel)(Args),
            const std::common_type_t<Args>& args) {
  static_assert(std::is_trivially_copyable_v<Args>, "args are copied as bytes");
  static_assert(sizeof(Args) <= 4096, "args have at most 4096 bytes");
  if (launch.grid_x == 0 || launch.grid_y == 0) return;
  launch.function = reinterpret_cast<const void*>(kernel);
#ifndef __CUDACC__
  launch.call = [](const void* function, const void* bytes) {
    reinterpret_cast<void (*)(Args)>(const_cast<void*>(function))(
        *static_cast<const Args*>(bytes));
  };
#endif
  launch.args = &args;
  launch.args_bytes = sizeof(Args);
  launcher.Enqueue(launch);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
