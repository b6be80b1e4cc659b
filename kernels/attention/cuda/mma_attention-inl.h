// Computes attention for an item (attention_items.h) on tensor cores.
// Activations must have 16 bits. Latents may be unquantized, in the
// activations' type, or codes with float16 ranges in slots, static ranges or
// levels. C++17, device code.
//
// A CTA of four warps computes each split of 512 slots in three passes: scores
// of all slots, the softmax, all values. Latents are copied asynchronously, in
// chunks of pieces of 16 bytes (LatentChunkOnDevice). No two warps multiply the
// same latents, so each warp loads its own latents ahead into its own ring of
// stages. Warps wait for each other only at the softmax and between splits.
// Latents are the first operand of products, in registers; rows are the second
// operand, 8 columns at a time (mma_rows-inl.h):
//   scores: [16 slots][channels] times [channels][columns]; each warp computes
//     16 of every 64 slots;
//   values: [16 channels][slots] times [slots][columns]; each warp computes as
//     many sets of 16 channels as codes are in a byte, or one set of numbers.
// Numbers are multiplied by mma.m16n8k16. Codes are never converted to floats.
// They are bytes of mma.m16n8k32, whose sums are exact integers:
//   8 bits: a byte as it is stored;
//   5 and 6 bits: a byte that joins the two parts of a code (mma_planes.h);
//   4 bits: the lower half of a byte for one product, and for another one the
//     upper half, times 16. For values, the other one takes whole bytes, and
//     the sums of the first one are subtracted;
//   1 to 3 bits: like 4 bits, after the two parts of a code are joined;
//   levels: signed bytes, which are looked up.
// Queries and weights are written as digits for these products (mma_digits.h).
// The scale and minimum of a key are applied to the sums of its run. With
// static ranges, queries are multiplied by the scales of keys before they are
// written as digits, and the sums of values by the scales of values. Weights
// are multiplied by the scales of values before they are written as digits, and
// the minima of values are summed separately in float32. Scales of values are
// limited so that the greatest code gives at most 65504; this changes only runs
// whose values would be greater. Weights of unquantized values and exact rows
// are rounded to 16 bits.
//
// The kernel has an instance for items of 8 rows for each MmaKind. If some unit
// has more than 8 heads, an instance for 16 rows and any kind of chunks is
// used. Layers with exact rows use other instances (attention_exact.h,
// mma_exact-inl.h).
//
// Layout: ideally, a tile has 64 slots and granules of 16 bytes, so the first
// pieces of all slots are contiguous, then the second, and so on. Then a warp
// copies runs of 256 bytes (keys) or 1 KiB (values). Otherwise the whole
// latents of slots follow one another, and the runs are shorter. In a stage the
// pieces are always arranged so that ldmatrix has no bank conflicts.
//
// Memory traffic: an item reads its latents once for up to 16 rows. The block
// table, queries and results are small compared with the latents of 512 slots.
//
// A product has 8 rows of numbers or 4 rows of codes. So a unit of one query
// head costs as much as a unit of eight, or of four. Prompts use
// prefill_attention-inl.h if it supports the layer.
#pragma once

#include "base/host_device.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_digits.h"
#include "kernels/attention/cuda/mma_exact-inl.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/mma_planes.h"
#include "kernels/attention/cuda/mma_rows-inl.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Computes items of `tiles` tiles of 8 rows. `exact` is true if keys or values
// have exact slots.
template <typename T, int32_t tiles, MmaKind kind, bool exact>
class MmaAttention : MmaRows<T, tiles, kind, exact> {
  using Rows = MmaRows<T, tiles, kind, exact>;

 public:
  KVASIR_DEVICE explicit MmaAttention(const AttentionKernelArgs& args)
      : Rows(args) {}

  // Returns a word of shared memory, in which one thread stores the index of
  // the CTA's next item for all threads.
  KVASIR_DEVICE uint32_t* next_item() const { return Rows::NextItem(); }

