// Rows of activations in kernels: packs of neighbouring numbers, and sums over
// a CTA. C++17.
#pragma once

#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// Numbers that one access moves: as many as 16 bytes hold, or one.
template <typename T, int n>
struct alignas(sizeof(T) * n) Pack {
  T number[n];
};
template <typename T>
inline constexpr int kWidePack = 16 / static_cast<int>(sizeof(T));

// Whether rows of `columns` numbers can be taken in wide packs: these pointers
// (null: not there) are aligned to 16 bytes, and so is each row.
template <typename T, typename... Pointers>
bool WideRows(int64_t columns, const Pointers*... pointers) {
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
  return aligned && columns % kWidePack<T> == 0;
}

// The sum over all threads of the CTA, the same bits in each. `partial` has a
// number for each warp, and is this call's own: no other of the kernel uses it.
KVASIR_DEVICE float CtaSum(float value, float* partial) {
  value = WarpSum(value);
  if (Lane() == 0) StoreShared(partial + Warp(), value);
  SyncCta();
  float sum = 0.0f;
  for (uint32_t warp = 0; warp < Threads() / kWarp; ++warp) {
    sum += LoadShared(partial + warp);
  }
  return sum;
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
