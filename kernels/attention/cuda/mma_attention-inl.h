// Attention of an item (attention_items.h) by tensor cores, for activations of
// 16 bits: numbers of their type, and codes of 8 or 4 bits with ranges of
// float16 in slots or with 16 levels. C++17, device code.
//
// A CTA of four warps takes a split of 512 slots in three passes: scores of all
// slots, the softmax, all values. Latents come as chunks of pieces of 16 bytes
// (LatentChunkOnDevice) of 64 slots, by asynchronous copies into stages that
// run ahead over both passes. They are the first operand of mma.m16n8k16, in
// registers, and rows the second, 8 at a time:
//   scores: [16 slots][16 channels] [16 channels][8 rows], a warp to 16 slots;
//   values: [16 channels][16 slots] [16 slots][8 rows], a warp to 16 channels
//     of numbers or 8-bit codes, or 32 of 4-bit codes.
// Codes become numbers of 16 bits on the way, exactly for keys, whose scale and
// minimum are applied to a run's sums; values are fma(code, scale, minimum) in
// float16, whatever the activations' type, with as much of the scale as leaves
// the greatest code below 65504 (a run whose values are within that is as it is
// stored). Weights are rounded to 16 bits for the product (to float16
// where values are codes), and summed in float32 as they were. Queries of 4-bit
// keys are staged in the order in which codes leave a word (0, 4, 1, 5, ...).
//
// Layout: pieces of a tile, then of 64 slots each, side by side (granules of
// 16), so that copies are runs of 512 bytes a warp, and stages are free of bank
// conflicts for ldmatrix. Slot after slot is served too, in shorter runs.
// Bytes: latents once for up to 16 rows; the block table, queries and results
// are small beside 512 slots. Floor: the latents' bytes over the memory's
// bandwidth.
// Instructions of a lane for a code, integer ones counted twice, without loads,
// copies and products: 4-bit keys 2.25 (lop3 0.5, shifts 0.375, subtraction
// 0.5), values 3.5 (0.5, 0.375, subtraction and fma 1.0, ranges 0.5); 8-bit
// keys of float16 1.5, of bfloat16 5, values 3.5. The products' 8 rows are
// padded: a group of one query head costs as much as one of eight. Prompts are
// prefill_attention-inl.h's where that serves them.
#pragma once

#include "base/host_device.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kMmaThreads = 128;

template <typename T>
class MmaAttention {
 public:
  static constexpr int32_t kRows = static_cast<int32_t>(kDeviceTileRows);

  KVASIR_DEVICE explicit MmaAttention(const AttentionKernelArgs& args)
      : args_(args), device_(args.device) {
    char* next = simt::Shared();
    const auto take = [&next](int64_t bytes) {
      char* const taken = next;
      next += bytes;
      return taken;
    };
    stages_ = take(kStages * kStageBytes);
    scores_ = reinterpret_cast<float*>(take(kRows * kScoreStride * 4));
    places_ = reinterpret_cast<Place*>(take(kSplit * 8));
    factors_ = reinterpret_cast<float*>(take(4 * kRows * 4));
    query_sums_ =
        reinterpret_cast<float*>(take(kRows * device_.most_key_runs * 4));
    tables_ =
        reinterpret_cast<uint32_t*>(take(device_.num_tables * kTableWords * 4));
    q_ = reinterpret_cast<uint16_t*>(take(kRows * device_.query_stride * 2));
    sums_ = reinterpret_cast<float*>(next);
    q_stride_ = static_cast<int32_t>(device_.query_stride);
    thread_ = static_cast<int32_t>(simt::Thread());
    warp_ = thread_ / static_cast<int32_t>(simt::kWarp);
    lane_ = thread_ % static_cast<int32_t>(simt::kWarp);
    g_ = lane_ / 4;
    c_ = lane_ % 4;
    FillTables();
  }

