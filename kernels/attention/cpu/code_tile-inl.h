// Matrix products of a few rows with the codes of cached slots. Codes are
// extracted in registers. Each element of a product is computed by the same
// chain of fused multiply-adds (FMA) as in linear/tile-inl.h. For inclusion by
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

// A register tile is a block of a product whose sums stay in registers. It is
// at least this many vectors wide.
inline constexpr int kCodeTileVecs = 2;
inline constexpr int64_t kCodeTileColumns = kCodeTileVecs * kVecLanes;

// The number of vectors of sums in a register tile. Eight just hide the latency
// of a multiply-add. AVX-512 and NEON have enough registers for 16, so that
// each extracted code and each element of `a` is used for more products.
inline constexpr int kCodeTileSums = kVecLanes == 8 ? 8 : 16;
inline constexpr int kCodeTileRows =
    KVASIR_TILE_ROWS < kCodeTileSums / kCodeTileVecs
        ? KVASIR_TILE_ROWS
        : kCodeTileSums / kCodeTileVecs;

// Up to this number of rows, it is faster to extract the codes again for each
// register tile than to write the extracted codes to memory once.
inline constexpr int64_t kCodeTileMostRows = 8;
// Up to this number of rows, bfloat16 keys are loaded as pairs in 32-bit words,
// and each register tile converts the pairs to float32 again. With AVX-512 and
// register tiles of eight rows or more, this is faster for up to 32 rows
// (measured).
inline constexpr int64_t kKeyPairsMostRows =
    kVecLanes == 16 && kCodeTileRows >= 8 ? 32 : kCodeTileMostRows;

// The table of the levels that a part's codes stand for, or null if the codes
// are used as they are.
inline const float* LevelsOf(const LatentPartArgs& part) {
  return part.num_levels > 0 ? part.levels : nullptr;
}

// Computes c += a b, where `a` has rows of queries and b has the codes of 64
// slots. The slots' bytes are passed as 32-bit words, transposed so that the
// words of neighbouring slots are adjacent: [words, 64].
struct KeyCodesArgs {
  // planes[i]: the words of plane i of the codes.
  const uint32_t* const* planes;
  // consecutive; in_chunk of a piece locates its codes
  const CodePiece* pieces;
  int64_t num_pieces;
  int64_t first;        // channel to which a's first column belongs
  const float* levels;  // null: codes are used as they are
  const float* a;       // [rows, channels]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether the instruction set supports RunKeyCodes and RunKeyPairs.
inline constexpr bool kTakesPairs = kVecLanes > 1;
void RunKeyCodes(int64_t rows, const KeyCodesArgs& args);

// Computes c += a b, where `a` has rows of queries and b has the bfloat16 keys
// of 64 slots, with two channels in each 32-bit word.
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

// Computes c += a b, where `a` has rows of attention weights and b has the
// codes of slots, which are read directly from the KV cache.
struct ValueCodesArgs {
  int64_t depth;             // number of slots
  const char* const* slots;  // [depth]: each slot's bytes
  CodePlace place;           // place of the first code in a slot
  const float* levels;       // null: codes are used as they are
  const float* a;            // [rows, depth], rows 64 floats apart
  float* c;                  // [rows, columns]
  int64_t c_stride;
  int64_t columns;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether RunValueCodes supports codes in this place. They must have fewer than
// 8 bits, and each vector of codes must fill whole bytes.
inline bool TakesValueCodes(const CodePlace& place, int64_t columns) {
  return kVecLanes % 8 == 0 && place.low_bits < 8 &&
         columns % kCodeTileColumns == 0 && place.low_bit % 8 == 0 &&
         place.high_bit % 8 == 0;
}
void RunValueCodes(int64_t rows, const ValueCodesArgs& args);

// Computes c += a b, where `a` has rows of attention weights and b has the
// codes of slots, which may have different numbers of bits per channel.
// CodeLanes describes how they are extracted.
struct ValueLanesArgs {
  int64_t depth;             // number of slots
  const char* const* slots;  // [depth]: each slot's bytes
  int64_t slot_bytes;        // up to CodeLanes::kMostSlotBytes
  const CodeLanes* lanes;
  int64_t num_lanes;  // an even number
  const float* a;     // [rows, depth], rows 64 floats apart
  float* c;           // [rows, columns of all lanes]
  int64_t c_stride;
  AheadLines* ahead;  // memory to prefetch meanwhile
};
// Whether the instruction set supports RunValueLanes and UnpackLanes.
inline constexpr bool kTakesLanes = HWY_TARGET <= HWY_AVX3;
void RunValueLanes(int64_t rows, const ValueLanesArgs& args);
// Writes the codes, converted to float32, to `to`: one row per slot, with rows
// `stride` floats apart. Does not use args.a and args.c.
void UnpackLanes(const ValueLanesArgs& args, int64_t stride, float* to);

// Computes c += a b, where `a` has rows of attention weights and b has the
// bfloat16 values of slots, which are read directly from the KV cache.
struct ValuePairsArgs {
  int64_t depth;      // number of slots
  const char* slots;  // where the first slot's numbers begin
  int64_t slot_bytes;
  const float* a;  // [rows, depth], rows 64 floats apart
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
