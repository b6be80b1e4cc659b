// Multiplies the digits of queries and of attention weights (code_digits.h) by
// the codes of cached slots. With VNNI, both are bytes in vector registers, so
// one instruction multiplies and adds up to 64 of them. Other instruction sets
// multiply 16-bit integers. C++17.
#pragma once

#include <cstdint>

#include "kernels/attention/grid/grid_tables.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/simd/ahead_lines.h"

namespace kvasir::kernels {

// Computes scores of 64 slots for one piece of codes: for every row and slot,
//   c = fma(unit, sum of integer * number, c)
// over the piece's channels. `unit` and `integer` represent the query, and
// `number` is the channel's code or the integer of its level.
struct KeyDotsArgs {
  // planes[i]: the 32-bit words of plane i of the slots' codes, transposed so
  // that the words of neighbouring slots are adjacent, [words, 64]. RunKeyDots
  // may also read one row of words after those of the piece.
  const uint32_t* const* planes;
  const CodePiece* piece;  // in_chunk locates its codes
  const int8_t* levels;    // [16] integers; null: codes have no levels
  const uint32_t* digits;  // as CutQuery writes them, rows digits_stride apart
  int64_t digits_stride;
  float* c;           // [rows, 64]
  bool accumulate;    // false: the old `c` counts as 0
  AheadLines* ahead;  // memory to prefetch during the computation
};
void RunKeyDots(int64_t rows, const KeyDotsArgs& args);

// Writes DigitWords words for one piece of a row's query: the unit, the sum of
// the integers, and then two words for every four channels. The codes of the
// four channels are at the same place in the four bytes of a word of codes. If
// the instruction set multiplies bytes, the first word has their high digits
// and the second their low digits. Otherwise the first word has the 16-bit
// integers of the first and third channel, the second word those of the others.
// q has only the piece's channels. The unit is multiplied by `step`, the step
// of the part's levels.
void CutQuery(const CodePiece& piece, const float* q, float step,
              uint32_t* digits);

// Adds the values of a block for one piece of codes: for every row and channel,
//   c = fma(unit, sum of integer * number, c)
// over the block's slots. `unit` and `integer` represent the row's weights.
struct ValueDotsArgs {
  // [64]: each slot's bytes. Only slots [begin, end) are read; the integers of
  // all others must be 0.
  const char* const* slots;
  int64_t begin;
  int64_t end;
  int64_t room;  // the number of bytes that may be read from each slot
  CodePlace place;
  int64_t width;               // up to kDigitChannels
  const int8_t* levels;        // [16] integers; null: codes have no levels
  float* numbers;              // scratch: kValueDotsFloats floats
  const WeightDigits* digits;  // [rows]
  float* c;                    // [rows, width]
  int64_t c_stride;
  AheadLines* ahead;  // memory to prefetch during the computation
};
// The number of floats that hold a 16-bit number for each of 128 channels of 64
// slots.
inline constexpr int64_t kValueDotsFloats = 64 * 128 / 2;
void RunValueDots(int64_t rows, const ValueDotsArgs& args);

}  // namespace kvasir::kernels