  KVASIR_DEVICE void Compute(const Item& item, const UnitChunks& chunks) {
    item_ = item;
    chunks_ = chunks;
    seen_ =
        RowsSlots(device_, *item.sequence, item.first_token, item.num_tokens);
    one_tile_ = item.rows() <= 8;
    merged_ = false;
    for (int32_t s = 0; s < item.num_splits; ++s) {
      split_ = (item.first_split + s) * kSplit;
      slots_ = Both(SplitSlots(item.first_split + s), seen_);
      if (slots_.end <= slots_.begin) {
        // A result of no slots is written all the same.
        if (item.partial >= 0) ClearPartial();
        continue;
      }
      first_block_ = static_cast<int32_t>(slots_.begin - split_) / kBlock;
      end_block_ = static_cast<int32_t>(slots_.end - 1 - split_) / kBlock + 1;
      ComputeSplit();
      merged_ = true;
    }
    if (item.partial < 0) Finish();
  }

 private:
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kStages = 4;
  static constexpr int32_t kPiece = 16;  // bytes
  static constexpr int32_t kMostPieces = 8;
  // Behind the pieces, a word of each slot.
  static constexpr int32_t kStageBytes =
      kMostPieces * kBlock * kPiece + kBlock * 4;
  static constexpr int32_t kTiles = kRows / 8;  // of 8 rows
  static constexpr int32_t kWarpRows = kRows / 4;
  // A row: scores, then its weights as float16 and, behind 260 words, in T.
  // Neither the columns of a sum nor the rows of an operand meet in a bank.
  static constexpr int32_t kScoreStride = 516;
  static constexpr int32_t kOwnWeights = 260;
  static constexpr int32_t kTableWords = 256;
  static_assert(kStages * kStageBytes + kRows * kScoreStride * 4 + kSplit * 8 +
                    4 * kRows * 4 ==
                kMmaFixedBytes);
  static_assert(kTableWords * 4 == kMmaTableBytes);

  // A place among the chunks of a split: for each block those of keys, then for
  // each chunk of values its blocks.
  struct Cursor {
    int32_t chunk;  // of the unit
    int32_t block;
  };
  KVASIR_DEVICE bool OfKeys(const Cursor& at) const {
    return at.chunk < chunks_.keys;
  }
  KVASIR_DEVICE bool Done(const Cursor& at) const {
    return at.chunk >= chunks_.keys + chunks_.values;
  }
  KVASIR_DEVICE void Advance(Cursor* at) const {
    if (OfKeys(*at)) {
      if (++at->chunk < chunks_.keys) return;
      if (++at->block < end_block_) {
        at->chunk = 0;
      } else {
        at->block = first_block_;
      }
    } else if (++at->block == end_block_) {
      at->block = first_block_;
      ++at->chunk;
    }
  }
  KVASIR_DEVICE const LatentChunkOnDevice& ChunkOf(const Cursor& at) const {
    return device_.chunks[chunks_.first + at.chunk];
  }

  // Pairs of levels: that of the word's lower four bits below.
  KVASIR_DEVICE void FillTables() {
    for (int32_t t = 0; t < device_.num_tables; ++t) {
      const float* const levels = device_.levels[t];
      for (int32_t i = thread_; i < kTableWords;
           i += static_cast<int32_t>(kMmaThreads)) {
        const float low = levels[i % 16];
        const float high = levels[i / 16];
        simt::StoreShared(tables_ + t * kTableWords + i,
                          device_.levels_of_keys[t]
                              ? simt::MakePair<T>(low, high)
                              : simt::MakePair<F16>(low, high));
      }
    }
  }

