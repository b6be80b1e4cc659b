// Computes attention for an item (attention_items.h) on tensor cores.
// Activations must have 16 bits. Latents may be unquantized, in the
// activations' type, or codes of 8 or 4 bits with float16 ranges in slots or
// with 16 levels. C++17, device code.
//
// A CTA of four warps computes each split of 512 slots in three passes: scores
// of all slots, the softmax, all values. Latents are copied asynchronously, in
// chunks of pieces of 16 bytes (LatentChunkOnDevice). No two warps multiply the
// same latents, so each warp loads its own latents ahead into its own ring of
// stages. Warps wait for each other only at the softmax and between splits.
// Latents are the first operand of mma.m16n8k16, in registers; rows are the
// second operand, 8 at a time:
//   scores: [16 slots][16 channels] times [16 channels][8 rows]; each warp
//     computes 16 of every 64 slots;
//   values: [16 channels][16 slots] times [16 slots][8 rows]; each warp
//     computes 16 channels of numbers or of 8-bit codes, or 32 channels of
//     4-bit codes.
// Codes are converted to 16-bit numbers in registers. For keys this is exact:
// the scale and minimum are applied to the sums of a run. Values become
// fma(code, scale, minimum) in float16, whatever the type of activations. The
// scale is limited so that the greatest code gives at most 65504; this changes
// only runs whose values would be greater. Weights are rounded to 16 bits for
// the products (float16 if values are codes), but are summed in float32. For
// 4-bit keys, queries are staged in the order in which codes are extracted from
// a word (0, 4, 1, 5, ...).
//
// The kernel has an instance for items of 8 rows for each kind of chunks, and
// one for mixed kinds. If some unit has more than 8 heads, an instance for 16
// rows and any kind of chunks is used. Layers with exact rows use other
// instances (attention_exact.h, mma_exact-inl.h).
//
// Layout: ideally, a tile has 64 slots and granules of 16 bytes, so the first
// pieces of all slots are contiguous, then the second, and so on. Then a warp
// copies runs of 256 bytes (keys) or 1 KiB (values). Otherwise the whole
// latents of slots follow one another, and the runs are shorter. In a stage the
// pieces are always arranged so that ldmatrix has no bank conflicts.
//
// Memory traffic: an item reads its latents once for up to 16 rows, and the
// ranges of values once per warp. The block table, queries and results are
// small compared with the latents of 512 slots.
//
// A product always has 8 rows, so a unit of one query head costs as much as a
// unit of eight. Prompts use prefill_attention-inl.h if it supports the layer.
#pragma once

#include "base/host_device.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/attention_key_bias.h"
#include "kernels/attention/cuda/mma_exact-inl.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/mma_ring-inl.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Computes items of `tiles` tiles of 8 rows. `exact` is true if keys or values
// have exact slots.
template <typename T, int32_t tiles, MmaKind kind, bool exact>
class MmaAttention : MmaRing<kind, exact> {
  using Ring = MmaRing<kind, exact>;

 public:
  static constexpr int32_t kRows = 8 * tiles;

  KVASIR_DEVICE explicit MmaAttention(const AttentionKernelArgs& args)
      : Ring(args) {
    g_ = static_cast<int32_t>(simt::Lane() / 4);
    c_ = static_cast<int32_t>(simt::Lane() % 4);
    q_stride_ = static_cast<int32_t>(device_.query_stride);
    char* next = simt::Shared();
    const auto take = [&next](int64_t bytes) {
      char* const taken = next;
      next += bytes;
      return taken;
    };
    ring_ = take(kWarps * kStages * device_.warp_stage_bytes) +
            warp_ * kStages * device_.warp_stage_bytes;
    scores_ = reinterpret_cast<float*>(take(kRows * kScoreStride * 4));
    weights_ = scores_ + lane_ % 8 * kScoreStride + lane_ / 8 * 4;
    places_ = reinterpret_cast<Place*>(take(kSplit * 8));
    next_item_ = reinterpret_cast<uint32_t*>(take(kMmaNextBytes));
    q_ = reinterpret_cast<uint16_t*>(take(kRows * q_stride_ * 2));
    factors_ = reinterpret_cast<float*>(take(4 * kRows * 4));
    query_sums_ =
        reinterpret_cast<float*>(take(device_.most_key_runs * kRows * 4));
    tables_ =
        reinterpret_cast<uint32_t*>(take(device_.num_tables * kTableWords * 4));
    key_angles_ =
        reinterpret_cast<float*>(take(device_.key_bias.shared_bytes()));
    sums_ = reinterpret_cast<float*>(next);
    FillLevelTables<T>(device_, tables_);
  }

