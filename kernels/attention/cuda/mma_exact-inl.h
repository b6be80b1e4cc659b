// Multiplies with exact rows, for mma_attention-inl.h. A context has few exact
// rows, and only at its two ends. So they are loaded directly into operand
// registers. Copies of latents into the stages (mma_ring-inl.h) continue
// meanwhile. A lane reads adjacent numbers of a row; four lanes (keys) or eight
// lanes (values) together read a contiguous piece. C++17, device code.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// LowerOf combines the lower halves of two words into a pair of 16-bit numbers;
// UpperOf combines the upper halves.
KVASIR_DEVICE uint32_t LowerOf(uint32_t first, uint32_t second) {
  return simt::PickBytes(first, second, 0x5410u);
}
KVASIR_DEVICE uint32_t UpperOf(uint32_t first, uint32_t second) {
  return simt::PickBytes(first, second, 0x7632u);
}
template <typename W>
KVASIR_DEVICE W WordsAt(const char* row, int32_t channel) {
  return simt::LoadGlobal(reinterpret_cast<const W*>(row + 2 * channel));
}

// Loads the lane's channels of the p-th section of an exact key row. A section
// has 32 channels if the chunk has codes of 4 to 6 bits, otherwise 16. The
// lane's channels match the order of staged queries. With c = lane % 4, they
// are 8c to 8c + 7 for codes of 4 to 6 bits, 4c to 4c + 3 for other codes, and
// 2c, 2c + 1, 2c + 8 and 2c + 9 for unquantized numbers.
KVASIR_DEVICE simt::Vec16 ExactKeyWords(ChunkKind kind, const char* row,
                                        int32_t p, int32_t channels) {
  const auto c = static_cast<int32_t>(simt::Lane() % 4);
  if (kind == ChunkKind::kNumbers) {
    simt::Vec16 words = {{WordsAt<uint32_t>(row, 16 * p + 2 * c), 0, 0, 0}};
    if (16 * p + 8 < channels) {
      words.word[1] = WordsAt<uint32_t>(row, 16 * p + 8 + 2 * c);
    }
    return words;
  }
  if (!HasFourBits(kind)) {
    const auto both = WordsAt<uint64_t>(row, 16 * p + 4 * c);
    return {
        {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32), 0, 0}};
  }
  return WordsAt<simt::Vec16>(row, 32 * p + 8 * c);
}

// Adds to `scores` the products of a chunk's exact keys and the queries of the
// first `row_tiles` tiles of 8 rows. `rows` points to the exact rows of the
// lane's two slots, g and g + 8 (g = lane / 4); null stands for zeros. `q`
// points to the lane's staged queries of the first tile, at the chunk's column.
// The queries of the next tile are `tile_stride` numbers later.
template <typename T, int32_t tiles>
KVASIR_DEVICE void AddExactKeys(ChunkKind kind, int32_t channels,
                                const char* const (&rows)[2], const uint16_t* q,
                                int32_t tile_stride, int32_t row_tiles,
                                float (&scores)[tiles][4]) {
  constexpr int32_t kAhead = 2;
  const auto c = static_cast<int32_t>(simt::Lane() % 4);
  const bool codes4 = HasFourBits(kind);
  const int32_t each = codes4 ? 32 : 16;
  const int32_t count = (channels + each - 1) / each;
  KVASIR_NO_UNROLL
  for (int32_t first = 0; first < count; first += kAhead) {
    simt::Vec16 words[kAhead][2] = {};
    KVASIR_UNROLL
    for (int32_t i = 0; i < kAhead; ++i) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        if (first + i < count && rows[j] != nullptr) {
          words[i][j] = ExactKeyWords(kind, rows[j], first + i, channels);
        }
      }
    }
    KVASIR_UNROLL
    for (int32_t i = 0; i < kAhead; ++i) {
      if (first + i >= count) break;
      const uint32_t(&low)[4] = words[i][0].word;
      const uint32_t(&high)[4] = words[i][1].word;
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n >= row_tiles) continue;
        const uint16_t* const queries =
            q + n * tile_stride + each * (first + i);
        if (codes4) {
          const auto staged = simt::LoadShared(
              reinterpret_cast<const simt::Vec16*>(queries + 8 * c));
          KVASIR_UNROLL
          for (int32_t k = 0; k < 2; ++k) {
            const uint32_t a[4] = {
                LowerOf(low[k], low[2 + k]), LowerOf(high[k], high[2 + k]),
                UpperOf(low[k], low[2 + k]), UpperOf(high[k], high[2 + k])};
            const uint32_t b[2] = {staged.word[2 * k], staged.word[2 * k + 1]};
            Product<T>(scores[n], a, b);
          }
          continue;
        }
        const bool numbers = kind == ChunkKind::kNumbers;
        const auto* const staged =
            reinterpret_cast<const uint32_t*>(queries + (numbers ? 2 : 4) * c);
        const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
        const uint32_t b[2] = {simt::LoadShared(staged),
                               simt::LoadShared(staged + (numbers ? 4 : 1))};
        Product<T>(scores[n], a, b);
      }
    }
  }
}