  // q_, and the sums of their runs.
  KVASIR_DEVICE void FillQueries() {
    for (int32_t k = 0; k < chunks_.keys; ++k) {
      const LatentChunkOnDevice& chunk = device_.chunks[chunks_.first + k];
      const int32_t padded = (chunk.channels + 15) / 16 * 16;
      for (int32_t i = thread_; i < kRows * padded;
           i += static_cast<int32_t>(kMmaThreads)) {
        const int32_t row = i / padded;
        const int32_t c = i % padded;
        uint16_t bits = 0;
        if (row < item_.rows() && c < chunk.channels) {
          bits = simt::LoadGlobal(QueryRow(chunk, row) + c);
        }
        simt::StoreShared(
            q_ + row * q_stride_ + chunk.column + StagedAt(chunk.kind, c),
            bits);
      }
      if (chunk.kind == ChunkKind::kNumbers || !chunk.starts_run) continue;
      // A warp to a row; lanes take every 32nd channel.
      for (int32_t row = warp_; row < kRows; row += 4) {
        float sum = 0.0f;
        if (row < item_.rows()) sum = RunSum(k, row);
        sum = simt::WarpSum(sum);
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
      for (int32_t c = lane_; c < chunk.channels; c += 32) {
        sum += simt::ToFloat(simt::BitsAs<T>(simt::LoadGlobal(queries + c)));
      }
      ends = chunk.ends_run;
    }
    return sum;
  }

  // Where a slot of the split lies; page below 0: no row sees it.
  struct alignas(8) Place {
    int32_t page;
    int32_t slot;  // of it
  };
  KVASIR_DEVICE void FindPlaces() {
    const auto* const table =
        simt::BitsAs<const int32_t*>(item_.sequence->block_table);
    for (int32_t s = thread_; s < kSplit;
         s += static_cast<int32_t>(kMmaThreads)) {
      const int64_t slot = split_ + s;
      Place place = {-1, 0};
      if (slot >= slots_.begin && slot < slots_.end) {
        const int64_t index = Quotient(slot, device_.page_tokens);
        place.page = simt::LoadGlobal(table + index);
        place.slot = static_cast<int32_t>(slot - index * device_.page_tokens);
      }
      simt::StoreShared(places_ + s, place);
    }
  }

  KVASIR_DEVICE void ComputeSplit() {
    // Of what was before nobody reads queries and places any more.
    if (!merged_) FillQueries();
    FindPlaces();
    // They are there, and all have left the stages.
    simt::SyncCta();
    Cursor load = {0, first_block_};
    Cursor use = load;
    int32_t stage = 0;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kStages - 1; ++i) LoadNext(&load, i);
    while (!Done(use)) {
      simt::WaitCopies<kStages - 2>();
      // All have what came for the chunk; all have left the stage before.
      simt::SyncCta();
      LoadNext(&load, (stage + kStages - 1) % kStages);
      const char* const from = stages_ + stage * kStageBytes;
      const bool of_keys = OfKeys(use);
      of_keys ? Score(use, from) : Sum(use, from);
      Advance(&use);
      if (of_keys && !OfKeys(use)) {
        simt::SyncCta();
        Weigh();
      }
      stage = (stage + 1) % kStages;
    }
  }

  // Asks for a chunk, if there is one left.
  KVASIR_DEVICE void LoadNext(Cursor* at, int32_t stage) {
    if (!Done(*at)) {
      Load(ChunkOf(*at), at->block, stages_ + stage * kStageBytes);
      Advance(at);
    }
    simt::CommitCopies();
  }

