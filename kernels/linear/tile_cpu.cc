#include <cstdint>

#include "kernels/device/dtype.h"
#include "kernels/simd/ahead_lines.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/tile_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/codes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Computes a tile of kRows rows. kAStride is a_stride if that is known at
// compile time, otherwise 0. If it is 0, there is a pointer for every third row
// of A, because there are too few general registers for pointers to all rows.
template <typename T, int kRows, int64_t kAStride>
void Tile(const TileArgs& args) {
  Vec acc[kRows][kTileVecs];
  const int64_t a_stride = kAStride > 0 ? kAStride : args.a_stride;
  constexpr int kBases = kAStride > 0 ? 1 : (kRows + 2) / 3;
  constexpr int kRowsPerBase = kAStride > 0 ? kRows : 3;
  const float* a[kBases];
  for (int i = 0; i < kBases; ++i) a[i] = args.a + i * 3 * a_stride;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVecs; ++v) {
      acc[r][v] = args.accumulate
                      ? LoadFloats(args.c + r * args.c_stride + v * kVecLanes)
                      : hn::Zero(kFloats);
    }
  }
  const T* b = static_cast<const T*>(args.b);
  // If there is nothing to prefetch, prefetches a line that is already in the
  // cache, which costs less than a branch.
  const char* ahead = args.ahead != nullptr
                          ? args.ahead
                          : reinterpret_cast<const char*>(args.a);
  const int64_t ahead_step = args.ahead != nullptr ? args.ahead_step : 0;
  for (int64_t k = 0; k < args.depth; ++k) {
    AskForLine(ahead);
    ahead += ahead_step;
    Vec column[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) {
      column[v] = LoadFloats(b + v * kVecLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec factor =
          Broadcast(a[r / kRowsPerBase][r % kRowsPerBase * a_stride]);
      for (int v = 0; v < kTileVecs; ++v) {
        acc[r][v] = Fma(factor, column[v], acc[r][v]);
      }
    }
    b += args.b_stride;
    for (int i = 0; i < kBases; ++i) ++a[i];
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kTileVecs; ++v) {
      Vec sum = acc[r][v];
      if (args.bias != nullptr) {
        sum = hn::Add(sum, LoadFloats(args.bias + v * kVecLanes));
      }
      hn::StoreU(sum, kFloats, args.c + r * args.c_stride + v * kVecLanes);
    }
  }
}

// Calls the function Tile for `rows` rows: compares `rows` with kRows, kRows -
// 1, ... down to 1.
template <typename T, int64_t kAStride, int kRows>
void Choose(int rows, const TileArgs& args) {
  if (rows == kRows) {
    Tile<T, kRows, kAStride>(args);
  } else if constexpr (kRows > 1) {
    Choose<T, kAStride, kRows - 1>(rows, args);
  }
}

}  // namespace

template <typename T>
void RunTile(int rows, const TileArgs& args) {
  Choose<T, 0, kTileRows>(rows, args);
}
template void RunTile<float>(int, const TileArgs&);
template void RunTile<F16>(int, const TileArgs&);
template void RunTile<Bf16>(int, const TileArgs&);
template void RunTile<uint8_t>(int, const TileArgs&);

void RunPackedTile(int rows, const TileArgs& args) {
  Choose<float, kPackedStride, kTileRows>(rows, args);
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();