// The numbers of an exact value row in the channels whose sums the lane holds.
// With g = lane / 4, and counted from the warp's first channel `first`, these
// are channels 8g to 8g + 7 for codes of 1 to 3 bits, 4g to 4g + 3 for codes of
// 4 to 6 bits, and 2g and 2g + 1 for 8-bit codes. For unquantized numbers they
// are g and, if the warp has more than 8 channels, g + 8.
KVASIR_DEVICE simt::Vec16 ExactValueWords(ChunkKind kind, const char* row,
                                          int32_t first, int32_t channels) {
  const auto g = static_cast<int32_t>(simt::Lane() / 4);
  if (kind == ChunkKind::kNumbers) {
    uint32_t pair = WordsAt<uint16_t>(row, first + g);
    if (first + 8 < channels) {
      pair |= uint32_t{WordsAt<uint16_t>(row, first + 8 + g)} << 16;
    }
    return {{pair, 0, 0, 0}};
  }
  if (kind == ChunkKind::kCodes8) {
    return {{WordsAt<uint32_t>(row, first + 2 * g), 0, 0, 0}};
  }
  if (HasTwoBits(kind)) {
    return WordsAt<simt::Vec16>(row, first + 8 * g);
  }
  const auto both = WordsAt<uint64_t>(row, first + 4 * g);
  return {
      {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32), 0, 0}};
}

// LoadExactValues loads exact values of 16 slots, in the warp's channels, as
// the operands of products, one for each set of channels (SetsOf). Each lane
// passes the `place` of one slot's exact row (RowPlaceOf), or kNoExactRow for
// zeros. The slots of lanes `from` to `from` + 15 are loaded.
inline constexpr int64_t kNoExactRow = int64_t{1} << 62;
KVASIR_DEVICE int64_t ShufflePlace(int64_t place, int32_t lane) {
  const auto from = static_cast<uint32_t>(lane);
  const auto bits = static_cast<uint64_t>(place);
  const uint32_t low = simt::ShuffleFrom(static_cast<uint32_t>(bits), from);
  const uint32_t high =
      simt::ShuffleFrom(static_cast<uint32_t>(bits >> 32), from);
  return static_cast<int64_t>(uint64_t{high} << 32 | low);
}
KVASIR_DEVICE void LoadExactValues(ChunkKind kind,
                                   const LatentChunkOnDevice& chunk,
                                   int32_t first, int64_t place, int32_t from,
                                   uint32_t (&a)[kMostSets][4]) {
  const auto c = static_cast<int32_t>(simt::Lane() % 4);
  int64_t places[4];
  KVASIR_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    places[i] = ShufflePlace(place, from + 8 * (i / 2) + 2 * c + i % 2);
  }
  simt::Vec16 words[4] = {};
  KVASIR_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    if (places[i] == kNoExactRow) continue;
    words[i] =
        ExactValueWords(kind, RowAt(chunk, places[i]), first, chunk.channels);
  }
  const int32_t sets = SetsOf(kind);
  KVASIR_UNROLL
  for (int32_t h = 0; h < 2; ++h) {
    const uint32_t(&one)[4] = words[2 * h].word;
    const uint32_t(&next)[4] = words[2 * h + 1].word;
    a[0][2 * h] = LowerOf(one[0], next[0]);
    const uint32_t second = UpperOf(one[0], next[0]);
    if (sets == 1) {
      a[0][2 * h + 1] = second;
    } else if (sets == 2) {
      a[0][2 * h + 1] = LowerOf(one[1], next[1]);
      a[1][2 * h] = second;
      a[1][2 * h + 1] = UpperOf(one[1], next[1]);
    } else {
      a[0][2 * h + 1] = LowerOf(one[2], next[2]);
      a[1][2 * h] = LowerOf(one[1], next[1]);
      a[1][2 * h + 1] = LowerOf(one[3], next[3]);
      a[2][2 * h] = second;
      a[2][2 * h + 1] = UpperOf(one[2], next[2]);
      a[3][2 * h] = UpperOf(one[1], next[1]);
      a[3][2 * h + 1] = UpperOf(one[3], next[3]);
    }
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
