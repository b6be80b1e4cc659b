// Computes attention for prompts (sequences of more than kDeviceSplitRows rows)
// on tensor cores, in items of 128 or 64 rows. Supports the codecs and exact
// rows that mma_attention-inl.h supports. C++17, device code.
//
// A CTA of four warps processes the slots of an item in blocks of 64, with an
// online-softmax step per block (FlashAttention-2, section 3). A warp has
// `tiles` times 16 rows and keeps their scores, weights, sums and maxima in
// registers. Rows are the first operand of mma.m16n8k16 and latents the second:
//   scores: [16 rows][16 channels] times [16 channels][8 slots]
//   values: [16 rows][16 slots] times [16 slots][8 channels]
// The chunks of a block are copied asynchronously into stages that all warps
// read. Codes are converted once for all rows to 16-bit numbers, which are
// stored in a tile of shared memory in the order of the products. The
// conversion of keys is exact, and their scale and minimum are applied to the
// sums of a run. Values become fma(code, scale, minimum), rounded to float16.
// If a block's latents are needed as codes and as exact rows, it is
// visited once for each form (prefill_order.h).
//
// A row's arithmetic does not depend on other rows: blocks begin at fixed
// slots, and a block that the row does not see changes no bit. So a row has the
// same bits however a prompt is divided into launches and items. These bits
// differ from those of the decoding kernel, which uses splits of 512 slots. The
// decoding kernel computes prompts in two cases: if they must have the same
// bits as single rows (PagedAttentionParamsIn::prompts_as_rows), or if this
// kernel does not support the layer. For example, it does not support values
// with more than 256 channels, or values of which only some are codes.
//
// Layout: latents as in mma_attention-inl.h; queries must be aligned to 16
// bytes. Shared memory: 25 KiB for all stages, a tile of 16 KiB if there are
// codes, and 2 bytes per row and channel of queries. With heads of 128
// channels, a multiprocessor has room for two CTAs.
//
// Memory traffic: each latent is read once per 128 (or 64) rows, the first time
// from memory and later from the level-2 cache. For example, for a prompt of 8K
// tokens with 32 query heads over 8 KV heads of 128 bfloat16 channels, a layer
// reads 4.3 GB of latents. Queries and results are moved once. Operations: 4
// per row, slot and channel, which is 0.55e12 in the same example. With 32 rows
// per warp, a product (16 x 8 x 16) reads 192 bytes of shared memory for scores
// and 128 bytes for values, which takes less time than its mma.sync; with 16
// rows per warp it reads 320 and 256 bytes. For a block of 64 slots and 256
// products, a lane executes these other instructions: 80 loads of operands, 4.5
// for each of 64 scores, and for codes about 1.5 for each of 128 numbers. The
// lower bound of the time is the operations divided by the rate of the tensor
// cores.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/attention_key_bias.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/prefill_loads-inl.h"
#include "kernels/attention/cuda/prefill_operands.h"
#include "kernels/attention/cuda/prefill_order.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Computes items of 64 or 128 rows: a warp has `tiles` (1 or 2) tiles of 16
// rows. Two tiles are possible only if keys have no codes or a single run of
// codes (PromptRows).
template <typename T, int32_t tiles>
class PrefillAttention : PrefillLoads<T, tiles> {
  using Loads = PrefillLoads<T, tiles>;

 public:
  using Loads::kRows;

  KVASIR_DEVICE explicit PrefillAttention(const AttentionKernelArgs& args)
      : Loads(args) {}

  using Loads::next_item;