  // [piece][64 slots][16 bytes], and a word of each slot. What no row sees is
  // 0, and so is the half of a last pair of pieces that is not there.
  KVASIR_DEVICE void Load(const LatentChunkOnDevice& chunk, int32_t block,
                          char* stage) const {
    const int32_t s = thread_ % kBlock;
    const Place place = simt::LoadShared(places_ + block * kBlock + s);
    const int32_t page = place.page;
    const char* tile = nullptr;
    int32_t slot = place.slot;
    if (page >= 0) {
      tile = chunk.arena + page * chunk.page_bytes;
      if (slot >= chunk.tile_slots) {
        tile += int64_t{slot / chunk.tile_slots} * chunk.tile_bytes;
        slot %= chunk.tile_slots;
      }
    }
    const int32_t pieces = (chunk.pieces + 1) / 2 * 2;
    for (int32_t p = thread_ / kBlock; p < pieces; p += 2) {
      char* const to = stage + (p * kBlock + s) * kPiece;
      if (page >= 0 && p < chunk.pieces) {
        simt::CopyAsync<kPiece>(to, tile + chunk.codes_offset +
                                        slot * chunk.slot_stride +
                                        p * chunk.piece_stride);
      } else {
        simt::StoreShared(reinterpret_cast<simt::Vec16*>(to), simt::Vec16{});
      }
    }
    if (chunk.kind == ChunkKind::kNumbers || thread_ >= kBlock) return;
    char* const word = stage + kMostPieces * kBlock * kPiece + 4 * s;
    if (page >= 0) {
      simt::CopyAsync<4>(
          word, tile + chunk.params_offset + slot * chunk.params_stride);
    } else {
      simt::StoreShared(reinterpret_cast<uint32_t*>(word), 0u);
    }
  }
  KVASIR_DEVICE static uint32_t ParamsOf(const char* stage, int32_t slot) {
    return simt::LoadShared(reinterpret_cast<const uint32_t*>(
                                stage + kMostPieces * kBlock * kPiece) +
                            slot);
  }

