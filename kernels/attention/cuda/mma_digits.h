// Digits: tensor cores multiply codes as integers (compare
// kernels/attention/params/code_digits.h, which CPUs use). A query or an
// attention weight is written as a float32 unit times an integer, and the
// integer as 256 * high + low with two signed bytes. Codes are unsigned bytes,
// and levels are signed ones. So sums of products are exact in any order.
//
// Numbers that share a unit: for queries, the channels of a row that belong to
// one chunk (at most 128); for weights, a row's 64 slots of a block. The unit
// is a power of 2. Each number is off by at most half a unit, which is less
// than 1/32000 of the largest magnitude among these numbers.
//
// An integer is at most kMostDigits. So a sum over 128 channels of codes up to
// 255 (or levels up to 127) is below 2^31. C++17, device code.
#pragma once

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr int32_t kMostDigits = 32512;
static_assert(kDigitChannels * 255 * (int64_t{kMostDigits} + 128) < int64_t{1}
                                                                        << 31);

// The unit of the numbers whose largest magnitude has the float32 bits `most`,
// and its inverse. If `most` is not finite, the unit is NaN. Numbers that are
// all below 2^-115 become 0.
struct DigitUnit {
  float unit;
  float inverse;

  static KVASIR_DEVICE DigitUnit Of(uint32_t most) {
    // The unit is 2^-14 times the power of 2 that is not above the largest
    // magnitude. If this magnitude is just below the next power of 2, that
    // power is taken, because the high digit would be 128 otherwise.
    const uint32_t power = (most + 0x00020000u) & 0x7f800000u;
    const uint32_t least = 27u << 23;
    const uint32_t exponent = power > least ? power : least;
    return {simt::BitsAs<float>(most < 0x7f7e0000u ? exponent - (14u << 23)
                                                   : 0x7fffffffu),
            simt::BitsAs<float>((268u << 23) - exponent)};
  }
};

// Returns a word whose lower two bytes are the digits of x: byte 1 is the high
// digit, and byte 0 is the low digit plus 128.
KVASIR_DEVICE uint32_t RawDigits(float x, float inverse) {
  // The float32 numbers around 1.5 * 2^23 are integers, so their last bits are
  // those of the integer. 128 is added to round the high digit to nearest.
  constexpr float kBase = 12582912.0f + 128.0f;
  return simt::BitsAs<uint32_t>(simt::Fma(x, inverse, kBase));
}

// Returns 256 * high + low for the sums of products with high and low digits.
KVASIR_DEVICE int32_t JoinDigits(int32_t high, int32_t low) {
  return high * 256 + low;
}

// Returns the place, among the staged digits of 64 channels, of the digits of
// channel `i` of them. A lane loads 16 of these 64 bytes, from
// 16 * (lane % 4) on. They are second operands of products.
KVASIR_DEVICE int32_t DigitPlace(ChunkKind kind, int32_t i) {
  if (kind == ChunkKind::kCodes8) {
    // A word of a piece has the codes of four neighbouring channels.
    return i % 16 / 4 * 16 + i / 16 * 4 + i % 4;
  }
  // Two words have eight codes each: words of two pieces, or those that
  // FourBitCodes makes from a word with the low bits of 16 codes.
  const bool two = HasTwoBits(kind);
  const int32_t word = two ? i % 2 : i / 32;
  const int32_t code = two ? i % 16 / 2 : i % 8;  // index in the word
  const int32_t first = (two ? i / 16 : i % 32 / 8) * 16;
  // The first product has the even codes of both words, and the second one has
  // the odd codes. With levels, each product has the codes of one word.
  return first + (HasLevels(kind) ? word * 8 + code
                                  : code % 2 * 8 + word * 4 + code / 2);
}

// Adds the products of digits and of codes or, if the chunk has levels, of
// levels.
KVASIR_DEVICE void CodeProduct(ChunkKind kind, int32_t (&d)[4],
                               const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if (HasLevels(kind)) {
    simt::MmaS8(d, a, b);
  } else {
    simt::MmaU8(d, a, b);
  }
}

// Looks up the levels of the eight codes in a word. levels[0] gets those of the
// lower four codes, one in each byte, and levels[1] those of the others.
// `table` has the levels as bytes: 16, or the first 8 for codes of up to 3
// bits.
KVASIR_DEVICE void LookUpLevels(ChunkKind kind, const uint32_t (&table)[4],
                                uint32_t word, uint32_t (&levels)[2]) {
  if (kind == ChunkKind::kLevels3) {
    levels[0] = simt::PickBytes(table[0], table[1], word);
    levels[1] = simt::PickBytes(table[0], table[1], word >> 16);
    return;
  }
  const uint32_t low_bits = word & 0x77777777u;
  // Byte i of a result comes from the upper eight levels if bit 3 of code i is
  // set.
  const uint32_t half = simt::AndOr(word >> 1, 0x44444444u, 0x32103210u);
  KVASIR_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    levels[i] = simt::PickBytes(
        simt::PickBytes(table[0], table[1], low_bits >> (16 * i)),
        simt::PickBytes(table[2], table[3], low_bits >> (16 * i)),
        half >> (16 * i));
  }
}

// The sums of products that a lane has, for each tile of 4 rows. In tile t, the
// lane has the sums of row 4t + lane % 4: d[t][0] and d[t][1] with its high and
// low digits, and the same for another slot or channel in d[t][2] and d[t][3].
template <int32_t row_tiles>
struct DigitSums {
  int32_t d[row_tiles][4];
};
template <int32_t row_tiles>
KVASIR_DEVICE void Clear(DigitSums<row_tiles>* sums) {
  KVASIR_UNROLL
  for (int32_t t = 0; t < row_tiles; ++t) {
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) sums->d[t][i] = 0;
  }
}
// Returns the sum of the first (h = 0) or the second slot or channel.
template <int32_t row_tiles>
KVASIR_DEVICE int32_t Joined(const DigitSums<row_tiles>& sums, int32_t t,
                             int32_t h) {
  return JoinDigits(sums.d[t][2 * h], sums.d[t][2 * h + 1]);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