  // Computes an item. All threads of the CTA must call it.
  KVASIR_DEVICE void Compute(const Item& item, const UnitChunks& chunks) {
    item_ = item;
    chunks_ = chunks;
    rows_ = item.rows();
    merged_ = false;
    bool first = true;
    for (int32_t s = 0; s < item.num_splits; ++s) {
      split_ = (item.first_split + s) * kSplit;
      if (item.partial >= 0) item_.partial = item.partial + s;
      slots_ = Both(SplitSlots(item.first_split + s),
                    RowsSlots(device_, *item.sequence, item.first_token,
                              item.num_tokens));
      if (slots_.end <= slots_.begin) {
        if (item.partial >= 0) ClearPartial();
        continue;
      }
      FindBlocks();
      ComputeSplit(first);
      first = false;
      merged_ = item.partial < 0;
    }
    if (first) simt::SyncCta();  // callers need a barrier; ComputeSplit has one
    if (item.partial < 0) Finish();
  }

 private:
  using Rows::args_, Rows::c_, Rows::chunks_, Rows::device_, Rows::g_,
      Rows::item_, Rows::keys_, Rows::lane_, Rows::minima_, Rows::q_stride_,
      Rows::query_sums_, Rows::query_units_, Rows::rows_, Rows::score_stride_,
      Rows::slots_, Rows::split_, Rows::sums_, Rows::values_, Rows::warp_,
      Rows::weights_;
  using Rows::BeginLoads, Rows::BoundValueParams, Rows::ChannelOf,
      Rows::ChunkOf, Rows::ClearPartial, Rows::ExactPlace, Rows::FillQueries,
      Rows::FindBlocks, Rows::FindPlaces, Rows::Factors, Rows::FirstPiece,
      Rows::HasNumbers, Rows::HasStaticRanges, Rows::key_bias, Rows::KeyBlocks,
      Rows::KindOf, Rows::LacksRowTile, Rows::LacksTile, Rows::NextStage,
      Rows::KeyParams, Rows::QueryAt, Rows::QueryDigits, Rows::ReadAsCodes,
      Rows::RowOfColumn, Rows::Scores, Rows::Stage, Rows::ValueBlocks,
      Rows::Weigh, Rows::WeightDigits, Rows::Weights, Rows::WeightUnit;
  using Rows::kBlock, Rows::kPiece, Rows::kRows, Rows::kRowTiles, Rows::kSplit,
      Rows::kScaledDigits, Rows::kStages, Rows::kWarps, Rows::kWarpSlots,
      Rows::kOwnWeights;

  KVASIR_DEVICE void ComputeSplit(bool first) {
    FindPlaces();
    if (first) FillQueries();
    key_bias().Fill(item_, split_, kWarps * int32_t{simt::kWarp});
    simt::SyncCta();
    BeginLoads();
    // Instances for the usual cases save instructions: all keys of a unit are
    // one chunk of codes, with at most 4 or at most 8 rows.
    const bool few_rows = rows_ <= 4;
    if (!kOnlyCodes || chunks_.keys > 1) {
      ScoreBlocks<kRowTiles, /*one=*/false>();
    } else if constexpr (kOnlyCodes) {
      few_rows ? ScoreBlocks<1, true>() : ScoreBlocks<kRowTiles, true>();
    }
    if constexpr (exact) ScoreExact();
    BoundValueParams();
    simt::SyncCta();
    Weigh(merged_);
    simt::SyncCta();
    KVASIR_NO_UNROLL
    for (int32_t v = 0; v < chunks_.values; ++v) {
      const LatentChunkOnDevice chunk = ChunkOf(chunks_.keys + v);
      KVASIR_UNROLL
      for (int32_t t = 0; t < kSets; ++t) Clear(&sum_[t]);
      if constexpr (kOnlyCodes) {
        few_rows ? SumBlocks<1>(chunk) : SumBlocks<kRowTiles>(chunk);
      } else {
        SumBlocks<kRowTiles>(chunk);
      }
      if (FirstPiece(chunk) >= chunk.pieces) continue;
      if (HasStaticRanges(chunk)) ApplyStaticRanges(chunk);
      if constexpr (exact) SumExact(chunk);
      EndSum(chunk);
    }
  }
  // True if all chunks are codes and items have at most 8 rows.
  static constexpr bool kOnlyCodes =
      tiles == 1 && kind != MmaKind::kNumbers && kind != MmaKind::kAny;
  // The most sets of channels (SetsOf) of the chunks of this instance.
  static constexpr int32_t kSets = Rows::kHasPlanes ? kMostSets : 2;
  // Returns whether the item has no rows in tile t of 4 rows. If all chunks are
  // codes, no tile without rows is computed.
  KVASIR_DEVICE bool Skips(int32_t t) const {
    return !kOnlyCodes && LacksRowTile(t);
  }

