// The inner product of matmul and attention: a tile of C = A B held in
// registers, each element one FMA chain in k order. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_TILE_INL_H_
#undef KVASIR_KERNELS_TILE_INL_H_
#else
#define KVASIR_KERNELS_TILE_INL_H_
#endif

#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kTileColumns = 32;
inline constexpr int kTileVecs = kTileColumns / kVecLanes;

// Most rows of a tile whose accumulators stay in registers: AVX-512 has 32
// (12 rows x 2 vectors, and 2 of B), NEON 32 (3 x 8), AVX2 16 (3 x 4).
inline constexpr int kTileRows = kTileVecs <= 2 ? 12 : 3;

struct TileArgs {
  int64_t depth;     // k
  const float* a;    // [rows, depth]
  int64_t a_stride;  // in elements
  const void* b;     // [depth, 32], rows b_stride apart
  int64_t b_stride;  // in elements
  float* c;          // [rows, 32], rows c_stride apart
  int64_t c_stride;
  bool accumulate;    // start from c instead of 0
  const float* bias;  // [32] added at the end, or null
  const char* ahead;  // what to prefetch meanwhile: kLines lines per k
};

// How far ahead of its reads a tile that streams B asks for memory: enough to
// cover the latency of one core (measured; flat between 2 and 8 KiB).
inline constexpr int64_t kPrefetchBytes = 4096;

// kAStride: a_stride if it is known here, else 0. Rows are addressed from every
// third one: a pointer for each would not fit into the general registers.
template <typename T, int kRows, int kLines, int64_t kAStride>
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
  for (int64_t k = 0; k < args.depth; ++k) {
    for (int line = 0; line < kLines; ++line) {
      hwy::Prefetch(args.ahead + (k * kLines + line) * 64);
    }
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

template <typename T, int kLines, int64_t kAStride = 0>
HWY_INLINE void RunTile(int rows, const TileArgs& args) {
  static_assert(kTileRows == 12 || kTileRows == 3);
  switch (rows) {
    case 1:
      return Tile<T, 1, kLines, kAStride>(args);
    case 2:
      return Tile<T, 2, kLines, kAStride>(args);
    case 3:
      return Tile<T, 3, kLines, kAStride>(args);
#define KVASIR_TILE_CASE(n)                      \
  case n:                                        \
    if constexpr (n <= kTileRows) {              \
      return Tile<T, n, kLines, kAStride>(args); \
    }                                            \
    break;
      KVASIR_TILE_CASE(4)
      KVASIR_TILE_CASE(5)
      KVASIR_TILE_CASE(6)
      KVASIR_TILE_CASE(7)
      KVASIR_TILE_CASE(8)
      KVASIR_TILE_CASE(9)
      KVASIR_TILE_CASE(10)
      KVASIR_TILE_CASE(11)
      KVASIR_TILE_CASE(12)
#undef KVASIR_TILE_CASE
    default:
      break;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_TILE_INL_H_
