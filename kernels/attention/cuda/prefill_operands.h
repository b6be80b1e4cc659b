// Converts the codes of a chunk, for a block of 64 slots, to numbers for the
// matrix products of prefill_attention-inl.h. The result is stored as pieces of
// 16 bytes in the order [piece][slot], like the content of a stage. All threads
// of a CTA must call these functions. C++17, device code.
#pragma once

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr int32_t kPromptBlock =
    static_cast<int32_t>(kAttentionBlockSlots);

// Stages piece `piece` (8 channels) of a row's query for a chunk, in the order
// in which keys are multiplied. If keys are codes, this is the order in which
// codes are extracted from a piece, which has four 32-bit words: of every 16
// numbers of the staged query, numbers 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 belong
// to codes of word c (0 to 3).
KVASIR_DEVICE void StoreQueries(ChunkKind kind, const simt::Vec16& queries,
                                int32_t piece, uint16_t* row) {
  if (kind == ChunkKind::kNumbers) {
    simt::StoreShared(reinterpret_cast<simt::Vec16*>(row + 8 * piece), queries);
    return;
  }
  const uint32_t(&words)[4] = queries.word;
  if (kind == ChunkKind::kCodes8) {
    // Pairs of channels go alternately to the first and the second half of
    // every 16 numbers.
    auto* const to =
        reinterpret_cast<uint64_t*>(row + piece / 2 * 16 + piece % 2 * 4);
    simt::StoreShared(to, words[0] | uint64_t{words[2]} << 32);
    simt::StoreShared(to + 2, words[1] | uint64_t{words[3]} << 32);
    return;
  }
  // Channels i and i + 4 become neighbours.
  uint16_t* const to = row + piece / 4 * 32 + 2 * (piece % 4);
  KVASIR_UNROLL
  for (int32_t i = 0; i < 4; ++i) {
    simt::StoreShared(reinterpret_cast<uint32_t*>(to + 8 * i),
                      simt::PickBytes(words[i / 2], words[2 + i / 2],
                                      i % 2 == 0 ? 0x5410u : 0x7632u));
  }
}

KVASIR_DEVICE simt::Vec16 PieceOf(const char* pieces, int32_t piece,
                                  int32_t slot) {
  return simt::LoadShared(reinterpret_cast<const simt::Vec16*>(pieces) +
                          piece * kPromptBlock + slot);
}
KVASIR_DEVICE void StorePiece(char* pieces, int32_t piece, int32_t slot,
                              const simt::Vec16& numbers) {
  simt::StoreShared(
      reinterpret_cast<simt::Vec16*>(pieces) + piece * kPromptBlock + slot,
      numbers);
}

// Converts the codes of a chunk of keys to numbers of type T. For each product
// of 16 channels, `to` gets a piece with the first eight channels of all slots
// and then a piece with the other eight.
template <typename T>
KVASIR_DEVICE void MakeKeyNumbers(const LatentChunkOnDevice& chunk,
                                  const uint32_t* table, const char* stage,
                                  char* to) {
  const bool levels = chunk.kind == ChunkKind::kLevels4;
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t slot = thread % kPromptBlock;
  KVASIR_NO_UNROLL
  for (int32_t p = thread / kPromptBlock; p < chunk.pieces;
       p += static_cast<int32_t>(simt::Threads()) / kPromptBlock) {
    const simt::Vec16 words = PieceOf(stage, p, slot);
    simt::Vec16 numbers;
    if (chunk.kind == ChunkKind::kCodes8) {
      KVASIR_UNROLL
      for (int32_t c = 0; c < 4; ++c) {
        numbers.word[c] = Codes8<T, 0>(words.word[c]);
      }
      StorePiece(to, 2 * p, slot, numbers);
      KVASIR_UNROLL
      for (int32_t c = 0; c < 4; ++c) {
        numbers.word[c] = Codes8<T, 1>(words.word[c]);
      }
      StorePiece(to, 2 * p + 1, slot, numbers);
      continue;
    }
    // A piece of 4-bit codes makes two products, each of two pieces of numbers.
    KVASIR_UNROLL
    for (int32_t half = 0; half < 4; ++half) {
      KVASIR_UNROLL
      for (int32_t c = 0; c < 4; ++c) {
        const uint32_t word = words.word[c] >> (4 * half);
        numbers.word[c] = levels ? LevelsOf(table, word) : Codes4<T>(word);
      }
      StorePiece(to, 4 * p + half, slot, numbers);
    }
  }
}