  KVASIR_DEVICE void Score(const Cursor& at, const char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (at.chunk == 0) Clear(&score_);
    if (chunk.kind == ChunkKind::kNumbers) {
      ScoreNumbers(chunk, stage);
    } else {
      if (chunk.starts_run) Clear(&run_);
      if (chunk.kind == ChunkKind::kCodes8) {
        ScoreCodes8(chunk, stage);
      } else {
        ScoreCodes4(chunk, stage);
      }
      if (chunk.ends_run) EndRun(chunk, stage);
    }
    if (at.chunk + 1 < chunks_.keys) return;
    const float scale = device_.scale * simt::kLog2E;
    KVASIR_UNROLL
    for (int32_t n = 0; n < kTiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = 8 * n + 2 * c_ + i % 2;
        const int32_t slot = at.block * kBlock + 16 * warp_ + g_ + 8 * (i / 2);
        simt::StoreShared(scores_ + row * kScoreStride + slot,
                          score_.d[n][i] * scale);
      }
    }
  }

  KVASIR_DEVICE void ScoreNumbers(const LatentChunkOnDevice& chunk,
                                  const char* stage) {
    // Lane 8m + r names row r of matrix m: slots 0 to 7, 8 to 15 of the lower
    // piece, then of the upper one.
    const int32_t m = lane_ / 8;
    const char* const from =
        stage +
        (m / 2 * kBlock + 16 * warp_ + 8 * (m % 2) + lane_ % 8) * kPiece;
    for (int32_t p = 0; p < chunk.pieces; p += 2) {
      uint32_t a[4];
      simt::LoadMatrices<4>(a, from + p * kBlock * kPiece);
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        if (n > 0 && one_tile_) continue;
        const auto* const q = reinterpret_cast<const uint32_t*>(
            QueryAt(chunk, n) + 8 * p + 2 * c_);
        const uint32_t b[2] = {simt::LoadShared(q), simt::LoadShared(q + 4)};
        Product<T>(score_.d[n], a, b);
      }
    }
  }
  // The staged row of the lane's column of an operand.
  KVASIR_DEVICE const uint16_t* QueryAt(const LatentChunkOnDevice& chunk,
                                        int32_t n) const {
    return q_ + (8 * n + g_) * q_stride_ + chunk.column;
  }
  // The lane's word of a piece, of its slot or of that 8 further on.
  KVASIR_DEVICE uint32_t WordOf(const char* stage, int32_t piece,
                                int32_t further) const {
    return simt::LoadShared(reinterpret_cast<const uint32_t*>(
        stage + (piece * kBlock + 16 * warp_ + g_ + further) * kPiece +
        4 * c_));
  }

  KVASIR_DEVICE void ScoreCodes8(const LatentChunkOnDevice& chunk,
                                 const char* stage) {
    for (int32_t p = 0; p < chunk.pieces; ++p) {
      const uint32_t low = WordOf(stage, p, 0);
      const uint32_t high = WordOf(stage, p, 8);
      const uint32_t a[4] = {Codes8<T, 0>(low), Codes8<T, 0>(high),
                             Codes8<T, 1>(low), Codes8<T, 1>(high)};
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
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
    const bool levels = chunk.kind == ChunkKind::kLevels4;
    const uint32_t* const table = tables_ + chunk.table * kTableWords;
    const auto pair = [&](uint32_t word) {
      return levels ? LevelsOf(table, word) : Codes4<T>(word);
    };
    for (int32_t p = 0; p < chunk.pieces; ++p) {
      const uint32_t low = WordOf(stage, p, 0);
      const uint32_t high = WordOf(stage, p, 8);
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t k = 0; k < 2; ++k) {
        a[k][0] = pair(low >> (8 * k));
        a[k][1] = pair(high >> (8 * k));
        a[k][2] = pair(low >> (8 * k + 4));
        a[k][3] = pair(high >> (8 * k + 4));
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
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

  // A run's scale and minimum.
  KVASIR_DEVICE void EndRun(const LatentChunkOnDevice& chunk,
                            const char* stage) {
    const int32_t slot = 16 * warp_ + g_;
    const uint32_t params[2] = {ParamsOf(stage, slot),
                                ParamsOf(stage, slot + 8)};
    KVASIR_UNROLL
    for (int32_t n = 0; n < kTiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        float& score = score_.d[n][i];
        score = simt::Fma(run_.d[n][i], LowHalf(params[i / 2]), score);
        if (chunk.kind == ChunkKind::kLevels4) continue;
        const int32_t row = 8 * n + 2 * c_ + i % 2;
        const float sum =
            simt::LoadShared(query_sums_ + chunk.run * kRows + row);
        score = simt::Fma(sum, HighHalf(params[i / 2]), score);
      }
    }
  }

  // Scores to weights of 16 bits, a warp to four rows.
  KVASIR_DEVICE void Weigh() {
    for (int32_t i = 0; i < kWarpRows; ++i) {
      const int32_t row = warp_ * kWarpRows + i;
      SlotRange visible = {0, 0};
      if (row < item_.rows()) {
        visible = Both(slots_,
                       RowSlots(device_, *item_.sequence, item_.TokenOf(row)));
      }
      auto* const words =
          reinterpret_cast<uint32_t*>(scores_ + row * kScoreStride);
      // Pairs of neighbours.
      float weight[kSplit / 32];
      float max = visible.begin < visible.end ? kLeastMax : kNoSlot;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 64; ++k) {
        const auto both = simt::LoadShared(
            reinterpret_cast<const uint64_t*>(words) + 32 * k + lane_);
        KVASIR_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          const int64_t slot = split_ + 64 * k + 2 * lane_ + j;
          const bool sees = slot >= visible.begin && slot < visible.end;
          const float score = simt::BitsAs<float>(
              static_cast<uint32_t>(j == 0 ? both : both >> 32));
          weight[2 * k + j] = sees ? score : kHidden;
          max = sees && score > max ? score : max;
        }
      }
      max = simt::WarpMax(max);
      float sum = 0.0f;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        weight[k] = weight[k] == kHidden ? 0.0f : simt::Exp2(weight[k] - max);
        sum += weight[k];
      }
      sum = simt::WarpSum(sum);
      // All lanes have read the scores that weights take the place of.
      simt::SyncWarp();
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 64; ++k) {
        uint32_t* const word = words + 32 * k + lane_;
        simt::StoreShared(
            word, simt::MakePair<F16>(weight[2 * k], weight[2 * k + 1]));
        simt::StoreShared(word + kOwnWeights,
                          simt::MakePair<T>(weight[2 * k], weight[2 * k + 1]));
      }
      if (lane_ == 0) {
        EndSoftmax(args_, item_, row, {max, sum}, merged_, factors_);
      }
    }
  }
  KVASIR_DEVICE void Sum(const Cursor& at, const char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (at.block == first_block_) {
      Clear(&sum_[0]);
      Clear(&sum_[1]);
    }
    if (chunk.kind == ChunkKind::kNumbers) {
      if (2 * warp_ >= chunk.pieces) return;
      SumNumbers(at.block, stage);
    } else {
      if (warp_ >= chunk.pieces) return;
      if (chunk.kind == ChunkKind::kCodes8) {
        SumCodes8(chunk, at.block, stage);
      } else {
        SumCodes4(chunk, at.block, stage);
      }
    }
    if (at.block + 1 == end_block_) EndSum(chunk);
  }

  // Weights of slots 16k + {2c, 2c + 1, 2c + 8, 2c + 9} of a block, of row g.
  template <typename Number>
  KVASIR_DEVICE void Weights(int32_t block, int32_t k, int32_t n,
                             uint32_t (&b)[2]) const {
    constexpr bool kOwn = DTypeOf<Number>::kValue == DTypeOf<T>::kValue;
    const auto* const words =
        reinterpret_cast<const uint32_t*>(scores_ +
                                          (8 * n + g_) * kScoreStride) +
        (kOwn ? kOwnWeights : 0) + (block * kBlock + 16 * k) / 2 + c_;
    b[0] = simt::LoadShared(words);
    b[1] = simt::LoadShared(words + 4);
  }

  KVASIR_DEVICE void SumNumbers(int32_t block, const char* stage) {
    const int32_t m = lane_ / 8;
    const char* const from =
        stage +
        ((2 * warp_ + m % 2) * kBlock + 8 * (m / 2) + lane_ % 8) * kPiece;
    const bool some = SeenBySome(device_, item_, split_ + block * kBlock);
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      uint32_t a[4];
      simt::LoadMatrices<4, /*transposed=*/true>(a, from + 16 * k * kPiece);
      const bool apart =
          some && simt::Any(!(IsFinite<T>(a[0]) && IsFinite<T>(a[1]) &&
                              IsFinite<T>(a[2]) && IsFinite<T>(a[3])));
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        if (n > 0 && one_tile_) continue;
        uint32_t b[2];
        Weights<T>(block, k, n, b);
        if (apart) {
          AddApart(block, k, n, a, b);
        } else {
          Product<T>(sum_[0].d[n], a, b);
        }
      }
    }
  }
  // The product token by token, without the slots that it does not see: 0 times
  // what is not finite would not be 0.
  KVASIR_DEVICE void AddApart(int32_t block, int32_t k, int32_t n,
                              const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const int32_t slot = block * kBlock + 16 * k + 2 * c_;  // of the split
    KVASIR_NO_UNROLL
    for (int32_t t = 0; t < item_.num_tokens; ++t) {
      const SlotRange sees =
          RowSlots(device_, *item_.sequence, item_.first_token + t);
      const auto begin = static_cast<int32_t>(sees.begin - split_);
      const auto end = static_cast<int32_t>(sees.end - split_);
      uint32_t seen[4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t at = slot + 8 * (i / 2);
        seen[i] = (at >= begin && at < end ? a[i] & 0xffffu : 0u) |
                  (at + 1 >= begin && at + 1 < end ? a[i] & 0xffff0000u : 0u);
      }
      float sums[4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) sums[i] = sum_[0].d[n][i];
      Product<T>(sums, seen, b);
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = 8 * n + 2 * c_ + i % 2;
        if (row / item_.unit.num_heads == t) sum_[0].d[n][i] = sums[i];
      }
    }
  }

  // Of codes: what a lane gets are 2 bytes of slots 2c and 2c + 1, then of 8
  // slots further on.
  KVASIR_DEVICE void LoadCodes(const char* stage, int32_t k,
                               uint32_t (&words)[2]) const {
    simt::LoadMatrices<2, /*transposed=*/true>(
        words, stage + (warp_ * kBlock + 16 * k + lane_ % 16) * kPiece);
  }
  // Of slots 16k + 8i + {2c, 2c + 1}.
  KVASIR_DEVICE PairParams PairParamsOf(const LatentChunkOnDevice& chunk,
                                        const char* stage, int32_t k) const {
    PairParams pairs;
    KVASIR_UNROLL
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t slot = 16 * k + 8 * i + 2 * c_;
      const uint32_t first = ParamsOf(stage, slot);
      const uint32_t second = ParamsOf(stage, slot + 1);
      pairs.minimum[i] = simt::PickBytes(first, second, 0x7632u);
      const uint32_t most =
          chunk.kind == ChunkKind::kLevels4
              ? chunk.most_scale
              : simt::FmaPair(F16{}, pairs.minimum[i], chunk.less_scale,
                              chunk.most_scale);
      pairs.scale[i] =
          simt::MinPair(simt::PickBytes(first, second, 0x5410u), most);
    }
    return pairs;
  }

  KVASIR_DEVICE void SumCodes8(const LatentChunkOnDevice& chunk, int32_t block,
                               const char* stage) {
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      uint32_t words[2];
      LoadCodes(stage, k, words);
      const PairParams pairs = PairParamsOf(chunk, stage, k);
      uint32_t a[4];
      KVASIR_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        // Channel 2g, then 2g + 1.
        const uint32_t bytes = simt::PickBytes(words[i / 2], 0x64646464u,
                                               0x4240u + 0x0101u * (i % 2));
        a[i] = simt::FmaPair(F16{}, simt::SubPair<F16>(bytes, 0x64006400u),
                             pairs.scale[i / 2], pairs.minimum[i / 2]);
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        if (n > 0 && one_tile_) continue;
        uint32_t b[2];
        Weights<F16>(block, k, n, b);
        Product<F16>(sum_[0].d[n], a, b);
      }
    }
  }

  KVASIR_DEVICE void SumCodes4(const LatentChunkOnDevice& chunk, int32_t block,
                               const char* stage) {
    const bool levels = chunk.kind == ChunkKind::kLevels4;
    const uint32_t* const table = tables_ + chunk.table * kTableWords;
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      uint32_t words[2];
      LoadCodes(stage, k, words);
      const PairParams pairs = PairParamsOf(chunk, stage, k);
      const auto number = [&](uint32_t word, int32_t half) {
        if (levels) {
          return simt::MulPair<F16>(LevelsOf(table, word), pairs.scale[half]);
        }
        return simt::FmaPair(F16{}, Codes4<F16>(word), pairs.scale[half],
                             pairs.minimum[half]);
      };
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t t = 0; t < 2; ++t) {
        KVASIR_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          // Channel 4g + t, then 4g + t + 2.
          a[t][i] = number(words[i / 2] >> (4 * t + 8 * (i % 2)), i / 2);
        }
      }
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        if (n > 0 && one_tile_) continue;
        uint32_t b[2];
        Weights<F16>(block, k, n, b);
        Product<F16>(sum_[0].d[n], a[0], b);
        Product<F16>(sum_[1].d[n], a[1], b);
      }
    }
  }

  // The lane's channel of tile t in the chunk: of its first row of a product,
  // or of the other.
  KVASIR_DEVICE int32_t ChannelOf(ChunkKind kind, int32_t t,
                                  int32_t other) const {
    switch (kind) {
      case ChunkKind::kNumbers:
        return 16 * warp_ + g_ + 8 * other;
      case ChunkKind::kCodes8:
        return 16 * warp_ + 2 * g_ + other;
      default:
        return 32 * warp_ + 4 * g_ + t + 2 * other;
    }
  }

  KVASIR_DEVICE void EndSum(const LatentChunkOnDevice& chunk) {
    ForSums(chunk, [&](int32_t t, int32_t n, int32_t i, int32_t row,
                       int32_t channel) {
      const float sum = sum_[t].d[n][i];
      const int32_t column = chunk.column + channel;
      if (item_.partial >= 0) {
        simt::StoreGlobal(PartialRow(args_, item_, row) + column, sum);
        return;
      }
      float* const total = sums_ + row * device_.out_width + column;
      const MergeFactors factors = {simt::LoadShared(factors_ + row),
                                    simt::LoadShared(factors_ + kRows + row)};
      const float before = merged_ ? simt::LoadShared(total) : 0.0f;
      simt::StoreShared(total, MergeSum(factors, before, sum));
    });
  }

  // Calls visit(tile, 8 rows, index in the product, row, channel of the chunk)
  // for the sums of a chunk that are the lane's.
  template <typename Visit>
  KVASIR_DEVICE void ForSums(const LatentChunkOnDevice& chunk,
                             const Visit& visit) const {
    const bool codes4 =
        chunk.kind == ChunkKind::kCodes4 || chunk.kind == ChunkKind::kLevels4;
    KVASIR_UNROLL
    for (int32_t t = 0; t < 2; ++t) {
      if (t == 1 && !codes4) continue;
      KVASIR_UNROLL
      for (int32_t n = 0; n < kTiles; ++n) {
        KVASIR_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          const int32_t channel = ChannelOf(chunk.kind, t, i / 2);
          const int32_t row = 8 * n + 2 * c_ + i % 2;
          if (row < item_.rows() && channel < chunk.channels) {
            visit(t, n, i, row, channel);
          }
        }
      }
    }
  }

  // Each lane reads the sums that it wrote itself.
  KVASIR_DEVICE void Finish() {
    for (int32_t v = 0; v < chunks_.values; ++v) {
      const LatentChunkOnDevice& chunk =
          device_.chunks[chunks_.first + chunks_.keys + v];
      ForSums(
          chunk, [&](int32_t, int32_t, int32_t, int32_t row, int32_t channel) {
            float number = 0.0f;
            if (merged_ &&
                SeesSlots(simt::LoadShared(factors_ + 3 * kRows + row))) {
              number = simt::LoadShared(sums_ + row * device_.out_width +
                                        chunk.column + channel) *
                       (1.0f / simt::LoadShared(factors_ + 2 * kRows + row));
            }
            T* const out = static_cast<T*>(args_.out) +
                           RowStart(args_, item_, row, chunk.head_column,
                                    device_.out_row_stride);
            simt::StoreGlobal(out + chunk.channel + channel,
                              simt::FromFloat<T>(number));
          });
    }
  }

  KVASIR_DEVICE void ClearPartial() {
    const auto floats = static_cast<int32_t>(device_.partial_floats());
    for (int32_t i = thread_; i < item_.rows() * floats;
         i += static_cast<int32_t>(kMmaThreads)) {
      const int32_t at = i % floats;
      simt::StoreGlobal(PartialRow(args_, item_, i / floats) + at,
                        at == device_.out_width ? kNoSlot : 0.0f);
    }
  }

  struct Sums {
    float d[kTiles][4];
  };
  static KVASIR_DEVICE void Clear(Sums* sums) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < kTiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) sums->d[n][i] = 0.0f;
    }
  }
  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  char* stages_;
  float* scores_;      // [rows][kScoreStride]
  Place* places_;      // [512]
  float* factors_;     // [4][rows]: EndSoftmax's
  float* query_sums_;  // [runs of keys][rows]
  uint32_t* tables_;   // [tables][kTableWords]
  uint16_t* q_;        // [rows][q_stride_]
  float* sums_;        // [rows][out_width]
  int32_t q_stride_;
  int32_t thread_, warp_, lane_;
  int32_t g_, c_;  // lane / 4, lane % 4

  Item item_;
  UnitChunks chunks_;
  SlotRange seen_;   // by any row
  SlotRange slots_;  // of them, in the split
  int64_t split_;    // its first slot
  int32_t first_block_, end_block_;
  Sums score_, run_, sum_[2];
  bool merged_;    // a split of the item
  bool one_tile_;  // the item has up to 8 rows
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