  // Returns a word of shared memory, in which one thread stores the index of
  // the CTA's next item for all threads.
  KVASIR_DEVICE uint32_t* next_item() const { return next_item_; }

  // Computes an item. All threads of the CTA must call it.
  KVASIR_DEVICE void Compute(const Item& item, const UnitChunks& chunks) {
    item_ = item;
    chunks_ = chunks;
    seen_ =
        RowsSlots(device_, *item.sequence, item.first_token, item.num_tokens);
    one_tile_ = tiles == 1 || item.rows() <= 8;
    merged_ = false;
    bool first = true;
    for (int32_t s = 0; s < item.num_splits; ++s) {
      split_ = (item.first_split + s) * kSplit;
      if (item.partial >= 0) item_.partial = item.partial + s;
      slots_ = Both(SplitSlots(item.first_split + s), seen_);
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
  using Ring::args_, Ring::chunks_, Ring::device_, Ring::end_block_,
      Ring::item_, Ring::keys_, Ring::lane_, Ring::places_, Ring::ring_,
      Ring::slots_, Ring::split_, Ring::values_, Ring::warp_;
  using Ring::BeginLoads, Ring::BoundParams, Ring::ChannelOf, Ring::ChunkOf,
      Ring::ClearPartial, Ring::ExactPlace, Ring::FindBlocks, Ring::FindPlaces,
      Ring::FirstPiece, Ring::HasNumbers, Ring::KeyBlocks, Ring::KindOf,
      Ring::LoadCodes, Ring::NextStage, Ring::ParamsAt, Ring::ParamsOf,
      Ring::ReadAsCodes, Ring::Step, Ring::ValueBlocks, Ring::WordOf;
  using Ring::kBlock, Ring::kPiece, Ring::kSplit, Ring::kStages, Ring::kWarps,
      Ring::kWarpSlots;
  using typename Ring::PairParams, typename Ring::Place;
  static constexpr int32_t kWarpRows = kRows / kWarps;
  // The distance between rows of scores_, in words. A row holds scores and
  // later the weights that replace them: as float16 and, from word 260 on, as
  // T. The distance avoids bank conflicts when lanes store the columns of sums
  // and load the rows of an operand.
  static constexpr int32_t kScoreStride = 516;
  static constexpr int32_t kOwnWeights = 260;
  static constexpr int32_t kTableWords = kLevelTableWords;
  static_assert(kScoreStride * 4 == kMmaScoreBytes);
  static_assert(kTableWords * 4 == kMmaTableBytes);

  // Fills q_ and query_sums_. Each warp stages one row of queries at a time.
  KVASIR_DEVICE void FillQueries() {
    for (int32_t k = 0; k < chunks_.keys; ++k) {
      const LatentChunkOnDevice& chunk = device_.chunks[chunks_.first + k];
      const int32_t padded = (chunk.channels + 15) / 16 * 16;
      KVASIR_UNROLL
      for (int32_t i = 0; i < kWarpRows; ++i) {
        const int32_t row = warp_ * kWarpRows + i;
        const bool there = row < item_.rows();
        const uint16_t* const from = there ? QueryRow(chunk, row) : nullptr;
        KVASIR_NO_UNROLL
        for (int32_t c = lane_; c < padded; c += 32) {
          uint16_t bits = 0;
          if (there && c < chunk.channels) bits = simt::LoadGlobal(from + c);
          simt::StoreShared(
              q_ + row * q_stride_ + chunk.column + StagedAt(KindOf(chunk), c),
              bits);
        }
        if (HasNumbers(chunk) || !chunk.starts_run) continue;
        const float sum = simt::WarpSum(there ? RunSum(k, row) : 0.0f);
        if (lane_ == 0) {
          simt::StoreShared(query_sums_ + chunk.run * kRows + row, sum);
        }
      }
    }
  }
  KVASIR_DEVICE const uint16_t* QueryRow(const LatentChunkOnDevice& chunk,
                                         int32_t row) const {
    return static_cast<const uint16_t*>(args_.q) +
           RowStart(args_, item_, row, chunk.head_column,
                    device_.q_row_stride) +
           chunk.channel;
  }
  KVASIR_DEVICE float RunSum(int32_t k, int32_t row) const {
    float sum = 0.0f;
    for (bool ends = false; !ends; ++k) {
      const LatentChunkOnDevice& chunk = device_.chunks[chunks_.first + k];
      const uint16_t* const queries = QueryRow(chunk, row);
      KVASIR_NO_UNROLL
      for (int32_t c = lane_; c < chunk.channels; c += 32) {
        sum += simt::ToFloat(simt::BitsAs<T>(simt::LoadGlobal(queries + c)));
      }
      ends = chunk.ends_run;
    }
    return sum;
  }

  KVASIR_DEVICE void ComputeSplit(bool first) {
    FindPlaces();
    if (first) FillQueries();
    key_bias().Fill(item_, split_, kWarps * int32_t{simt::kWarp});
    simt::SyncCta();
    BeginLoads();
    char* stage = ring_;
    KVASIR_NO_UNROLL
    for (int32_t block = KeyBlocks().begin; block < KeyBlocks().end; ++block) {
      KVASIR_NO_UNROLL
      for (int32_t chunk = 0; chunk < chunks_.keys; ++chunk) {
        Step();
        Score(chunk, block, stage);
        NextStage(&stage);
      }
    }
    if constexpr (exact) ScoreExact();
    simt::SyncCta();
    Weigh();
    simt::SyncCta();
    KVASIR_NO_UNROLL
    for (int32_t chunk = 0; chunk < chunks_.values; ++chunk) {
      KVASIR_NO_UNROLL
      for (int32_t block = ValueBlocks().begin; block < ValueBlocks().end;
           ++block) {
        Step();
        Sum(chunk, block, stage);
        NextStage(&stage);
      }
      if constexpr (exact) SumExact(chunk);
    }
  }
  KVASIR_DEVICE void Score(int32_t index, int32_t block, char* stage) {
    const LatentChunkOnDevice chunk = ChunkOf(index);
    if (index == 0) Clear(&score_);
    if (HasNumbers(chunk)) {
      ScoreNumbers(chunk, stage);
    } else {
      if (chunk.starts_run) Clear(&run_);
      if (KindOf(chunk) == ChunkKind::kCodes8) {
        ScoreCodes8(chunk, stage);
      } else {
        ScoreCodes4(chunk, stage);
      }
      if (chunk.ends_run) EndRun(chunk, ParamsOf(stage));
    }
    if (index + 1 == chunks_.keys) StoreScores(block, /*as_exact=*/false);
  }
  KVASIR_DEVICE void StoreScores(int32_t block, bool as_exact) const {
    const float scale = device_.scale * simt::kLog2E;
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      if (n > 0 && one_tile_) continue;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = 8 * n + 2 * c_ + i % 2;
        const int32_t slot = block * kBlock + 16 * warp_ + g_ + 8 * (i / 2);
        if (as_exact &&
            ReadAsCodes(/*of_keys=*/true, item_.TokenIn(row)).Has(slot)) {
          continue;
        }
        simt::StoreShared(scores_ + row * kScoreStride + slot,
                          score_.d[n][i] * scale);
      }
    }
  }