  // For a row of each tile of 4 rows, numbers that are the same for all slots:
  // the unit of its digits, and the sum of its query over the channels of the
  // run.
  template <int32_t row_tiles>
  struct QueryFactors {
    float unit[row_tiles];
    float sum[row_tiles];
  };
  template <int32_t row_tiles>
  KVASIR_DEVICE void LoadFactors(const LatentChunkOnDevice& chunk,
                                 int32_t index,
                                 QueryFactors<row_tiles>* factors) const {
    if (HasNumbers(chunk)) return;
    KVASIR_UNROLL
    for (int32_t t = 0; t < row_tiles; ++t) {
      if (Skips(t)) continue;
      factors->unit[t] =
          simt::LoadShared(query_units_ + index * kRows + 4 * t + c_);
      factors->sum[t] =
          simt::LoadShared(query_sums_ + chunk.run * kRows + 4 * t + c_);
    }
  }
  // Computes the scores of all blocks. `one` is true if the keys are one chunk.
  template <int32_t row_tiles, bool one>
  KVASIR_DEVICE void ScoreBlocks() {
    LatentChunkOnDevice chunk = ChunkOf(0);
    QueryFactors<row_tiles> factors;
    if (one) LoadFactors(chunk, 0, &factors);
    // The slot of the lane's scores; others are 8 slots later.
    int32_t slot = KeyBlocks().begin * kBlock + kWarpSlots * warp_ + g_;
    KVASIR_NO_UNROLL
    for (; slot < KeyBlocks().end * kBlock; slot += kBlock) {
      Clear(&score_);
      KVASIR_NO_UNROLL
      for (int32_t k = 0; k < (one ? 1 : chunks_.keys); ++k) {
        if (!one) {
          chunk = ChunkOf(k);
          LoadFactors(chunk, k, &factors);
        }
        this->template Step<one, /*values=*/false>();
        if (HasNumbers(chunk)) {
          ScoreNumbers(chunk, Stage());
        } else {
          ScoreCodes<row_tiles>(chunk, one || chunk.starts_run, factors);
          if (one || chunk.ends_run) EndRun(chunk, slot, factors);
        }
        NextStage();
      }
      StoreScores<row_tiles>(slot, /*as_exact=*/false);
    }
  }
  template <int32_t row_tiles>
  KVASIR_DEVICE void StoreScores(int32_t slot, bool as_exact) const {
    // Digits of queries are multiplied by the scale already (FillQueries).
    const float scale =
        kScaledDigits && !as_exact ? 1.0f : device_.scale * simt::kLog2E;
    KVASIR_UNROLL
    for (int32_t h = 0; h < 2; ++h) {
      KVASIR_UNROLL
      for (int32_t t = 0; t < row_tiles; ++t) {
        if (LacksRowTile(t)) continue;
        if (as_exact && ReadAsCodes(/*of_keys=*/true, item_.TokenIn(4 * t + c_))
                            .Has(slot + 8 * h)) {
          continue;
        }
        simt::StoreShared(Scores() +
                              (t / 2 * 8 + 2 * c_ + t % 2) * score_stride_ +
                              slot + 8 * h,
                          score_.d[t / 2][t % 2 + 2 * h] * scale);
      }
    }
  }