// Converts codes of values to float16 and applies their ranges. The numbers are
// stored in the order in which codes are extracted from a word (for 4 bits 0,
// 4, 1, 5, ...).
KVASIR_DEVICE void MakeValueNumbers(const LatentChunkOnDevice& chunk,
                                    const uint32_t* table, const char* stage,
                                    const char* params, char* to) {
  const bool levels = chunk.kind == ChunkKind::kLevels4;
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t slot = thread % kPromptBlock;
  const uint32_t range =
      simt::LoadShared(reinterpret_cast<const uint32_t*>(params) + slot);
  const uint32_t minimum = simt::PickBytes(range, range, 0x3232u);
  // Limits the scale so that no value is infinite (mma_attention-inl.h).
  const uint32_t most = levels ? chunk.most_scale
                               : simt::FmaPair(F16{}, minimum, chunk.less_scale,
                                               chunk.most_scale);
  const uint32_t scale =
      simt::MinPair(simt::PickBytes(range, range, 0x1010u), most);
  KVASIR_NO_UNROLL
  for (int32_t p = thread / kPromptBlock; p < chunk.pieces;
       p += static_cast<int32_t>(simt::Threads()) / kPromptBlock) {
    const simt::Vec16 words = PieceOf(stage, p, slot);
    simt::Vec16 numbers;
    if (chunk.kind == ChunkKind::kCodes8) {
      KVASIR_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const uint32_t word = words.word[2 * half + i];
          numbers.word[2 * i] =
              simt::FmaPair(F16{}, Codes8<F16, 0>(word), scale, minimum);
          numbers.word[2 * i + 1] =
              simt::FmaPair(F16{}, Codes8<F16, 1>(word), scale, minimum);
        }
        StorePiece(to, 2 * p + half, slot, numbers);
      }
      continue;
    }
    KVASIR_UNROLL
    for (int32_t c = 0; c < 4; ++c) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const uint32_t word = words.word[c] >> (4 * i);
        numbers.word[i] =
            levels ? simt::MulPair<F16>(LevelsOf(table, word), scale)
                   : simt::FmaPair(F16{}, Codes4<F16>(word), scale, minimum);
      }
      StorePiece(to, 4 * p + c, slot, numbers);
    }
  }
}

// Reorders exact rows of keys in place: from pieces of 8 numbers in channel
// order to the order in which queries of a chunk of `kind` are staged
// (StoreQueries). The number of channels must be a multiple of 16 (8-bit codes)
// or 32 (4-bit codes).
KVASIR_DEVICE void OrderExactKeys(ChunkKind kind, int32_t pieces, char* stage) {
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t slot = thread % kPromptBlock;
  const int32_t group = kind == ChunkKind::kCodes8 ? 2 : 4;
  KVASIR_NO_UNROLL
  for (int32_t p = thread / kPromptBlock * group; p < pieces;
       p += static_cast<int32_t>(simt::Threads()) / kPromptBlock * group) {
    if (kind == ChunkKind::kCodes8) {
      // Pairs of channels go alternately to the first and the second half of
      // every 16 numbers.
      const simt::Vec16 low = PieceOf(stage, p, slot);
      const simt::Vec16 high = PieceOf(stage, p + 1, slot);
      KVASIR_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        StorePiece(stage, p + half, slot,
                   {{low.word[half], low.word[2 + half], high.word[half],
                     high.word[2 + half]}});
      }
      continue;
    }
    // Channels i and i + 4 of each piece become neighbours.
    simt::Vec16 from[4];
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) from[i] = PieceOf(stage, p + i, slot);
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      simt::Vec16 to;
      KVASIR_UNROLL
      for (int32_t c = 0; c < 4; ++c) {
        to.word[c] =
            simt::PickBytes(from[c].word[i / 2], from[c].word[2 + i / 2],
                            i % 2 == 0 ? 0x5410u : 0x7632u);
      }
      StorePiece(stage, p + i, slot, to);
    }
  }
}

// Reorders exact rows of values in place to the order in which 4-bit codes are
// extracted: channels 0, 4, 1, 5, ... of each piece.
KVASIR_DEVICE void OrderExactValues(int32_t pieces, char* stage) {
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t slot = thread % kPromptBlock;
  KVASIR_NO_UNROLL
  for (int32_t p = thread / kPromptBlock; p < pieces;
       p += static_cast<int32_t>(simt::Threads()) / kPromptBlock) {
    const simt::Vec16 from = PieceOf(stage, p, slot);
    simt::Vec16 to;
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      to.word[i] = simt::PickBytes(from.word[i / 2], from.word[2 + i / 2],
                                   i % 2 == 0 ? 0x5410u : 0x7632u);
    }
    StorePiece(stage, p, slot, to);
  }
}

// Returns a mask for a pair of 16-bit numbers. Each half of the mask is all
// ones if the number in that half of `pair` is finite, and otherwise 0.
template <typename T>
KVASIR_DEVICE uint32_t FiniteMask(uint32_t pair) {
  constexpr uint32_t kExponent =
      DTypeOf<T>::kValue == DType::kBf16 ? 0x7f80u : 0x7c00u;
  return ((pair & kExponent) != kExponent ? 0xffffu : 0u) |
         ((pair >> 16 & kExponent) != kExponent ? 0xffff0000u : 0u);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