  // Computes an item. All threads of the CTA must call it, because it has
  // barriers.
  KVASIR_DEVICE void Compute(const Item& item, const UnitChunks& chunks) {
    Begin(item, chunks);
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      max_[r] = kLeastMax;
      weights_[r] = 0.0f;
    }
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      KVASIR_UNROLL
      for (int32_t n = 0; n < kValueTiles; ++n) Clear(sum_[t][n]);
    }
    KVASIR_NO_UNROLL
    for (visit_ = order_.First(device_); !order_.Done(visit_);
         visit_ = order_.Next(device_, visit_)) {
      Look();
      Score();
      Weigh();
      Sum();
    }
    Finish();
  }

 private:
  using Loads::args_, Loads::chunks_, Loads::device_, Loads::idle_,
      Loads::item_, Loads::masked_, Loads::order_, Loads::visit_;
  using Loads::Begin, Loads::ChunkOf, Loads::FirstRow, Loads::Lane, Loads::Look,
      Loads::ParamsOf, Loads::PartPieces, Loads::Queries, Loads::QueryStride,
      Loads::QuerySums, Loads::ReadsOfRow, Loads::RowOf, Loads::SeenBy,
      Loads::Step, Loads::TableOf, Loads::Tile;
  using Loads::kBlock, Loads::kLaneRows, Loads::kMostPieces, Loads::kPiece,
      Loads::kPieceBytes, Loads::kTilePieces;
  using typename Loads::Part, typename Loads::RowReads;
  static constexpr int32_t kSlotTiles = kBlock / 8;
  // A warp's sums of values are divided into slabs of 64 channels.
  static constexpr int32_t kSlabs = static_cast<int32_t>(PromptSlabs(kRows));
  static constexpr int32_t kSlabTiles = 8;
  static constexpr int32_t kValueTiles = kSlabs * kSlabTiles;
  // True if keys may have several runs of codes, so that the products of each
  // run must first be summed separately (in run_).
  static constexpr bool kRunsApart = tiles == 1;
  // Items of 128 rows add no key bias, because they have no registers left for
  // it (PromptRowsOfAll).
  static constexpr bool kAddsKeyBias = tiles == 1;
  static constexpr float kMinusInfinity = -__builtin_inff();

  static KVASIR_DEVICE void Clear(float (&sums)[4]) {
    KVASIR_UNROLL
    for (int32_t i = 0; i < 4; ++i) sums[i] = 0.0f;
  }
  struct Scores {
    float d[tiles][kSlotTiles][4];
  };
  static KVASIR_DEVICE void Clear(Scores* scores) {
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlotTiles; ++n) Clear(scores->d[t][n]);
    }
  }
  // The attention weights of a block of slots, as the A operands of matrix
  // products. Each operand covers 16 slots.
  struct Weights {
    uint32_t a[tiles][kBlock / 16][4];
  };

  // ---- scores

  KVASIR_DEVICE void Score() {
    Clear(&score_);
    KVASIR_NO_UNROLL
    for (Part at = {0, 0}; at.chunk < chunks_.keys;) {
      const LatentChunkOnDevice& chunk = ChunkOf(at.chunk);
      char* const stage = Step();
      if (!visit_.keys_exact() && chunk.kind != ChunkKind::kNumbers) {
        ScoreCodes(chunk, stage);
      } else {
        const int32_t pieces = PartPieces(chunk, at.part);
        if (chunk.kind != ChunkKind::kNumbers) {
          OrderExactKeys(chunk.kind, pieces, stage);
          simt::SyncCta();
        }
        Multiply(stage, pieces, chunk.column + at.part * kPromptPartChannels,
                 &score_);
      }
      at.Next(visit_.keys_exact(), chunk);
    }
  }
  KVASIR_DEVICE void ScoreCodes(const LatentChunkOnDevice& chunk,
                                const char* stage) {
    Scores* const to = kRunsApart ? &run_ : &score_;
    if (kRunsApart && chunk.starts_run) Clear(to);
    static_assert(8 * kTilePieces == kDigitChannels);  // the tile has room
    MakeKeyNumbers<T>(chunk, TableOf(chunk), stage, Tile());
    simt::SyncCta();
    const int32_t pieces = chunk.channels / 8;
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < pieces; i += kMostPieces) {
      const int32_t here = pieces - i;
      Multiply(Tile() + i * kPieceBytes,
               here < kMostPieces ? here : kMostPieces, chunk.column + 8 * i,
               to);
    }
    if (chunk.ends_run) EndRun(chunk, ParamsOf(stage));
  }

  // Adds the products of keys and queries to the scores. `numbers` has up to 8
  // pieces of 8 key channels for each slot, and the queries begin at `column`.
  KVASIR_DEVICE void Multiply(const char* numbers, int32_t pieces,
                              int32_t column, Scores* to) const {
    if (idle_) return;
    // Lane 8m + r passes the address of row r of matrix m to LoadMatrices. The
    // matrices of queries are rows 0 to 7 and 8 to 15 of channels 0 to 7, then
    // the same rows of channels 8 to 15. The matrices of keys are slots 0 to 7
    // of the lower piece and of the upper piece, then slots 8 to 15 of both.
    const int32_t m = Lane() / 8;
    const uint16_t* const queries = Queries() +
                                    (FirstRow() + Lane() % 16) * QueryStride() +
                                    column + 8 * (Lane() / 16);
    const char* const from =
        numbers + m % 2 * kPieceBytes + (8 * (m / 2) + Lane() % 8) * kPiece;
    if (pieces == kMostPieces) {
      KVASIR_UNROLL
      for (int32_t p = 0; p < kMostPieces; p += 2) {
        MultiplyPair(from + p * kPieceBytes, queries + 8 * p, to);
      }
      return;
    }
    KVASIR_NO_UNROLL
    for (int32_t p = 0; p < pieces; p += 2) {
      MultiplyPair(from + p * kPieceBytes, queries + 8 * p, to);
    }
  }
  KVASIR_DEVICE void MultiplyPair(const char* from, const uint16_t* queries,
                                  Scores* to) const {
    uint32_t a[tiles][4];
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      simt::LoadMatrices<4>(a[t], queries + 16 * t * QueryStride());
    }
    KVASIR_UNROLL
    for (int32_t n = 0; n < kSlotTiles; n += 2) {
      uint32_t b[4];
      simt::LoadMatrices<4>(b, from + 8 * n * kPiece);
      KVASIR_UNROLL
      for (int32_t t = 0; t < tiles; ++t) {
        Product<T>(to->d[t][n], a[t], {b[0], b[1]});
        Product<T>(to->d[t][n + 1], a[t], {b[2], b[3]});
      }
    }
  }

  // Applies a run's scale and minimum to the run's sums, and adds the result to
  // the scores.
  KVASIR_DEVICE void EndRun(const LatentChunkOnDevice& chunk,
                            const uint32_t* params) {
    if (idle_) return;
    const bool levels = chunk.kind == ChunkKind::kLevels4;
    float sums[kLaneRows];
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      sums[r] =
          levels ? 0.0f
                 : simt::LoadShared(QuerySums() + chunk.run * kRows + RowOf(r));
    }
    KVASIR_UNROLL
    for (int32_t n = 0; n < kSlotTiles; ++n) {
      const auto words = simt::LoadShared(
          reinterpret_cast<const uint64_t*>(params) + 4 * n + Lane() % 4);
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const auto word = static_cast<uint32_t>(j == 0 ? words : words >> 32);
        const float scale = LowHalf(word);
        const float minimum = levels ? 0.0f : HighHalf(word);
        KVASIR_UNROLL
        for (int32_t r = 0; r < kLaneRows; ++r) {
          float& score = score_.d[r / 2][n][r % 2 * 2 + j];
          if constexpr (kRunsApart) {
            score = simt::Fma(run_.d[r / 2][n][r % 2 * 2 + j], scale, score);
            score = simt::Fma(sums[r], minimum, score);
          } else {
            score = simt::Fma(sums[r], minimum, score * scale);
          }
        }
      }
    }
  }

  // ---- softmax

  // Converts scores to weights (softmax) and rescales the sums of earlier
  // blocks to the new maximum.
  KVASIR_DEVICE void Weigh() {
    if (idle_) return;
    if (kAddsKeyBias && device_.key_bias.steps != nullptr) AddKeyBias();
    if (masked_) Mask();
    const float scale = device_.scale * simt::kLog2E;
    float factors[kLaneRows];
    bool changes = false;
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      float max = max_[r];
      ForScores(r, [&](float& score) { max = simt::Max(max, score); });
      max = simt::Max(max, simt::ShuffleXor(max, 1));
      max = simt::Max(max, simt::ShuffleXor(max, 2));
      changes = changes || max != max_[r];
      // If the maximum does not change, the factor is exactly 1. So a block
      // that a row does not see changes no bit.
      factors[r] = simt::Exp2((max_[r] - max) * scale);
      max_[r] = max;
      // The lower limit keeps `scaled` finite even if all scores so far are
      // hidden (-inf); these then get weight 0. Because `scaled` is rounded, a
      // weight may exceed 1. With scores above 2^27 a weight may even be
      // infinite, and then the row becomes NaN.
      const float scaled = simt::Max(max * scale, kLeastMax);
      float sum = 0.0f;
      ForScores(r, [&](float& score) {
        score = simt::Exp2(simt::Fma(score, scale, -scaled));
        sum += score;
      });
      weights_[r] = simt::Fma(weights_[r], factors[r], sum);
    }
    if (!simt::Any(changes)) return;
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      KVASIR_UNROLL
      for (int32_t n = 0; n < kValueTiles; ++n) {
        KVASIR_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          sum_[t][n][i] *= factors[2 * t + i / 2];
        }
      }
    }
  }
  KVASIR_DEVICE void AddKeyBias() {
    const DeviceKeyBias& bias = device_.key_bias;
    const auto numbers_of = [&](int32_t r) -> const T* {
      if (RowOf(r) >= item_.rows()) return nullptr;
      return static_cast<const T*>(args_.q) + RowStart(args_, item_, RowOf(r),
                                                       bias.column,
                                                       device_.q_row_stride);
    };
    AddKeyBiasToTile<T, kLaneRows>(
        bias, KvHeadOf(device_, item_), int64_t{visit_.block()} * kBlock,
        numbers_of, [this](int32_t r, int32_t n, int32_t j) -> float& {
          return score_.d[r / 2][n][r % 2 * 2 + j];
        });
  }
  // Calls visit(score) for each score that the lane has of its r-th row.
  template <typename Visitor>
  KVASIR_DEVICE void ForScores(int32_t r, const Visitor& visit) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < kSlotTiles; ++n) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        visit(score_.d[r / 2][n][r % 2 * 2 + j]);
      }
    }
  }
  // Sets a score to -inf if the row does not read the slot's key and value in
  // the forms (latents or exact rows) of this visit.
  KVASIR_DEVICE void Mask() {
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      // All bits are computed first, into one register. Otherwise nvcc would
      // use one register per bit.
      const uint32_t reads = BitsOf(ReadsOfRow(RowOf(r)));
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlotTiles; ++n) {
        KVASIR_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          float& score = score_.d[r / 2][n][r % 2 * 2 + j];
          score = reads >> (2 * n + j) & 1u ? score : kMinusInfinity;
        }
      }
    }
  }
  // Returns a bit for each of the lane's slots: 1 if the row reads the slot in
  // the form, exact or coded, that this visit handles.
  KVASIR_DEVICE uint32_t BitsOf(const RowReads& reads) const {
    uint32_t bits = 0;
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < 2 * kSlotTiles; ++i) {
      const int32_t slot = i / 2 * 8 + 2 * (Lane() % 4) + i % 2;
      bits |= static_cast<uint32_t>(reads.Has(visit_, slot)) << i;
    }
    return bits;
  }

  // ---- values

  KVASIR_DEVICE void Sum() {
    const bool exact = visit_.values_exact();
    // PromptRows ensures that all values are stored as codes, or all as
    // unquantized numbers.
    const bool codes =
        !exact && ChunkOf(chunks_.keys).kind != ChunkKind::kNumbers;
    const Weights weights = codes ? PackedWeights<F16>() : PackedWeights<T>();
    int32_t slab = 0;
    KVASIR_NO_UNROLL
    for (Part at = {chunks_.keys, 0};
         at.chunk < chunks_.keys + chunks_.values;) {
      const LatentChunkOnDevice& chunk = ChunkOf(at.chunk);
      char* const stage = Step();
      if (codes) {
        MakeValueNumbers(chunk, TableOf(chunk), stage,
                         stage + kMostPieces * kPieceBytes, Tile());
        simt::SyncCta();
        KVASIR_NO_UNROLL
        for (int32_t part = 0; part < PartsOf(chunk); ++part) {
          AddSlab<F16>(slab++, Tile() + part * kMostPieces * kPieceBytes,
                       PartPieces(chunk, part), weights);
        }
      } else {
        const int32_t pieces = PartPieces(chunk, at.part);
        if (exact && HasFourBits(chunk.kind)) {
          OrderExactValues(pieces, stage);
          simt::SyncCta();
        }
        AddSlab<T>(slab++, stage, pieces, weights);
      }
      at.Next(exact, chunk);
    }
  }
  template <typename Number>
  KVASIR_DEVICE Weights PackedWeights() const {
    Weights weights;
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlotTiles; ++n) {
        KVASIR_UNROLL
        for (int32_t h = 0; h < 2; ++h) {
          weights.a[t][n / 2][n % 2 * 2 + h] = simt::MakePair<Number>(
              score_.d[t][n][2 * h], score_.d[t][n][2 * h + 1]);
        }
      }
    }
    return weights;
  }

  // Adds the products of weights and values to the sums of a slab. `numbers`
  // has up to 8 pieces of 8 value channels for each slot.
  template <typename Number>
  KVASIR_DEVICE void AddSlab(int32_t slab, const char* numbers, int32_t pieces,
                             const Weights& weights) {
    if (idle_) return;
    // Lane 8m + r passes the address of row r of matrix m to LoadMatrices. The
    // matrices are slots 0 to 7 and 8 to 15 of a piece, then the same slots of
    // the next piece.
    const int32_t m = Lane() / 8;
    const char* const from =
        numbers + m / 2 * kPieceBytes + (8 * (m % 2) + Lane() % 8) * kPiece;
    // From here on the slab's index is a template argument, because registers,
    // which hold the sums, cannot be indexed at run time.
    if (slab == 0) return AddAt<Number, 0>(from, pieces, weights);
    if (slab == 1) return AddAt<Number, kSlabTiles>(from, pieces, weights);
    if constexpr (kSlabs > 2) {
      if (slab == 2) {
        return AddAt<Number, 2 * kSlabTiles>(from, pieces, weights);
      }
      AddAt<Number, 3 * kSlabTiles>(from, pieces, weights);
    }
  }
  template <typename Number, int32_t at>
  KVASIR_DEVICE void AddAt(const char* from, int32_t pieces,
                           const Weights& weights) {
    if constexpr (DTypeOf<Number>::kValue == DTypeOf<T>::kValue) {
      // Only unquantized numbers may be infinite or NaN and need care, because
      // decoded values are always finite.
      if (masked_) return AddCarefully<at>(from, pieces, weights);
    }
    if (pieces == kMostPieces) return AddWhole<Number, at>(from, weights);
    AddSome<Number, at>(from, pieces, weights);
  }
  template <typename Number, int32_t at>
  KVASIR_DEVICE void AddWhole(const char* from, const Weights& weights) {
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlabTiles; n += 2) {
        uint32_t b[4];
        simt::LoadMatrices<4, /*transposed=*/true>(
            b, from + n * kPieceBytes + 16 * k * kPiece);
        KVASIR_UNROLL
        for (int32_t t = 0; t < tiles; ++t) {
          Product<Number>(sum_[t][at + n], weights.a[t][k], {b[0], b[1]});
          Product<Number>(sum_[t][at + n + 1], weights.a[t][k], {b[2], b[3]});
        }
      }
    }
  }
  template <typename Number, int32_t at>
  KVASIR_DEVICE void AddSome(const char* from, int32_t pieces,
                             const Weights& weights) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < kSlabTiles; n += 2) {
      if (n >= pieces) break;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kBlock / 16; ++k) {
        uint32_t b[4];
        simt::LoadMatrices<4, /*transposed=*/true>(
            b, from + n * kPieceBytes + 16 * k * kPiece);
        KVASIR_UNROLL
        for (int32_t t = 0; t < tiles; ++t) {
          Product<Number>(sum_[t][at + n], weights.a[t][k], {b[0], b[1]});
          Product<Number>(sum_[t][at + n + 1], weights.a[t][k], {b[2], b[3]});
        }
      }
    }
  }
  // Like AddSome, for blocks with slots that only some rows read. For the other
  // rows such a slot has weight 0, but the product of 0 and an infinite or NaN
  // number is NaN. So these numbers are added separately, only for the rows
  // that read them.
  template <int32_t at>
  KVASIR_DEVICE void AddCarefully(const char* from, int32_t pieces,
                                  const Weights& weights) {
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      bool finite = true;
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlabTiles; n += 2) {
        if (n >= pieces) break;
        uint32_t b[4];
        simt::LoadMatrices<4, /*transposed=*/true>(
            b, from + n * kPieceBytes + 16 * k * kPiece);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          const uint32_t kept = b[i] & FiniteMask<T>(b[i]);
          finite = finite && kept == b[i];
          b[i] = kept;
        }
        KVASIR_UNROLL
        for (int32_t t = 0; t < tiles; ++t) {
          Product<T>(sum_[t][at + n], weights.a[t][k], {b[0], b[1]});
          Product<T>(sum_[t][at + n + 1], weights.a[t][k], {b[2], b[3]});
        }
      }
      if (simt::All(finite)) continue;
      KVASIR_NO_UNROLL
      for (int32_t s = 0; s < 16; ++s) {
        AddSlotApart<at>(k, s, from, pieces, weights);
      }
    }
  }
  // Adds the infinite and NaN numbers of slot 16k + s, for the rows that read
  // the slot.
  template <int32_t at>
  KVASIR_DEVICE void AddSlotApart(int32_t k, int32_t s, const char* from,
                                  int32_t pieces, const Weights& weights) {
    // With c = lane % 4, this lane's b[0] and b[2] hold numbers of slots 2c and
    // 2c + 1, and b[1] and b[3] those of slots 2c + 8 and 2c + 9.
    const uint32_t of_slot =
        s / 2 % 4 == Lane() % 4 ? 0xffffu << (16 * (s % 2)) : 0u;
    KVASIR_UNROLL
    for (int32_t t = 0; t < tiles; ++t) {
      const bool reads[2] = {
          ReadsOfRow(RowOf(2 * t)).Has(visit_, 16 * k + s),
          ReadsOfRow(RowOf(2 * t + 1)).Has(visit_, 16 * k + s)};
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlabTiles; n += 2) {
        if (n >= pieces) break;
        uint32_t b[4];
        simt::LoadMatrices<4, /*transposed=*/true>(
            b, from + n * kPieceBytes + 16 * k * kPiece);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const uint32_t word = s < 8 ? b[2 * i] : b[2 * i + 1];
          const uint32_t rest = word & of_slot & ~FiniteMask<T>(word);
          float added[4] = {};
          Product<T>(added, weights.a[t][k],
                     {s < 8 ? rest : 0u, s < 8 ? 0u : rest});
          KVASIR_UNROLL
          for (int32_t j = 0; j < 4; ++j) {
            float& sum = sum_[t][at + n + i][j];
            sum = reads[j / 2] ? sum + added[j] : sum;
          }
        }
      }
    }
  }

  // ---- results

  KVASIR_DEVICE void Finish() {
    float inverse[kLaneRows];
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      float sum = weights_[r];
      sum += simt::ShuffleXor(sum, 1);
      sum += simt::ShuffleXor(sum, 2);
      inverse[r] = 1.0f / sum;
    }
    int32_t slab = 0;
    KVASIR_NO_UNROLL
    for (int32_t v = 0; v < chunks_.values; ++v) {
      const LatentChunkOnDevice& chunk = ChunkOf(chunks_.keys + v);
      KVASIR_NO_UNROLL
      for (int32_t part = 0; part < PartsOf(chunk); ++part) {
        WriteSlab(slab++, chunk, part * kPromptPartChannels, inverse);
      }
    }
  }
  KVASIR_DEVICE void WriteSlab(int32_t slab, const LatentChunkOnDevice& chunk,
                               int32_t first,
                               const float (&inverse)[kLaneRows]) const {
    if (slab == 0) return Write<0>(chunk, first, inverse);
    if (slab == 1) return Write<kSlabTiles>(chunk, first, inverse);
    if constexpr (kSlabs > 2) {
      if (slab == 2) return Write<2 * kSlabTiles>(chunk, first, inverse);
      Write<3 * kSlabTiles>(chunk, first, inverse);
    }
  }
  // Divides the sums of a slab by the sums of weights, and writes the results
  // to the chunk's channels from `first` on.
  template <int32_t at>
  KVASIR_DEVICE void Write(const LatentChunkOnDevice& chunk, int32_t first,
                           const float (&inverse)[kLaneRows]) const {
    const int32_t c = Lane() % 4;
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      const int32_t row = RowOf(r);
      if (row >= item_.rows()) continue;
      const int32_t token = item_.TokenIn(row);
      const Slots seen = SeenBy(token, token);
      T* const out = static_cast<T*>(args_.out) +
                     RowStart(args_, item_, row, chunk.head_column,
                              device_.out_row_stride) +
                     chunk.channel + first;
      KVASIR_UNROLL
      for (int32_t n = 0; n < kSlabTiles; ++n) {
        if (first + 8 * n >= chunk.channels) break;
        KVASIR_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          const float sum = sum_[r / 2][at + n][r % 2 * 2 + j];
          const float number = seen.begin < seen.end ? sum * inverse[r] : 0.0f;
          simt::StoreGlobal(
              out + 8 * n + (HasFourBits(chunk.kind) ? c + 4 * j : 2 * c + j),
              simt::FromFloat<T>(number));
        }
      }
    }
  }

  // score_ holds a block's scores and then its weights. run_ holds the sums of
  // one run of codes.
  Scores score_, run_;
  float sum_[tiles][kValueTiles][4];
  // max_: the maximum of each of the lane's rows. weights_: this lane's share
  // of each row's sum of weights.
  float max_[kLaneRows], weights_[kLaneRows];
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
