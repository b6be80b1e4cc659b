// Computes a tile of a matrix product C = A B in registers, for matmul and
// attention. Each element is one FMA chain in the order of k. For inclusion by
// *_cpu.cc; tile_cpu.cc has the code.
#if defined(KVASIR_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_TILE_INL_H_
#undef KVASIR_KERNELS_TILE_INL_H_
#else
#define KVASIR_KERNELS_TILE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kTileColumns = 32;
inline constexpr int kTileVecs = kTileColumns / kVecLanes;

// The most rows of a tile whose accumulators all fit in registers. AVX-512 has
// 32 registers, which hold 12 rows of 2 vectors and 2 vectors of B. NEON also
// has 32, which hold 3 rows of 8 vectors. AVX2 has 16, which hold 3 rows of 4
// vectors. The build may set fewer rows (KVASIR_TILE_ROWS) to compile faster.
inline constexpr int kRegisterRows = kTileVecs <= 2   ? 12
                                     : kTileVecs <= 8 ? 3
                                                      : 1;
inline constexpr int kTileRows =
    kRegisterRows < KVASIR_TILE_ROWS ? kRegisterRows : KVASIR_TILE_ROWS;

struct TileArgs {
  int64_t depth;     // k
  const float* a;    // [rows, depth]
  int64_t a_stride;  // in elements
  const void* b;     // [depth, 32], rows b_stride apart
  int64_t b_stride;  // in elements
  float* c;          // [rows, 32], rows c_stride apart
  int64_t c_stride;
  bool accumulate;    // true: sums start from the contents of c; false: from 0
  const float* bias;  // [32] added at the end, or null
  // Memory to prefetch during the computation: one cache line per k, ahead_step
  // bytes apart. Null: no prefetch.
  const char* ahead;
  int64_t ahead_step;
};

// The distance from a tile's reads to its prefetches if it reads B from memory.
// This is enough to hide the latency of memory; measurements show no difference
// between 2 and 8 KiB.
inline constexpr int64_t kPrefetchBytes = 4096;

// Computes one tile of 1 to kTileRows rows. B has the type T: float, F16, Bf16
// or uint8_t.
template <typename T>
void RunTile(int rows, const TileArgs& args);

// Like RunTile for float, but with a_stride fixed to kPackedStride, which makes
// it faster.
inline constexpr int64_t kPackedStride = 256;
void RunPackedTile(int rows, const TileArgs& args);

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_TILE_INL_H_
