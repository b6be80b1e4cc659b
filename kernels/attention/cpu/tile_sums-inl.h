// Operations on the sums of a register tile, which are an array of vectors
// [rows][vectors]. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_TILE_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_TILE_SUMS_INL_H_
#undef KVASIR_KERNELS_TILE_SUMS_INL_H_
#else
#define KVASIR_KERNELS_TILE_SUMS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

#ifndef KVASIR_INLINE_LAMBDA
#if defined(__GNUC__)
#define KVASIR_INLINE_LAMBDA __attribute__((always_inline))
#else
#define KVASIR_INLINE_LAMBDA
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Calls visit(0) to visit(kCount - 1), with each index as a compile-time
// constant. With a loop instead, GCC 12 would store the array of sums to memory
// after every step.
template <int kCount, typename Visit, int kIndex = 0>
HWY_INLINE void ForEach(const Visit& visit) {
  if constexpr (kIndex < kCount) {
    visit(std::integral_constant<int, kIndex>());
    ForEach<kCount, Visit, kIndex + 1>(visit);
  }
}

// For each row r, adds a[r][index] * codes to the row's sums.
template <int kRows, int kVecs>
HWY_INLINE void AddProducts(const float* const (&a)[kRows], int64_t index,
                            const Vec (&codes)[kVecs],
                            Vec (&acc)[kRows][kVecs]) {
  ForEach<kRows>([&](auto r) KVASIR_INLINE_LAMBDA {
    const Vec factor = Broadcast(a[r][index]);
    ForEach<kVecs>([&](auto v) KVASIR_INLINE_LAMBDA {
      acc[r][v] = Fma(factor, codes[v], acc[r][v]);
    });
  });
}

template <int kRows, int kVecs>
HWY_INLINE void LoadSums(const float* c, int64_t c_stride, bool accumulate,
                         Vec (&acc)[kRows][kVecs]) {
  ForEach<kRows * kVecs>([&](auto i) KVASIR_INLINE_LAMBDA {
    constexpr int r = i / kVecs;
    constexpr int v = i % kVecs;
    acc[r][v] = accumulate ? LoadFloats(c + r * c_stride + v * kVecLanes)
                           : hn::Zero(kFloats);
  });
}
template <int kRows, int kVecs>
HWY_INLINE void StoreSums(const Vec (&acc)[kRows][kVecs], float* c,
                          int64_t c_stride) {
  ForEach<kRows * kVecs>([&](auto i) KVASIR_INLINE_LAMBDA {
    constexpr int r = i / kVecs;
    constexpr int v = i % kVecs;
    hn::StoreU(acc[r][v], kFloats, c + r * c_stride + v * kVecLanes);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_TILE_SUMS_INL_H_
