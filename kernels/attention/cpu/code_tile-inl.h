// Products of few rows with codes that are taken apart in registers: the tile
// of tile-inl.h for cached codes, each element the same FMA chain. For
// inclusion by
// *_cpu.cc; code_tile_cpu.cc has the code.
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

// Vectors of codes beside each other, at least.
inline constexpr int kCodeTileVecs = 2;
inline constexpr int64_t kCodeTileColumns = kCodeTileVecs * kVecLanes;

// Accumulators of a tile: as many as leave registers for the codes. AVX-512 and
// NEON have 32 registers, AVX2 16. Eight chains just hide the latency of a
// multiply-add; more also make codes, and the numbers they are multiplied with,
// serve longer.
inline constexpr int kCodeTileSums = kVecLanes == 8 ? 8 : 16;
inline constexpr int kCodeTileRows =
    KVASIR_TILE_ROWS < kCodeTileSums / kCodeTileVecs
        ? KVASIR_TILE_ROWS
        : kCodeTileSums / kCodeTileVecs;

// Up to here a row's own unpacking costs less than a way through memory.
inline constexpr int64_t kCodeTileMostRows = 8;
// Pairs of bfloat16s come apart so easily that more rows gain by half the bytes
// of a tile, if a tile has eight rows (measured with AVX-512).
inline constexpr int64_t kKeyPairsMostRows =
    kVecLanes == 16 && kCodeTileRows >= 8 ? 32 : kCodeTileMostRows;

// What codes of a part stand for; null: for themselves.
inline const float* LevelsOf(const LatentPartArgs& part) {
  return part.num_levels > 0 ? part.levels : nullptr;
}

// Rows of queries times codes of 64 slots: c += a b. b is given as words of the
// slots' bytes, slots side by side [words, 64].
struct KeyCodesArgs {
  // For each plane of codes, where its bits are counted from.
  const uint32_t* const* planes;
  const CodePiece* pieces;  // one after the other; their place in the chunk
  int64_t num_pieces;
  int64_t first;        // channel of a's first column
  const float* levels;  // that codes stand for; null: for themselves
  const float* a;       // [rows, channels]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // asked meanwhile
};
// Whether the tile can take codes and bfloat16s.
inline constexpr bool kTakesPairs = kVecLanes > 1;
void RunKeyCodes(int64_t rows, const KeyCodesArgs& args);

// The same of bfloat16s: two channels in each word.
struct KeyPairsArgs {
  int64_t depth;  // channels
  const uint32_t* words;
  const float* a;  // [rows, depth]
  int64_t a_stride;
  float* c;  // [rows, 64]
  int64_t c_stride;
  bool accumulate;
  AheadLines* ahead;  // asked meanwhile
};
void RunKeyPairs(int64_t rows, const KeyPairsArgs& args);

// Rows of weights times codes of slots, where they lie: c += a b.
struct ValueCodesArgs {
  int64_t depth;             // slots
  const char* const* slots;  // [depth]: each slot's bytes
  CodePlace place;           // of the first code
  const float* levels;       // as KeyCodesArgs
  const float* a;            // [rows, depth], rows 64 apart
  float* c;                  // [rows, columns]
  int64_t c_stride;
  int64_t columns;
  AheadLines* ahead;  // asked meanwhile
};
// Whether the tile can take codes that lie so: less than 8 bits, and vectors of
// them are whole bytes.
inline bool TakesValueCodes(const CodePlace& place, int64_t columns) {
  return kVecLanes % 8 == 0 && place.low_bits < 8 &&
         columns % kCodeTileColumns == 0 && place.low_bit % 8 == 0 &&
         place.high_bit % 8 == 0;
}
void RunValueCodes(int64_t rows, const ValueCodesArgs& args);

// Rows of weights times codes of slots by the table of CodeLanes, whatever
// their bits: c += a b.
struct ValueLanesArgs {
  int64_t depth;             // slots
  const char* const* slots;  // [depth]: each slot's bytes
  int64_t slot_bytes;        // up to CodeLanes::kMostSlotBytes
  const CodeLanes* lanes;
  int64_t num_lanes;  // an even number
  const float* a;     // [rows, depth], rows 64 apart
  float* c;           // [rows, columns of all lanes]
  int64_t c_stride;
  AheadLines* ahead;  // asked meanwhile
};
// Whether there are instructions for it.
inline constexpr bool kTakesLanes = HWY_TARGET <= HWY_AVX3;
void RunValueLanes(int64_t rows, const ValueLanesArgs& args);
// The codes themselves, to rows of `to` `stride` apart; args.a and args.c are
// not looked at.
void UnpackLanes(const ValueLanesArgs& args, int64_t stride, float* to);

// Rows of weights times bfloat16s of slots, where they lie: c += a b.
struct ValuePairsArgs {
  int64_t depth;      // slots
  const char* slots;  // the first one's numbers
  int64_t slot_bytes;
  const float* a;  // [rows, depth], rows 64 apart
  float* c;        // [rows, columns]
  int64_t c_stride;
  int64_t columns;    // a multiple of kCodeTileColumns
  AheadLines* ahead;  // asked meanwhile
};
// Whether the tile takes as many rows.
inline bool TakesValuePairs(int64_t rows) {
  return kTakesPairs && rows <= kCodeTileMostRows;
}
void RunValuePairs(int64_t rows, const ValuePairsArgs& args);

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODE_TILE_INL_H_
