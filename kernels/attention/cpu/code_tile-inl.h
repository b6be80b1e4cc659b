// Products of few rows with cached codes, which are extracted in registers.
// Each element is the same FMA chain as in linear/tile-inl.h. For inclusion by
// *_cpu.cc; the implementation is in code_tile_cpu.cc.
#if defined(KVASIR_KERNELS_CODE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_CODE_TILE_INL_H_
#undef KVASIR_KERNELS_CODE_TILE_INL_H_
#else
#define KVASIR_KERNELS_CODE_TILE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/latents/code_pack.h"
#include "kernels/simd/ahead_lines.h"
#include "kernels/simd/codes-inl.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// The least number of vectors of codes in a row of a register tile.
inline constexpr int kCodeTileVecs = 2;
inline constexpr int64_t kCodeTileColumns = kCodeTileVecs * kVecLanes;

// The number of vectors of sums in a register tile, chosen so that registers
// are left for the codes. AVX-512 and NEON have 32 registers, AVX2 has 16.
// Eight sums just hide the latency of a multiply-add. With more sums, each
// extracted code and each number of `a` is used for more products.
inline constexpr int kCodeTileSums = kVecLanes == 8 ? 8 : 16;
inline constexpr int kCodeTileRows =
    KVASIR_TILE_ROWS < kCodeTileSums / kCodeTileVecs
        ? KVASIR_TILE_ROWS
        : kCodeTileSums / kCodeTileVecs;

// Up to this number of rows, extracting the codes again for each tile costs
// less than writing them to memory once.
inline constexpr int64_t kCodeTileMostRows = 8;
// Up to this number of rows, bfloat16 keys are stored as pairs in 32-bit words
// and separated again for each register tile. If a tile has eight rows, the
// number is greater than for codes, because separating costs little and pairs
// take half the bytes of float32 (measured with AVX-512).
inline constexpr int64_t kKeyPairsMostRows =
    kVecLanes == 16 && kCodeTileRows >= 8 ? 32 : kCodeTileMostRows;

// The levels of a part's codes. Null: the number for a code is the code itself.
inline const float* LevelsOf(const LatentPartArgs& part) {
  return part.num_levels > 0 ? part.levels : nullptr;
}

// c += a b, where a is rows of queries and b the codes of 64 slots. The slots'
// bytes are given as 32-bit words, transposed so that the words of neighbouring
// slots are adjacent: [words, 64].
struct KeyCodesArgs {
  // The words that hold each plane of codes.
  const uint32_t* const* planes;
  const CodePiece* pieces;  // consecutive pieces, whose in_chunk is used
  int64_t num_pieces;
  int64_t first;        // channel to which a's first column belongs
  const float* levels;  // null: a code is the number itself
  const float* a;       // [rows, channels]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether RunKeyCodes and RunKeyPairs may be used.
inline constexpr bool kTakesPairs = kVecLanes > 1;
void RunKeyCodes(int64_t rows, const KeyCodesArgs& args);

// c += a b, where a is rows of queries and b the bfloat16 keys of 64 slots,
// with two channels in each word.
struct KeyPairsArgs {
  int64_t depth;  // number of channels
  const uint32_t* words;
  const float* a;  // [rows, depth]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
void RunKeyPairs(int64_t rows, const KeyPairsArgs& args);

// c += a b, where a is rows of weights and b the codes of slots, which are read
// in place.
struct ValueCodesArgs {
  int64_t depth;             // number of slots
  const char* const* slots;  // [depth]: each slot's bytes
  CodePlace place;           // place of the first code in a slot
  const float* levels;       // null: a code is the number itself
  const float* a;            // [rows, depth], rows 64 apart
  float* c;                  // [rows, columns]
  int64_t c_stride;
  int64_t columns;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether RunValueCodes supports codes in this place: they must have fewer than
// 8 bits, and each vector of codes must fill whole bytes.
inline bool TakesValueCodes(const CodePlace& place, int64_t columns) {
  return kVecLanes % 8 == 0 && place.low_bits < 8 &&
         columns % kCodeTileColumns == 0 && place.low_bit % 8 == 0 &&
         place.high_bit % 8 == 0;
}
void RunValueCodes(int64_t rows, const ValueCodesArgs& args);

// c += a b, where a is rows of weights and b the codes of slots, with any
// mixture of bit widths. CodeLanes describes how they are extracted.
struct ValueLanesArgs {
  int64_t depth;             // number of slots
  const char* const* slots;  // [depth]: each slot's bytes
  int64_t slot_bytes;        // up to CodeLanes::kMostSlotBytes
  const CodeLanes* lanes;
  int64_t num_lanes;  // an even number
  const float* a;     // [rows, depth], rows 64 apart
  float* c;           // [rows, columns of all lanes]
  int64_t c_stride;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether the instruction set supports RunValueLanes and UnpackLanes.
inline constexpr bool kTakesLanes = HWY_TARGET <= HWY_AVX3;
void RunValueLanes(int64_t rows, const ValueLanesArgs& args);
// Writes the codes as numbers to `to`, one row per slot, with rows `stride`
// apart. Does not use args.a and args.c.
void UnpackLanes(const ValueLanesArgs& args, int64_t stride, float* to);

// c += a b, where a is rows of weights and b the bfloat16 numbers of slots,
// which are read in place.
struct ValuePairsArgs {
  int64_t depth;      // number of slots
  const char* slots;  // the numbers of the first slot
  int64_t slot_bytes;
  const float* a;  // [rows, depth], rows 64 apart
  float* c;        // [rows, columns]
  int64_t c_stride;
  int64_t columns;    // a multiple of kCodeTileColumns
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether RunValuePairs supports this number of rows.
inline bool TakesValuePairs(int64_t rows) {
  return kTakesPairs && rows <= kCodeTileMostRows;
}
void RunValuePairs(int64_t rows, const ValuePairsArgs& args);

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODE_TILE_INL_H_
