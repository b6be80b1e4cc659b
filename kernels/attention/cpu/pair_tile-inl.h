// Matrix products of a few rows with cached bfloat16 numbers. A 32-bit word has
// two channels, which are converted to float32 in registers. Each element of a
// product is computed by the same chain of fused multiply-adds (FMA) as in
// linear/tile-inl.h. For inclusion by *_cpu.cc; the implementation is in
// pair_tile_cpu.cc.
#if defined(KVASIR_KERNELS_PAIR_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_PAIR_TILE_INL_H_
#undef KVASIR_KERNELS_PAIR_TILE_INL_H_
#else
#define KVASIR_KERNELS_PAIR_TILE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/simd/ahead_lines.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// A register tile is a block of a product whose sums stay in registers. It is
// at least this many vectors wide.
inline constexpr int kPairTileVecs = 2;
inline constexpr int64_t kPairTileColumns = kPairTileVecs * kVecLanes;

// The most vectors of sums in a register tile. Eight are just enough to hide
// the latency of a multiply-add. AVX-512 and NEON have enough registers for 16,
// which is better: each number that is loaded or converted is then used for
// more products.
inline constexpr int kPairTileSums = kVecLanes == 8 ? 8 : 16;
inline constexpr int kPairTileRows =
    KVASIR_TILE_ROWS < kPairTileSums / kPairTileVecs
        ? KVASIR_TILE_ROWS
        : kPairTileSums / kPairTileVecs;

// Up to this number of rows, bfloat16 values are multiplied as they are stored
// in the KV cache, without a copy in a tile.
inline constexpr int64_t kPairsMostRows = 8;
// Up to this number of rows, bfloat16 keys are loaded as pairs in 32-bit words,
// and each register tile converts the pairs to float32 itself. With AVX-512 and
// register tiles of eight rows or more, this is faster for up to 32 rows than
// to convert the keys once for all tiles (measured).
inline constexpr int64_t kKeyPairsMostRows =
    kVecLanes == 16 && kPairTileRows >= 8 ? 32 : kPairsMostRows;

// True if the instruction set supports the products of this file.
inline constexpr bool kTakesPairs = kVecLanes > 1;

// Computes c = a b, or c += a b if `accumulate`. `a` has rows of queries, and b
// the bfloat16 keys of 64 slots, with two channels in each 32-bit word.
struct KeyPairsArgs {
  int64_t depth;  // number of channels
  const uint32_t* words;
  const float* a;  // [rows, depth]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // memory to prefetch during the computation
};
void RunKeyPairs(int64_t rows, const KeyPairsArgs& args);

// Computes c += a b, where `a` has rows of attention weights and b has the
// bfloat16 values of slots, which are read directly from the KV cache.
struct ValuePairsArgs {
  int64_t depth;      // number of slots
  const char* slots;  // the first slot's numbers
  int64_t slot_bytes;
  const float* a;  // [rows, depth], rows 64 floats apart
  float* c;        // [rows, columns]
  int64_t c_stride;
  int64_t columns;    // a multiple of kPairTileColumns
  AheadLines* ahead;  // memory to prefetch during the computation
};
// Returns whether RunValuePairs supports this number of rows.
inline bool TakesValuePairs(int64_t rows) {
  return kTakesPairs && rows <= kPairsMostRows;
}
void RunValuePairs(int64_t rows, const ValuePairsArgs& args);

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_PAIR_TILE_INL_H_