  // Returns the address that this lane passes to LoadMatrices to load two
  // pieces of keys, without the offset of the pieces. Lane 8m + r passes the
  // address of row r of matrix m. The matrices are slots 0 to 7 and 8 to 15 of
  // the lower piece, then the same slots of the upper piece.
  KVASIR_DEVICE const char* KeyPieces(const char* stage) const {
    const int32_t m = lane_ / 8;
    return stage + (m / 2 * kWarpSlots + 8 * (m % 2) + lane_ % 8) * kPiece;
  }
  KVASIR_DEVICE void ScoreNumbers(const LatentChunkOnDevice& chunk,
                                  const char* stage) {
    const char* const from = KeyPieces(stage);
    KVASIR_UNROLL
    for (int32_t p = 0; p < kMostKeyPieces; p += 2) {
      if (p >= chunk.pieces) break;
      uint32_t a[4];
      simt::LoadMatrices<4>(a, from + p * kWarpSlots * kPiece);
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (LacksTile(n)) continue;
        const auto* const q = reinterpret_cast<const uint32_t*>(
            QueryAt(chunk, n) + 8 * p + 2 * c_);
        const uint32_t b[2] = {simt::LoadShared(q), simt::LoadShared(q + 4)};
        Product<T>(score_.d[n], a, b);
      }
    }
  }
  // Adds the products of a chunk's codes and the queries to run_, which is 0
  // before if `starts_run`.
  template <int32_t row_tiles>
  KVASIR_DEVICE void ScoreCodes(const LatentChunkOnDevice& chunk,
                                bool starts_run,
                                const QueryFactors<row_tiles>& factors) {
    const ChunkKind what = KindOf(chunk);
    const char* const from = KeyPieces(Stage());
    const auto load = [&](int32_t piece, uint32_t(&words)[4]) {
      simt::LoadMatrices<4>(words, from + piece * kWarpSlots * kPiece);
    };
    // If the codes have at most 4 bits and no levels, `upper` has the sums of
    // the odd codes, times 16, and `lower` those of the even ones. Then the
    // result is 16 * lower + upper, and the unit is divided by 16. Otherwise
    // `lower` has all sums.
    const bool halves =
        what == ChunkKind::kCodes4 || what == ChunkKind::kCodes3;
    DigitSums<row_tiles> lower, upper;
    Clear(&lower);
    Clear(&upper);
    constexpr auto kSections = static_cast<int32_t>(kDigitChannels / 64);
    KVASIR_UNROLL
    for (int32_t s = 0; s < kSections; ++s) {
      if (s > 0 && 64 * s >= chunk.channels) break;
      // The first operands of two products of 32 channels.
      uint32_t a[2][4];
      bool second = true;
      if (what == ChunkKind::kCodes8) {
        load(4 * s, a[0]);
        second = 4 * s + 2 < chunk.pieces;
        if (second) load(4 * s + 2, a[1]);
      } else {
        uint32_t words[4];
        if (HasTwoBits(what)) {
          LoadTwoPlanes(chunk, Stage(), s, words);
        } else {
          load(2 * s, words);
        }
        if (what == ChunkKind::kCodes6) {
          AddHighBits(chunk, Stage(), s, words, a);
        } else if (halves) {
          KVASIR_UNROLL
          for (int32_t i = 0; i < 4; ++i) {
            a[0][i] = words[i] & 0x0f0f0f0fu;
            a[1][i] = words[i] & 0xf0f0f0f0u;
          }
        } else {
          second = HasTwoBits(what) || 2 * s + 1 < chunk.pieces;
          KVASIR_UNROLL
          for (int32_t i = 0; i < 4; ++i) {
            uint32_t levels[2];
            LookUpLevels(what, chunk.level_words, words[i], levels);
            a[i / 2][i % 2] = levels[0];
            a[i / 2][i % 2 + 2] = levels[1];
          }
        }
      }
      KVASIR_UNROLL
      for (int32_t t = 0; t < row_tiles; ++t) {
        if (Skips(t)) continue;
        const simt::Vec16 q = QueryDigits(chunk, s, t);
        CodeProduct(what, lower.d[t], a[0], {q.word[0], q.word[1]});
        if (!second) continue;
        const uint32_t b[2] = {q.word[2], q.word[3]};
        if (halves) {
          CodeProduct(what, upper.d[t], a[1], b);
        } else {
          CodeProduct(what, lower.d[t], a[1], b);
        }
      }
    }
    KVASIR_UNROLL
    for (int32_t t = 0; t < row_tiles; ++t) {
      if (Skips(t)) continue;
      KVASIR_UNROLL
      for (int32_t h = 0; h < 2; ++h) {
        int32_t sum = Joined(lower, t, h);
        if (halves) sum = 16 * sum + Joined(upper, t, h);
        float& run = run_.d[t / 2][t % 2 + 2 * h];
        run = simt::Fma(static_cast<float>(sum), factors.unit[t],
                        starts_run ? 0.0f : run);
      }
    }
  }

  // Applies a run's scale and minimum, and adds the run's sums to the scores.
  template <int32_t row_tiles>
  KVASIR_DEVICE void EndRun(const LatentChunkOnDevice& chunk, int32_t slot,
                            const QueryFactors<row_tiles>& factors) {
    const uint32_t* const words = KeyParams(chunk) + slot;
    const uint32_t params[2] = {simt::LoadShared(words),
                                simt::LoadShared(words + 8)};
    KVASIR_UNROLL
    for (int32_t t = 0; t < row_tiles; ++t) {
      if (Skips(t)) continue;
      KVASIR_UNROLL
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t i = t % 2 + 2 * h;
        float& score = score_.d[t / 2][i];
        score = simt::Fma(run_.d[t / 2][i], LowHalf(params[h]), score);
        if (HasLevels(KindOf(chunk))) continue;
        score = simt::Fma(factors.sum[t], HighHalf(params[h]), score);
      }
    }
  }

  // Computes scores from exact rows of keys, for the query rows that read exact
  // rows. They replace scores that the same lane computed from codes, so no
  // barrier is needed.
  KVASIR_DEVICE void ScoreExact() {
    for (int32_t block = keys_.ExactFrom(keys_.first()); block < keys_.end();
         block = keys_.ExactFrom(block + 1)) {
      Clear(&score_);
      int64_t places[2];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        places[i] = ExactPlace(
            /*of_keys=*/true, block * kBlock + kWarpSlots * warp_ + g_ + 8 * i);
      }
      KVASIR_NO_UNROLL
      for (int32_t k = 0; k < chunks_.keys; ++k) {
        const LatentChunkOnDevice& chunk = ChunkOf(k);
        const char* rows[2];
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          rows[i] =
              places[i] == kNoExactRow ? nullptr : RowAt(chunk, places[i]);
        }
        AddExactKeys<T>(KindOf(chunk), chunk.channels, rows, QueryAt(chunk, 0),
                        8 * q_stride_, LacksTile(1) ? 1 : tiles, score_.d);
      }
      StoreScores<kRowTiles>(block * kBlock + kWarpSlots * warp_ + g_,
                             /*as_exact=*/true);
    }
  }
  // Adds the values of exact rows to the sums of a chunk.
  KVASIR_DEVICE void SumExact(const LatentChunkOnDevice& chunk) {
    if (!values_.any_exact()) return;
    for (int32_t block = values_.ExactFrom(values_.first());
         block < values_.end(); block = values_.ExactFrom(block + 1)) {
      int64_t place = kNoExactRow;
      KVASIR_NO_UNROLL
      for (int32_t k = 0; k < kBlock / 16; ++k) {
        if (k % 2 == 0) {  // each lane finds the place of one of 32 slots
          place =
              ExactPlace(/*of_keys=*/false, block * kBlock + 16 * k + lane_);
        }
        uint32_t a[kMostSets][4];
        LoadExactValues(KindOf(chunk), chunk,
                        16 * SetsOf(KindOf(chunk)) * warp_, place, k % 2 * 16,
                        a);
        AddExactValues(SetsOf(KindOf(chunk)), block, k, a);
      }
    }
  }
  KVASIR_DEVICE void AddExactValues(int32_t sets, int32_t block, int32_t k,
                                    const uint32_t (&a)[kMostSets][4]) {
    bool finite = true;
    KVASIR_UNROLL
    for (int32_t t = 0; t < kSets; ++t) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        finite = finite && (t >= sets || IsFinite<T>(a[t][i]));
      }
    }
    const bool apart = item_.num_tokens > 1 && simt::Any(!finite);
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      if (LacksTile(n)) continue;
      uint32_t b[2];
      simt::LoadMatrices<2>(b, weights_ + 8 * n * score_stride_ + kOwnWeights +
                                   block * kBlock / 2 + 8 * k);
      b[0] = WeightsOf(/*as_exact=*/true, b[0]);
      b[1] = WeightsOf(/*as_exact=*/true, b[1]);
      KVASIR_UNROLL
      for (int32_t t = 0; t < kSets; ++t) {
        if (t >= sets) continue;
        if (apart) {
          AddApart<T, /*mixed=*/true>(device_, item_, /*as_exact=*/true, 8 * n,
                                      split_, block * kBlock + 16 * k, a[t], b,
                                      sum_[t].d[n]);
        } else {
          Product<T>(sum_[t].d[n], a[t], b);
        }
      }
    }
  }
  template <int32_t row_tiles>
  KVASIR_DEVICE void SumBlocks(const LatentChunkOnDevice& chunk) {
    const bool multiplies = FirstPiece(chunk) < chunk.pieces;
    KVASIR_NO_UNROLL
    for (int32_t block = ValueBlocks().begin; block < ValueBlocks().end;
         ++block) {
      this->template Step</*one=*/true, /*values=*/true>();
      if (multiplies) {
        HasNumbers(chunk) ? SumNumbers(block, Stage())
                          : SumCodes<row_tiles>(chunk, block, Stage());
      }
      NextStage();
    }
  }

  KVASIR_DEVICE void SumNumbers(int32_t block, const char* stage) {
    const int32_t m = lane_ / 8;
    const char* const from =
        stage + (m % 2 * kBlock + 8 * (m / 2) + lane_ % 8) * kPiece;
    if (SeenBySome(device_, item_, split_ + block * kBlock) ||
        (exact && values_.HasExact(block))) {
      return SumApart(block, from);
    }
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 32; ++k) {
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        simt::LoadMatrices<4, /*transposed=*/true>(
            a[i], from + (32 * k + 16 * i) * kPiece);
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (LacksTile(n)) continue;
        uint32_t b[4];
        Weights(block, k, n, b);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          Product<T>(sum_[0].d[n], a[i], {b[2 * i], b[2 * i + 1]});
        }
      }
    }
  }
  // Like SumNumbers, but for blocks with slots that some rows do not see, or
  // read as exact rows.
  KVASIR_DEVICE void SumApart(int32_t block, const char* from) {
    KVASIR_NO_UNROLL
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      uint32_t a[4];
      simt::LoadMatrices<4, /*transposed=*/true>(a, from + 16 * k * kPiece);
      const bool apart = simt::Any(!(IsFinite<T>(a[0]) && IsFinite<T>(a[1]) &&
                                     IsFinite<T>(a[2]) && IsFinite<T>(a[3])));
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (LacksTile(n)) continue;
        uint32_t both[4];
        Weights(block, k / 2, n, both);
        uint32_t b[2] = {k % 2 == 0 ? both[0] : both[2],
                         k % 2 == 0 ? both[1] : both[3]};
        if constexpr (exact) {
          b[0] = WeightsOf(/*as_exact=*/false, b[0]);
          b[1] = WeightsOf(/*as_exact=*/false, b[1]);
        }
        if (apart) {
          AddApart<T, exact>(device_, item_, /*as_exact=*/false, 8 * n, split_,
                             block * kBlock + 16 * k, a, b, sum_[0].d[n]);
        } else {
          Product<T>(sum_[0].d[n], a, b);
        }
      }
    }
  }
  // Adds the products of a block's codes and weights to sum_.
  template <int32_t row_tiles>
  KVASIR_DEVICE void SumCodes(const LatentChunkOnDevice& chunk, int32_t block,
                              const char* stage) {
    SumTwoSets<row_tiles, 0>(chunk, block, stage);
    if constexpr (kSets > 2) {
      if (SetsOf(KindOf(chunk)) > 2) {
        SumTwoSets<row_tiles, 2>(chunk, block, stage);
      }
    }
  }
  // Adds the products for sum_[first] and sum_[first + 1]. (All four sets
  // together would take too many registers.)
  template <int32_t row_tiles, int32_t first>
  KVASIR_DEVICE void SumTwoSets(const LatentChunkOnDevice& chunk, int32_t block,
                                const char* stage) {
    const ChunkKind what = KindOf(chunk);
    uint32_t weights[row_tiles][4];
    KVASIR_UNROLL
    for (int32_t t = 0; t < row_tiles; ++t) {
      if (!Skips(t)) WeightDigits(chunk, block, t, weights[t]);
    }
    // sums[i] has the sums for the lane's channels in sum_[first + i]
    // (ChannelOf). With codes of at most 4 bits, sums[1] has the sums of whole
    // bytes instead, which are sum_[first] + 16 * sum_[first + 1].
    const bool halves =
        what == ChunkKind::kCodes4 || what == ChunkKind::kCodes3;
    DigitSums<row_tiles> sums[2];
    Clear(&sums[0]);
    Clear(&sums[1]);
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 32; ++k) {
      uint32_t words[4];
      simt::LoadMatrices<4, /*transposed=*/true>(
          words, stage + (32 * k + lane_) * kPiece);
      uint32_t high[2] = {};
      if constexpr (Rows::kHasPlanes) {
        if (chunk.high_bytes > 0)
          LoadHighBytes(chunk, FirstPiece(chunk), stage, k, high);
      }
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        // Gathers a byte of each of four slots: of two words, this lane has
        // bytes 2g and 2g + 1 of two slots each (StagedSlot).
        uint32_t bytes = simt::PickBytes(words[i / 2 * 2], words[i / 2 * 2 + 1],
                                         i % 2 == 0 ? 0x6420u : 0x7531u);
        // In high[i / 2], each byte belongs to one slot. Its lowest bits are
        // the high bits of the codes in byte 2g; those of byte 2g + 1 follow.
        const uint32_t others = high[i / 2] >> (i % 2 * chunk.high_bytes / 2);
        if (HasTwoBits(what)) {
          bytes = FourBitCodes(chunk.has_low ? bytes : 0, others, first / 2);
        }
        a[0][i] = bytes;
        if (halves) {
          a[0][i] = bytes & 0x0f0f0f0fu;
          a[1][i] = bytes;
        } else if (HasLevels(what)) {
          uint32_t levels[2];
          LookUpLevels(what, chunk.level_words, bytes, levels);
          a[0][i] = simt::PickBytes(levels[0], levels[1], 0x6420u);
          a[1][i] = simt::PickBytes(levels[0], levels[1], 0x7531u);
        } else if (what == ChunkKind::kCodes6) {
          const int32_t high_bits = chunk.high_bytes / 4;
          a[0][i] = ByteCodes(bytes, others, high_bits, 0);
          a[1][i] = ByteCodes(bytes, others, high_bits, 1);
        }
      }
      KVASIR_UNROLL
      for (int32_t t = 0; t < row_tiles; ++t) {
        if (Skips(t)) continue;
        const uint32_t b[2] = {weights[t][2 * k], weights[t][2 * k + 1]};
        CodeProduct(what, sums[0].d[t], a[0], b);
        if (what != ChunkKind::kCodes8) {
          CodeProduct(what, sums[1].d[t], a[1], b);
        }
      }
    }
    const float ratio = halves ? 0.0625f : 1.0f;
    KVASIR_UNROLL
    for (int32_t t = 0; t < row_tiles; ++t) {
      if (Skips(t)) continue;
      float unit = WeightUnit(chunk, block, t);
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        if (i == 1 && what == ChunkKind::kCodes8) continue;
        KVASIR_UNROLL
        for (int32_t h = 0; h < 2; ++h) {
          int32_t sum = Joined(sums[i], t, h);
          if (halves && i == 1) sum -= Joined(sums[0], t, h);
          Add(sum, unit, &sum_[first + i].d[t / 2][t % 2 + 2 * h]);
        }
        unit *= ratio;
      }
    }
  }
  static KVASIR_DEVICE void Add(int32_t sum, float unit, float* total) {
    *total = simt::Fma(static_cast<float>(sum), unit, *total);
  }

  // Applies the static ranges of a chunk to the sums of its codes.
  KVASIR_DEVICE void ApplyStaticRanges(const LatentChunkOnDevice& chunk) {
    const ChunkKind what = KindOf(chunk);
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t row = RowOfColumn(8 * n + 2 * c_ + j);
        if (row >= rows_ || ValueBlocks().none()) continue;
        const float weights =
            simt::LoadShared(minima_ + chunk.run * kRows + row);
        KVASIR_UNROLL
        for (int32_t t = 0; t < kSets; ++t) {
          if (t >= SetsOf(what)) continue;
          KVASIR_UNROLL
          for (int32_t other = 0; other < 2; ++other) {
            const int32_t channel = ChannelOf(what, t, other);
            if (channel >= chunk.channels) continue;
            float& sum = sum_[t].d[n][j + 2 * other];
            sum = simt::Fma(
                sum, simt::LoadGlobal(chunk.channel_scales + channel),
                weights * simt::LoadGlobal(chunk.channel_minima + channel));
          }
        }
      }
    }
  }
  KVASIR_DEVICE void EndSum(const LatentChunkOnDevice& chunk) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t row = RowOfColumn(8 * n + 2 * c_ + j);
        if (row >= rows_) continue;
        const bool has_minima = !HasNumbers(chunk) && !HasStaticRanges(chunk) &&
                                !HasLevels(KindOf(chunk)) &&
                                !ValueBlocks().none();
        const float minimum =
            has_minima ? simt::LoadShared(minima_ + chunk.run * kRows + row)
                       : 0.0f;
        if (item_.partial >= 0) {
          float* const partial = PartialRow(args_, item_, row) + chunk.column;
          ForSums(chunk, n, j, [&](int32_t channel, float sum) {
            simt::StoreGlobal(partial + channel, sum + minimum);
          });
          continue;
        }
        float* const total = sums_ + row * device_.out_width + chunk.column;
        const MergeFactors factors = {
            simt::LoadShared(Factors() + row),
            simt::LoadShared(Factors() + kRows + row)};
        ForSums(chunk, n, j, [&](int32_t channel, float sum) {
          const float before =
              merged_ ? simt::LoadShared(total + channel) : 0.0f;
          simt::StoreShared(total + channel,
                            MergeSum(factors, before, sum + minimum));
        });
      }
    }
  }

  // Calls visit(channel, sum) for this lane's sums of row 2c_ + j in tile n.
  template <typename Visit>
  KVASIR_DEVICE void ForSums(const LatentChunkOnDevice& chunk, int32_t n,
                             int32_t j, const Visit& visit) const {
    const ChunkKind what = KindOf(chunk);
    KVASIR_UNROLL
    for (int32_t t = 0; t < kSets; ++t) {
      if (t >= SetsOf(what)) continue;
      KVASIR_UNROLL
      for (int32_t other = 0; other < 2; ++other) {
        const int32_t channel = ChannelOf(what, t, other);
        if (channel < chunk.channels) {
          visit(channel, sum_[t].d[n][j + 2 * other]);
        }
      }
    }
  }

  // Divides the merged sums by the sums of weights and writes the output rows.
  // Each lane reads only sums that it wrote itself, so no barrier is needed.
  KVASIR_DEVICE void Finish() {
    for (int32_t v = 0; v < chunks_.values; ++v) {
      const LatentChunkOnDevice& chunk = ChunkOf(chunks_.keys + v);
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2 * tiles; ++i) {
        const int32_t row = RowOfColumn(8 * (i / 2) + 2 * c_ + i % 2);
        if (row >= rows_) continue;
        const bool sees =
            merged_ && SeesSlots(simt::LoadShared(Factors() + 3 * kRows + row));
        const float* const total =
            sums_ + row * device_.out_width + chunk.column;
        T* const out = static_cast<T*>(args_.out) +
                       RowStart(args_, item_, row, chunk.head_column,
                                device_.out_row_stride) +
                       chunk.channel;
        ForSums(chunk, i / 2, i % 2, [&](int32_t channel, float) {
          float number = 0.0f;
          if (sees) {
            number = simt::LoadShared(total + channel) *
                     (1.0f / simt::LoadShared(Factors() + 2 * kRows + row));
          }
          simt::StoreGlobal(out + channel, simt::FromFloat<T>(number));
        });
      }
    }
  }

  TileSums<tiles> score_, run_, sum_[kSets];
  // True if sums_ and Factors() have results of earlier splits.
  bool merged_;
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