  KVASIR_DEVICE void ScoreNumbers(const LatentChunkOnDevice& chunk,
                                  const char* stage) {
    // Lane 8m + r passes the address of row r of matrix m to LoadMatrices. The
    // matrices are slots 0 to 7 and 8 to 15 of the lower piece, then the same
    // slots of the upper piece.
    const int32_t m = lane_ / 8;
    const char* const from =
        stage + (m / 2 * kWarpSlots + 8 * (m % 2) + lane_ % 8) * kPiece;
    KVASIR_UNROLL
    for (int32_t p = 0; p < kMostKeyPieces; p += 2) {
      if (p >= chunk.pieces) break;
      uint32_t a[4];
      simt::LoadMatrices<4>(a, from + p * kWarpSlots * kPiece);
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n > 0 && one_tile_) continue;
        const auto* const q = reinterpret_cast<const uint32_t*>(
            QueryAt(chunk, n) + 8 * p + 2 * c_);
        const uint32_t b[2] = {simt::LoadShared(q), simt::LoadShared(q + 4)};
        Product<T>(score_.d[n], a, b);
      }
    }
  }
  // Returns the staged query of the row that this lane loads in tile n.
  KVASIR_DEVICE const uint16_t* QueryAt(const LatentChunkOnDevice& chunk,
                                        int32_t n) const {
    return q_ + (8 * n + g_) * q_stride_ + chunk.column;
  }
  KVASIR_DEVICE void ScoreCodes8(const LatentChunkOnDevice& chunk,
                                 const char* stage) {
    KVASIR_UNROLL
    for (int32_t p = 0; p < kMostKeyPieces; ++p) {
      if (p >= chunk.pieces) break;
      const uint32_t low = WordOf(stage, p, 0);
      const uint32_t high = WordOf(stage, p, 8);
      const uint32_t a[4] = {Codes8<T, 0>(low), Codes8<T, 0>(high),
                             Codes8<T, 1>(low), Codes8<T, 1>(high)};
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n > 0 && one_tile_) continue;
        const auto words = simt::LoadShared(reinterpret_cast<const uint64_t*>(
            QueryAt(chunk, n) + 16 * p + 4 * c_));
        const uint32_t b[2] = {static_cast<uint32_t>(words),
                               static_cast<uint32_t>(words >> 32)};
        Product<T>(run_.d[n], a, b);
      }
    }
  }

  KVASIR_DEVICE void ScoreCodes4(const LatentChunkOnDevice& chunk,
                                 const char* stage) {
    const bool levels = KindOf(chunk) == ChunkKind::kLevels4;
    const uint32_t* const table = tables_ + chunk.table * kTableWords;
    const auto lower = [&](uint32_t word) {
      return levels ? LevelsOf(table, word) : Codes4<T>(word);
    };
    const auto upper = [&](uint32_t word) {
      return levels ? LevelsOf(table, word >> 4) : UpperCodes4<T>(word);
    };
    KVASIR_UNROLL
    for (int32_t p = 0; p < kMostKeyPieces; ++p) {
      if (p >= chunk.pieces) break;
      const uint32_t low = WordOf(stage, p, 0);
      const uint32_t high = WordOf(stage, p, 8);
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t k = 0; k < 2; ++k) {
        a[k][0] = lower(low >> (8 * k));
        a[k][1] = lower(high >> (8 * k));
        a[k][2] = upper(low >> (8 * k));
        a[k][3] = upper(high >> (8 * k));
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n > 0 && one_tile_) continue;
        const auto q = simt::LoadShared(reinterpret_cast<const simt::Vec16*>(
            QueryAt(chunk, n) + 32 * p + 8 * c_));
        KVASIR_UNROLL
        for (int32_t k = 0; k < 2; ++k) {
          const uint32_t b[2] = {q.word[2 * k], q.word[2 * k + 1]};
          Product<T>(run_.d[n], a[k], b);
        }
      }
    }
  }

  // Applies a run's scale and minimum, and adds the run's sums to the scores.
  KVASIR_DEVICE void EndRun(const LatentChunkOnDevice& chunk,
                            const uint32_t* words) {
    const uint32_t params[2] = {simt::LoadShared(words + g_),
                                simt::LoadShared(words + g_ + 8)};
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        float& score = score_.d[n][i];
        score = simt::Fma(run_.d[n][i], LowHalf(params[i / 2]), score);
        if (KindOf(chunk) == ChunkKind::kLevels4) continue;
        const int32_t row = 8 * n + 2 * c_ + i % 2;
        const float sum =
            simt::LoadShared(query_sums_ + chunk.run * kRows + row);
        score = simt::Fma(sum, HighHalf(params[i / 2]), score);
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
                        8 * q_stride_, one_tile_ ? 1 : tiles, score_.d);
      }
      StoreScores(block, /*as_exact=*/true);
    }
  }
  // Adds the values of exact rows to the sums of a chunk.
  KVASIR_DEVICE void SumExact(int32_t index) {
    if (!values_.any_exact()) return;
    const LatentChunkOnDevice& chunk = ChunkOf(chunks_.keys + index);
    if (FirstPiece(chunk) >= chunk.pieces) return;
    if (ValueBlocks().none()) {
      Clear(&sum_[0]);
      Clear(&sum_[1]);
    }
    for (int32_t block = values_.ExactFrom(values_.first());
         block < values_.end(); block = values_.ExactFrom(block + 1)) {
      int64_t place = kNoExactRow;
      KVASIR_NO_UNROLL
      for (int32_t k = 0; k < kBlock / 16; ++k) {
        if (k % 2 == 0) {  // each lane finds the place of one of 32 slots
          place =
              ExactPlace(/*of_keys=*/false, block * kBlock + 16 * k + lane_);
        }
        uint32_t a[2][4];
        LoadExactValues(KindOf(chunk), chunk,
                        (HasFourBits(KindOf(chunk)) ? 32 : 16) * warp_, place,
                        k % 2 * 16, a);
        AddExactValues(HasFourBits(KindOf(chunk)), block, k, a);
      }
    }
    EndSum(chunk);
  }
  KVASIR_DEVICE void AddExactValues(bool two, int32_t block, int32_t k,
                                    const uint32_t (&a)[2][4]) {
    const auto finite = [&](const uint32_t(&of)[4]) {
      return IsFinite<T>(of[0]) && IsFinite<T>(of[1]) && IsFinite<T>(of[2]) &&
             IsFinite<T>(of[3]);
    };
    const bool apart =
        item_.num_tokens > 1 && simt::Any(!(finite(a[0]) && finite(a[1])));
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      if (n > 0 && one_tile_) continue;
      uint32_t b[2];
      simt::LoadMatrices<2>(b, weights_ + 8 * n * kScoreStride + kOwnWeights +
                                   block * kBlock / 2 + 8 * k);
      b[0] = WeightsOf(/*as_exact=*/true, b[0]);
      b[1] = WeightsOf(/*as_exact=*/true, b[1]);
      KVASIR_UNROLL
      for (int32_t t = 0; t < 2; ++t) {
        if (t == 1 && !two) continue;
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
  KVASIR_DEVICE SplitKeyBias<T, kind != MmaKind::kNumbers> key_bias() const {
    return {args_, key_angles_};
  }
  // Converts scores to weights (softmax). A warp computes two rows of a tile.
  KVASIR_DEVICE void Weigh() {
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < kWarpRows; ++i) {
      const int32_t row = warp_ + kWarps * i;
      auto* const words =
          reinterpret_cast<uint32_t*>(scores_ + row * kScoreStride) + lane_;
      if (row >= item_.rows()) {
        KVASIR_UNROLL
        for (int32_t k = 0; k < kSplit / 64; ++k) {
          StoreWeights(words + 32 * k, 0.0f, 0.0f);
        }
        continue;
      }
      const SlotRange visible =
          Both(slots_, RowSlots(device_, *item_.sequence, item_.TokenOf(row)));
      const auto begin = static_cast<int32_t>(visible.begin - split_);
      const auto end = static_cast<int32_t>(visible.end - split_);
      const bool all = begin == 0 && end == kSplit;
      // The lane's scores of pairs of neighbouring slots, later their weights.
      float weight[kSplit / 32];
      float max = begin < end ? kLeastMax : kNoSlot;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 64; ++k) {
        const auto both = simt::LoadShared(
            reinterpret_cast<const uint64_t*>(words - lane_) + 32 * k + lane_);
        weight[2 * k] = simt::BitsAs<float>(static_cast<uint32_t>(both));
        weight[2 * k + 1] =
            simt::BitsAs<float>(static_cast<uint32_t>(both >> 32));
      }
      const auto slot_of = [this](int32_t k) {
        return 64 * (k / 2) + 2 * lane_ + k % 2;
      };
      key_bias().AddTo(item_, row, slot_of, weight);
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        if (!all && (slot_of(k) < begin || slot_of(k) >= end)) {
          weight[k] = kHidden;
        }
        max = simt::Max(max, weight[k]);
      }
      max = simt::WarpMax(max);
      float sum = 0.0f;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        weight[k] = simt::Exp2(weight[k] - max);
        sum += weight[k];
      }
      sum = simt::WarpSum(sum);
      if (exact && values_.any_exact()) {
        const CodecSlots codec =
            ReadAsCodes(/*of_keys=*/false, item_.TokenIn(row));
        KVASIR_UNROLL
        for (int32_t k = 0; k < kSplit / 32; ++k) {
          if (!codec.Has(slot_of(k))) weight[k] = -weight[k];
        }
      }
      simt::SyncWarp();
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 64; ++k) {
        StoreWeights(words + 32 * k, weight[2 * k], weight[2 * k + 1]);
      }
      if (lane_ == 0) {
        EndSoftmax(args_, item_, row, {max, sum}, merged_, factors_ + row,
                   kRows);
      }
    }
  }
  // StoreWeights stores a pair of weights as float16 for codes, as T for
  // unquantized numbers and exact rows, or as both. Weights of exact rows are
  // negative in T and 0 in float16. kCodesHaveOwn: the weights for codes are
  // stored separately from those in T.
  static constexpr bool kCodesHaveOwn =
      DTypeOf<T>::kValue != DType::kF16 || exact;
  static KVASIR_DEVICE void StoreWeights(uint32_t* word, float first,
                                         float second) {
    if constexpr (kind != MmaKind::kNumbers && kCodesHaveOwn) {
      const uint32_t pair = simt::MakePair<F16>(first, second);
      simt::StoreShared(word,
                        exact ? WeightsOf(/*as_exact=*/false, pair) : pair);
    }
    if constexpr (kind == MmaKind::kNumbers || kind == MmaKind::kAny ||
                  !kCodesHaveOwn || exact) {
      simt::StoreShared(word + kOwnWeights, simt::MakePair<T>(first, second));
    }
  }

  KVASIR_DEVICE void Sum(int32_t index, int32_t block, char* stage) {
    const LatentChunkOnDevice chunk = ChunkOf(chunks_.keys + index);
    if (block == ValueBlocks().begin) {
      Clear(&sum_[0]);
      Clear(&sum_[1]);
    }
    if (FirstPiece(chunk) >= chunk.pieces) return;
    if (HasNumbers(chunk)) {
      SumNumbers(block, stage);
    } else {
      BoundParams(chunk, stage);
      if (KindOf(chunk) == ChunkKind::kCodes8) {
        SumCodes8(block, stage);
      } else {
        SumCodes4(chunk, block, stage);
      }
    }
    if (exact && values_.any_exact()) return;
    if (block + 1 == end_block_) EndSum(chunk);
  }

  // Loads the weights of slots [32k, 32k + 32) of a block for the rows of tile
  // n. They are the second operands of two products of 16 slots.
  template <bool of_codes>
  KVASIR_DEVICE void Weights(int32_t block, int32_t k, int32_t n,
                             uint32_t (&b)[4]) const {
    constexpr bool kOwn = !of_codes || !kCodesHaveOwn;
    simt::LoadMatrices<4>(b, weights_ + 8 * n * kScoreStride +
                                 (kOwn ? kOwnWeights : 0) + block * kBlock / 2 +
                                 16 * k);
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
        if (n > 0 && one_tile_) continue;
        uint32_t b[4];
        Weights</*of_codes=*/false>(block, k, n, b);
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
        if (n > 0 && one_tile_) continue;
        uint32_t both[4];
        Weights</*of_codes=*/false>(block, k / 2, n, both);
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
  KVASIR_DEVICE void SumCodes8(int32_t block, char* stage) {
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 32; ++k) {
      uint32_t words[4];
      LoadCodes(stage, k, words);
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const PairParams pair = ParamsAt(stage, 4 * k + i);
        KVASIR_UNROLL
        for (uint32_t j = 0; j < 2; ++j) {
          // This lane decodes channel 2 g_ + j of two neighbouring slots.
          const uint32_t bytes =
              simt::PickBytes(words[i], 0x64646464u, 0x4240u + 0x0101u * j);
          a[i / 2][i % 2 * 2 + j] =
              simt::FmaPair(F16{}, simt::SubPair<F16>(bytes, 0x64006400u),
                            pair.scale, pair.minimum);
        }
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n > 0 && one_tile_) continue;
        uint32_t b[4];
        Weights</*of_codes=*/true>(block, k, n, b);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          Product<F16>(sum_[0].d[n], a[i], {b[2 * i], b[2 * i + 1]});
        }
      }
    }
  }

  KVASIR_DEVICE void SumCodes4(const LatentChunkOnDevice& chunk, int32_t block,
                               char* stage) {
    const bool levels = KindOf(chunk) == ChunkKind::kLevels4;
    const uint32_t* const table = tables_ + chunk.table * kTableWords;
    const auto lower = [&](uint32_t word, const PairParams& pair) {
      return levels ? simt::MulPair<F16>(LevelsOf(table, word), pair.scale)
                    : simt::FmaPair(F16{}, Codes4<F16>(word), pair.scale,
                                    pair.minimum);
    };
    const auto upper = [&](uint32_t word, const PairParams& pair) {
      return levels ? simt::MulPair<F16>(LevelsOf(table, word >> 4), pair.scale)
                    : simt::FmaPair(F16{}, UpperCodes4<F16>(word), pair.scale,
                                    pair.minimum);
    };
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 32; ++k) {
      uint32_t words[4];
      LoadCodes(stage, k, words);
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        uint32_t a[2][4];
        KVASIR_UNROLL
        for (int32_t h = 0; h < 2; ++h) {
          const PairParams pair = ParamsAt(stage, 4 * k + 2 * i + h);
          // Channels 4 g_ to 4 g_ + 3 of two neighbouring slots.
          const uint32_t word = words[2 * i + h];
          a[0][2 * h] = lower(word, pair);
          a[1][2 * h] = upper(word, pair);
          a[0][2 * h + 1] = lower(word >> 8, pair);
          a[1][2 * h + 1] = upper(word >> 8, pair);
        }
        KVASIR_UNROLL
        for (int32_t n = 0; n < tiles; ++n) {
          if (n > 0 && one_tile_) continue;
          uint32_t b[4];
          Weights</*of_codes=*/true>(block, k, n, b);
          const uint32_t half[2] = {b[2 * i], b[2 * i + 1]};
          Product<F16>(sum_[0].d[n], a[0], half);
          Product<F16>(sum_[1].d[n], a[1], half);
        }
      }
    }
  }

  KVASIR_DEVICE void EndSum(const LatentChunkOnDevice& chunk) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const int32_t row = 8 * n + 2 * c_ + j;
        if (row >= item_.rows()) continue;
        if (item_.partial >= 0) {
          float* const partial = PartialRow(args_, item_, row) + chunk.column;
          ForSums(chunk, n, j, [&](int32_t channel, float sum) {
            simt::StoreGlobal(partial + channel, sum);
          });
          continue;
        }
        float* const total = sums_ + row * device_.out_width + chunk.column;
        const MergeFactors factors = {simt::LoadShared(factors_ + row),
                                      simt::LoadShared(factors_ + kRows + row)};
        ForSums(chunk, n, j, [&](int32_t channel, float sum) {
          const float before =
              merged_ ? simt::LoadShared(total + channel) : 0.0f;
          simt::StoreShared(total + channel, MergeSum(factors, before, sum));
        });
      }
    }
  }

  // Calls visit(channel, sum) for this lane's sums of row 2c_ + j in tile n.
  template <typename Visit>
  KVASIR_DEVICE void ForSums(const LatentChunkOnDevice& chunk, int32_t n,
                             int32_t j, const Visit& visit) const {
    const ChunkKind what = KindOf(chunk);
    const bool codes4 = HasFourBits(what);
    KVASIR_UNROLL
    for (int32_t t = 0; t < 2; ++t) {
      if (t == 1 && !codes4) continue;
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
        const int32_t row = 8 * (i / 2) + 2 * c_ + i % 2;
        if (row >= item_.rows()) continue;
        const bool sees =
            merged_ && SeesSlots(simt::LoadShared(factors_ + 3 * kRows + row));
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
                     (1.0f / simt::LoadShared(factors_ + 2 * kRows + row));
          }
          simt::StoreGlobal(out + channel, simt::FromFloat<T>(number));
        });
      }
    }
  }

  float* scores_;  // [rows][kScoreStride]
  // The row of weights whose address this lane passes to LoadMatrices.
  const float* weights_;
  uint32_t* next_item_;
  float* factors_;     // [4][rows], as EndSoftmax writes them
  float* query_sums_;  // [runs of keys][rows]
  uint32_t* tables_;   // [tables][kTableWords]
  uint16_t* q_;        // [rows][q_stride_]
  float* key_angles_;  // for SplitKeyBias
  float* sums_;        // [rows][out_width]
  int32_t q_stride_;
  int32_t g_, c_;  // lane / 4, lane % 4

  SlotRange seen_;  // slots that at least one row of the item sees
  TileSums<tiles> score_, run_, sum_[2];
  // True if sums_ and factors_ have results of earlier splits.
  bool merged_;
  bool one_tile_;  // true if the item has at most 8 rows
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
