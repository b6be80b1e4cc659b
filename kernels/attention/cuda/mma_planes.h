// Codes in two planes (ChunkKind) as operands of products. C++17, device code.
//
// Pieces, which LoadMatrices loads, have the low bits of codes. This file finds
// the high bits of the same codes and joins both, so that the products are the
// same as for codes in one plane: codes of 1 to 3 bits are multiplied like
// codes of 4 bits, and codes of 5 and 6 bits are bytes.
#pragma once

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// FourBitCodes and ByteCodes join low bits and high bits. The lowest bits of
// each byte of `high` belong to the codes in the same byte of `low`.
// FourBitCodes: a byte of `low` has four
// codes. The result has two of them in each byte, the even ones (odd = 0) or
// the odd ones (odd = 1), with 4 bits each. ByteCodes: a byte of `low` has two
// codes, with `high_bits` (1 or 2) high bits each. The result has one of them
// in each byte.
KVASIR_DEVICE uint32_t FourBitCodes(uint32_t low, uint32_t high, int32_t odd) {
  // Multiplying by 20 or 10 moves the high bits of two codes to bits 2 and 6.
  const uint32_t moved =
      odd == 0 ? (high & 0x05050505u) * 20 : (high & 0x0a0a0a0au) * 10;
  return simt::AndOr(moved, 0x44444444u, low >> (2 * odd) & 0x33333333u);
}
KVASIR_DEVICE uint32_t ByteCodes(uint32_t low, uint32_t high, int32_t high_bits,
                                 int32_t odd) {
  const uint32_t mask = high_bits == 1 ? 0x10101010u : 0x30303030u;
  return (low >> (4 * odd) & 0x0f0f0f0fu) |
         (high << (4 - odd * high_bits) & mask);
}
// SpreadFour moves each group of four bits in the lower half of a word to the
// lowest bits of a byte of its own. It does not clear the other bits. SpreadTwo
// does this with each two bits of a word that has only its lowest byte.
KVASIR_DEVICE uint32_t SpreadFour(uint32_t word) {
  return simt::PickBytes(word, word >> 4, 0x5140u);
}
KVASIR_DEVICE uint32_t SpreadTwo(uint32_t word) {
  const uint32_t halves = word * 0x1001u & 0x000f000fu;
  return halves * 0x41u & 0x03030303u;
}

// ---- keys: a stage has [piece][16 slots][16 bytes]

// Returns the index of the first high-plane piece in a stage of keys.
KVASIR_DEVICE int32_t FirstHigh(const LatentChunkOnDevice& chunk) {
  return (chunk.pieces + 1) / 2 * 2;
}
// Loads high bits of slot g + 8h (g = lane / 4), from byte `byte` of the
// chunk's high plane on.
template <typename Bits>
KVASIR_DEVICE uint32_t HighBits(const LatentChunkOnDevice& chunk,
                                const char* stage, int32_t byte, int32_t h) {
  const auto g = static_cast<int32_t>(simt::Lane() / 4);
  const int32_t at = chunk.high_byte + byte;
  const int32_t piece = FirstHigh(chunk) + at / 16;
  return simt::LoadShared(reinterpret_cast<const Bits*>(
      stage + (piece * 16 + g + 8 * h) * 16 + at % 16));
}
// Makes words of 4-bit codes from the codes of section `section` (64 channels)
// of keys with 1 to 3 bits: the even codes of slots g and g + 8, then their odd
// codes.
KVASIR_DEVICE void LoadTwoPlanes(const LatentChunkOnDevice& chunk,
                                 const char* stage, int32_t section,
                                 uint32_t (&words)[4]) {
  const auto lane = static_cast<int32_t>(simt::Lane());
  uint32_t low[2] = {};
  if (chunk.has_low) {
    simt::LoadMatrices<2>(low, stage + (section * 16 + lane % 16) * 16);
  }
  KVASIR_UNROLL
  for (int32_t h = 0; h < 2; ++h) {
    uint32_t high = 0;
    if (chunk.high_bytes > 0) {
      high = SpreadFour(
          HighBits<uint16_t>(chunk, stage, 8 * section + lane % 4 * 2, h));
    }
    words[h] = FourBitCodes(low[h], high, 0);
    words[2 + h] = FourBitCodes(low[h], high, 1);
  }
}
// Makes operands with the even codes (a[0]) and the odd codes (a[1]) of a
// section of keys with 5 or 6 bits. `words` have their lowest four bits.
KVASIR_DEVICE void AddHighBits(const LatentChunkOnDevice& chunk,
                               const char* stage, int32_t section,
                               const uint32_t (&words)[4],
                               uint32_t (&a)[2][4]) {
  const auto c = static_cast<int32_t>(simt::Lane() % 4);
  const int32_t high_bits = chunk.high_bytes / 4;
  KVASIR_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t byte =
        chunk.high_bytes * (2 * section + i / 2) + high_bits * c;
    const uint32_t high =
        high_bits == 1
            ? SpreadTwo(HighBits<uint8_t>(chunk, stage, byte, i % 2))
            : SpreadFour(HighBits<uint16_t>(chunk, stage, byte, i % 2));
    a[0][i] = ByteCodes(words[i], high, high_bits, 0);
    a[1][i] = ByteCodes(words[i], high, high_bits, 1);
  }
}

// ---- values: a stage has a piece of the low plane and one of the high plane,
// each [64 slots][16 bytes]

// HighByte returns the index of the first high-plane byte that belongs to piece
// `piece` of the low plane. It counts from the start of the chunk's first
// high-plane piece. HighPiece returns the distance in bytes from piece `piece`
// to the high-plane piece that has this byte.
KVASIR_DEVICE int32_t HighByte(const LatentChunkOnDevice& chunk,
                               int32_t piece) {
  return chunk.high_byte + piece * chunk.high_bytes;
}
KVASIR_DEVICE int32_t HighPiece(const LatentChunkOnDevice& chunk,
                                int32_t piece) {
  return chunk.high_offset +
         (HighByte(chunk, piece) / 16 - piece) * chunk.piece_stride;
}
// Loads the lane's high bits of slots [32k, 32k + 32): in each word a byte for
// each of four neighbouring slots (StagedSlot). The bits of the lanes with
// g = lane / 4 begin at bit g * high_bytes, but LoadMatrices gives them those
// from bit 16g on.
KVASIR_DEVICE void LoadHighBytes(const LatentChunkOnDevice& chunk,
                                 int32_t piece, const char* stage, int32_t k,
                                 uint32_t (&high)[2]) {
  const auto lane = static_cast<int32_t>(simt::Lane());
  uint32_t words[4];
  simt::LoadMatrices<4, /*transposed=*/true>(words,
                                             stage + (64 + 32 * k + lane) * 16);
  const int32_t bit =
      8 * (HighByte(chunk, piece) % 16) + lane / 4 * chunk.high_bytes;
  const auto from = static_cast<uint32_t>(bit / 16 * 4 + lane % 4);
  KVASIR_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    words[i] = simt::ShuffleFrom(words[i], from) >> (bit % 16);
  }
  high[0] = simt::PickBytes(words[0], words[1], 0x6420u);
  high[1] = simt::PickBytes(words[2], words[3], 0x6420u);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
