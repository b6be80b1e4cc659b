// Numbers of 16 bits as operands of tensor cores, and the conversion of codes
// to such numbers, for prompts. C++17, device code.
#pragma once

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/numbers.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// LowHalf and HighHalf convert one of the two float16 numbers in a word to
// float32.
KVASIR_DEVICE float LowHalf(uint32_t word) {
  return simt::ToFloat(F16{static_cast<uint16_t>(word)});
}
KVASIR_DEVICE float HighHalf(uint32_t word) {
  return simt::ToFloat(F16{static_cast<uint16_t>(word >> 16)});
}

template <typename Number>
KVASIR_DEVICE void Product(float (&d)[4], const uint32_t (&a)[4],
                           const uint32_t (&b)[2]) {
  if constexpr (DTypeOf<Number>::kValue == DType::kBf16) {
    simt::MmaBf16(d, a, b);
  } else {
    simt::MmaF16(d, a, b);
  }
}

// HasFourBits and HasTwoBits return whether a piece of the low plane has room
// for 4 or 2 bits of each code.
KVASIR_DEVICE bool HasFourBits(ChunkKind kind) {
  return kind == ChunkKind::kCodes4 || kind == ChunkKind::kLevels4 ||
         kind == ChunkKind::kCodes6;
}
KVASIR_DEVICE bool HasTwoBits(ChunkKind kind) {
  return kind == ChunkKind::kCodes3 || kind == ChunkKind::kLevels3;
}
KVASIR_DEVICE bool HasLevels(ChunkKind kind) {
  return kind == ChunkKind::kLevels4 || kind == ChunkKind::kLevels3;
}
// Values are summed in sets of 16 channels. Returns how many sets a warp has of
// a chunk: as many as codes are in a byte of a piece.
inline constexpr int32_t kMostSets = 4;
KVASIR_DEVICE int32_t SetsOf(ChunkKind kind) {
  return HasTwoBits(kind) ? kMostSets : HasFourBits(kind) ? 2 : 1;
}
// Returns the index at which channel i is stored in a chunk's staged queries.
// If the chunk has codes, only exact rows are multiplied by these queries.
KVASIR_DEVICE int32_t StagedAt(ChunkKind kind, int32_t i) {
  if (!HasFourBits(kind)) return i;
  const int32_t in_word = i % 8;
  return i - in_word + (in_word < 4 ? 2 * in_word : 2 * in_word - 7);
}

// Returns whether both numbers of a pair are finite (not infinite and not NaN).
template <typename T>
KVASIR_DEVICE bool IsFinite(uint32_t pair) {
  constexpr uint32_t kExponent =
      DTypeOf<T>::kValue == DType::kBf16 ? 0x7f80u : 0x7c00u;
  return (pair & kExponent) != kExponent &&
         (pair >> 16 & kExponent) != kExponent;
}

// Converts the 4-bit codes in bits 0 to 3 and 16 to 19 of a word to a pair of
// numbers. In the float16 number 1024 (in bfloat16: 128) the last bit of the
// mantissa stands for 1. So ORing a code into its bits gives 1024 + code, from
// which 1024 is subtracted.
template <typename Number>
KVASIR_DEVICE uint32_t Codes4(uint32_t word) {
  constexpr bool kBf16 = DTypeOf<Number>::kValue == DType::kBf16;
  constexpr uint32_t kBase = kBf16 ? 0x43004300u : 0x64006400u;
  return simt::SubPair<Number>(simt::AndOr(word, 0x000f000fu, kBase), kBase);
}
// Fills the tables of levels [tables][256] in shared memory. All threads must
// call it. Entry i is a pair of levels: the lower half is the level of the code
// in the lower four bits of i, the upper half that of the code in the upper
// four bits.
inline constexpr int32_t kLevelTableWords = 256;
template <typename T>
KVASIR_DEVICE void FillLevelTables(const AttentionDevice& device,
                                   uint32_t* tables) {
  for (int32_t t = 0; t < device.num_tables; ++t) {
    const float* const levels = device.levels[t];
    KVASIR_NO_UNROLL
    for (auto i = static_cast<int32_t>(simt::Thread()); i < kLevelTableWords;
         i += static_cast<int32_t>(simt::Threads())) {
      const float low = levels[i % 16];
      const float high = levels[i / 16];
      simt::StoreShared(tables + t * kLevelTableWords + i,
                        device.levels_of_keys[t]
                            ? simt::MakePair<T>(low, high)
                            : simt::MakePair<F16>(low, high));
    }
  }
}
// Looks up the levels of the 4-bit codes in bits 0 to 3 and 16 to 19 of a word,
// and returns them as a pair.
KVASIR_DEVICE uint32_t LevelsOf(const uint32_t* table, uint32_t word) {
  const uint32_t pair = word & 0x000f000fu;
  return simt::LoadShared(table + ((pair | pair >> 12) & 0xffu));
}
// Converts the 8-bit codes in bytes 2i and 2i + 1 of a word to a pair of
// numbers.
template <typename T, uint32_t i>
KVASIR_DEVICE uint32_t Codes8(uint32_t word) {
  if constexpr (DTypeOf<T>::kValue == DType::kBf16) {
    // In float32, replacing the last byte of 2^23 by a code gives exactly 2^23
    // plus the code.
    constexpr uint32_t kBase = 0x4b000000u;
    const auto number = [](uint32_t bits) {
      return simt::BitsAs<float>(bits) - 8388608.0f;
    };
    return simt::MakePair<T>(
        number(simt::PickBytes(word, kBase, 0x7440u + 2 * i)),
        number(simt::PickBytes(word, kBase, 0x7441u + 2 * i)));
  } else {
    return simt::SubPair<F16>(
        simt::PickBytes(word, 0x64646464u, 0x4140u + 0x0202u * i), 0x64006400u);
  }
}

// The sums of products that a lane has, for each tile of 8 rows.
template <int32_t tiles>
struct TileSums {
  float d[tiles][4];
};
template <int32_t tiles>
KVASIR_DEVICE void Clear(TileSums<tiles>* sums) {
  KVASIR_UNROLL
  for (int32_t n = 0; n < tiles; ++n) {
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) sums->d[n][i] = 0.0f;
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
