// Attention of prompts by tensor cores: what mma_attention-inl.h computes, for
// sequences of more than kDeviceSplitRows rows, in items of 64 or 32 rows. Each
// row is the same chain of the same operations there and here (the same splits,
// products in the same order of channels and slots, the same softmax and
// merges), so that it has the same bits, however a prompt is cut. C++17, device
// code.
//
// A CTA of eight warps takes a split of 512 slots in three passes, as there:
// scores of all slots, the softmax, all values. Chunks of 64 slots come by
// asynchronous copies into stages; codes among them are made numbers of 16 bits
// once for all rows, in a tile of shared memory, in the order in which products
// take them. Latents are the first operand of mma.m16n8k16 and rows the second:
//   scores: a warp has 16 slots of half of the rows;
//   values: a warp has 16 channels of all rows, or where a chunk has fewer than
//     128 channels of as many rows as warps share them.
// Operands come by ldmatrix, without bank conflicts where pieces of a tile lie
// side by side or not: stages have an order of their own. Exact rows
// (attention_exact.h) come as further chunks of the blocks that have some, and
// are put into the order of the codec's channels in their stage.
//
// Layout: as there. Shared memory: 2064 bytes of a row for scores (weights take
// their place), 2 of a channel of its queries, 4 of one of its sums; 46 KiB
// beside them. 64 rows of heads of 128 channels take 225 KiB, which an H100
// has; 32 rows serve an A100. Where not even those fit, prompts are the
// decoding kernel's.
// Bytes: latents once for 64 (32) rows, from the second-level cache but for the
// first time: 8K tokens of 32 heads over 8 KV heads of 128 bf16 channels move
// 8.6 GB of them in a layer. Queries and results once. Operations: 4 of a row,
// slot and channel, 0.55e12 in such a layer; blocks that no row of an item sees
// are left out. Shared memory moves for a row and slot, with 64 rows and 128
// channels of keys and of values: 24 bytes of queries and keys, 20 (4 bits) to
// 32 (numbers) of weights and values, 12 of scores: about the time that
// mma.sync takes for their 256 products. Floor: operations over the tensor
// cores'.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/prefill_operands.h"
#include "kernels/attention/cuda/prefill_order.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kPrefillThreads = 256;

// `tiles` (4 or 8) of 8 rows.
template <typename T, int32_t tiles>
class PrefillAttention {
 public:
  static constexpr int32_t kRows = 8 * tiles;

  KVASIR_DEVICE explicit PrefillAttention(const AttentionKernelArgs& args)
      : args_(args), device_(args.device) {
    char* next = simt::Shared();
    const auto take = [&next](int64_t bytes) {
      char* const taken = next;
      next += bytes;
      return taken;
    };
    q_stride_ = static_cast<int32_t>(PromptQueryStride(device_));
    sums_stride_ = static_cast<int32_t>(PromptSumsStride(device_));
    stages_ = take(kStages * kStageBytes);
    tile_ = take(device_.has_codes ? kTileBytes : 0);
    scores_ = reinterpret_cast<float*>(take(kRows * kScoreStride * 4));
    q_ = reinterpret_cast<uint16_t*>(take(kRows * q_stride_ * 2));
    sums_ = reinterpret_cast<float*>(take(kRows * sums_stride_ * 4));
    places_ = reinterpret_cast<Place*>(take(kSplit * 8));
    factors_ = reinterpret_cast<float*>(take(4 * kRows * 4));
    query_sums_ =
        reinterpret_cast<float*>(take(device_.most_key_runs * kRows * 4));
    tables_ = reinterpret_cast<uint32_t*>(next);
    thread_ = static_cast<int32_t>(simt::Thread());
    warp_ = thread_ / static_cast<int32_t>(simt::kWarp);
    lane_ = thread_ % static_cast<int32_t>(simt::kWarp);
    g_ = lane_ / 4;
    c_ = lane_ % 4;
    FillLevelTables<T>(device_, tables_);
  }

  KVASIR_DEVICE void Compute(const Item& item, const UnitChunks& chunks) {
    item_ = item;
    chunks_ = chunks;
    rows_ = item.rows();
    row_tiles_ = (rows_ + 7) / 8;
    const SlotRange seen =
        RowsSlots(device_, *item.sequence, item.first_token, item.num_tokens);
    merged_ = false;
    for (int32_t s = 0; s < item.num_splits; ++s) {
      split_ = (item.first_split + s) * kSplit;
      slots_ = Both(SplitSlots(item.first_split + s), seen);
      if (slots_.end <= slots_.begin) continue;
      first_block_ = static_cast<int32_t>(slots_.begin - split_) / kBlock;
      end_block_ = static_cast<int32_t>(slots_.end - 1 - split_) / kBlock + 1;
      order_ = {device_.chunks + chunks.first, chunks.keys, chunks.values,
                BlocksOf(device_.key_exact, item, slots_, split_),
                BlocksOf(device_.value_exact, item, slots_, split_)};
      ComputeSplit();
      merged_ = true;
    }
    Finish();
  }

 private:
  static constexpr int32_t kWarps =
      static_cast<int32_t>(kPrefillThreads / simt::kWarp);
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kStages = 3;
  static constexpr int32_t kPiece = 16;  // bytes
  static constexpr int32_t kMostPieces = 8;
  // Behind the pieces, a word of each slot.
  static constexpr int32_t kStageBytes =
      kMostPieces * kBlock * kPiece + kBlock * 4;
  // Pieces of 8 numbers that codes are made.
  static constexpr int32_t kTilePieces = 16;
  static constexpr int32_t kTileBytes = kTilePieces * kBlock * kPiece;
  // A row: scores, then its weights as float16 and, behind 260 words, in T.
  // Neither the columns of a sum nor the rows of an operand meet in a bank.
  static constexpr int32_t kScoreStride = 516;
  static constexpr int32_t kOwnWeights = 260;
  static constexpr int32_t kTableWords = kLevelTableWords;
  static_assert(kStages * kStageBytes + kSplit * 8 == kPromptFixedBytes);
  static_assert(kScoreStride * 4 + 4 * 4 == kPromptRowBytes);
  static_assert(kTileBytes == kPromptTileBytes);
  static_assert(kTableWords * 4 == kMmaTableBytes);
  // Of scores: a warp's tiles of 8 rows.
  static constexpr int32_t kWarpTiles = tiles / (kWarps / 4);

  using Cursor = PromptOrder::Cursor;
  KVASIR_DEVICE const LatentChunkOnDevice& ChunkOf(const Cursor& at) const {
    return order_.ChunkOf(at);
  }

  // q_, and the sums of their runs.
  KVASIR_DEVICE void FillQueries() {
    for (int32_t k = 0; k < chunks_.keys; ++k) {
      const LatentChunkOnDevice& chunk = device_.chunks[chunks_.first + k];
      const int32_t padded = (chunk.channels + 15) / 16 * 16;
      // A warp to a row; lanes take neighbouring channels.
      KVASIR_NO_UNROLL
      for (int32_t row = warp_; row < 8 * row_tiles_; row += kWarps) {
        const bool there = row < rows_;
        const uint16_t* const from = there ? QueryRow(chunk, row) : nullptr;
        KVASIR_NO_UNROLL
        for (int32_t c = lane_; c < padded; c += 32) {
          uint16_t bits = 0;
          if (there && c < chunk.channels) bits = simt::LoadGlobal(from + c);
          simt::StoreShared(q_ + row * q_stride_ + chunk.column +
                                PromptQueryAt(chunk.kind, c),
                            bits);
        }
        if (chunk.kind == ChunkKind::kNumbers || !chunk.starts_run) continue;
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

  // Where a slot of the split lies; page below 0: no row sees it.
  struct alignas(8) Place {
    int32_t page;
    int32_t slot;  // of it
  };
  KVASIR_DEVICE void FindPlaces() {
    const auto* const table =
        simt::BitsAs<const int32_t*>(item_.sequence->block_table);
    KVASIR_NO_UNROLL
    for (int32_t s = thread_; s < kSplit;
         s += static_cast<int32_t>(kPrefillThreads)) {
      const int64_t slot = split_ + s;
      Place place = {-1, 0};
      if (slot >= slots_.begin && slot < slots_.end) {
        const auto tokens = static_cast<uint32_t>(device_.page_tokens);
        const uint32_t index = static_cast<uint32_t>(slot) / tokens;
        place.page = simt::LoadGlobal(table + index);
        place.slot =
            static_cast<int32_t>(static_cast<uint32_t>(slot) - index * tokens);
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
    Cursor load = order_.BlockOfKeys(first_block_);
    Cursor use = load;
    int32_t stage = 0;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kStages - 1; ++i) LoadNext(&load, i);
    while (!order_.Done(use)) {
      simt::WaitCopies<kStages - 2>();
      // All have what came for the chunk; all have left the stage before, and
      // the tile of numbers.
      simt::SyncCta();
      LoadNext(&load, (stage + kStages - 1) % kStages);
      char* const from = stages_ + stage * kStageBytes;
      const bool of_keys = order_.OfKeys(use);
      if (of_keys) {
        use.part < 0 ? Score(use, from) : ScoreExact(use, from);
      } else {
        use.part < 0 ? Sum(use, from) : SumExact(use, from);
      }
      order_.Advance(&use);
      if (of_keys && !order_.OfKeys(use)) {
        simt::SyncCta();
        Weigh();
      }
      stage = (stage + 1) % kStages;
    }
  }

  // Asks for a chunk, if there is one left.
  KVASIR_DEVICE void LoadNext(Cursor* at, int32_t stage) {
    if (!order_.Done(*at)) {
      char* const to = stages_ + stage * kStageBytes;
      at->part < 0 ? Load(*at, to) : LoadExact(*at, to);
      order_.Advance(at);
    }
    simt::CommitCopies();
  }

  // [piece][64 slots][16 bytes], and a word of each slot. What no row reads is
  // 0, and so is the half of a last pair of pieces that is not there.
  KVASIR_DEVICE void Load(const Cursor& at, char* stage) const {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    const int32_t s = thread_ % kBlock;
    const Place place = simt::LoadShared(places_ + at.block * kBlock + s);
    const int32_t page = place.page;
    const bool reads = page >= 0 && ReadsLatent(order_.OfKeys(at), at.block,
                                                at.block * kBlock + s);
    const char* tile = nullptr;
    int32_t slot = place.slot;
    if (reads) {
      tile = chunk.arena + page * chunk.page_bytes;
      if (slot >= chunk.tile_slots) {
        tile += int64_t{slot / chunk.tile_slots} * chunk.tile_bytes;
        slot %= chunk.tile_slots;
      }
    }
    const int32_t pieces = (chunk.pieces + 1) / 2 * 2;
    KVASIR_NO_UNROLL
    for (int32_t p = thread_ / kBlock; p < pieces;
         p += static_cast<int32_t>(kPrefillThreads) / kBlock) {
      char* const to = stage + (p * kBlock + s) * kPiece;
      if (reads && p < chunk.pieces) {
        simt::CopyAsync<kPiece>(to, tile + chunk.codes_offset +
                                        slot * chunk.slot_stride +
                                        p * chunk.piece_stride);
      } else {
        simt::StoreShared(reinterpret_cast<simt::Vec16*>(to), simt::Vec16{});
      }
    }
    if (chunk.kind == ChunkKind::kNumbers || thread_ >= kBlock) return;
    char* const word = stage + kMostPieces * kBlock * kPiece + 4 * s;
    if (reads) {
      simt::CopyAsync<4>(
          word, tile + chunk.params_offset + slot * chunk.params_stride);
    } else {
      simt::StoreShared(reinterpret_cast<uint32_t*>(word), 0u);
    }
  }
  // Whether any row reads slot `s` of the split, which is seen, so.
  KVASIR_DEVICE bool ReadsLatent(bool of_keys, int32_t block, int32_t s) const {
    return !order_.HasExact(of_keys, block) ||
           ReadAsCodes(of_keys, item_.num_tokens - 1).Has(s);
  }
  // What a token reads through the codec, of the split.
  KVASIR_DEVICE CodecSlots ReadAsCodes(bool of_keys, int32_t token) const {
    return CodecSlotsOf(ExactOf(device_, of_keys), OwnSlot(item_, token),
                        split_);
  }

  // Pieces of a part, of exact rows.
  KVASIR_DEVICE static int32_t PartPieces(const LatentChunkOnDevice& chunk,
                                          int32_t part) {
    const int32_t left = chunk.channels / 8 - part * kMostPieces;
    return left < kMostPieces ? left : kMostPieces;
  }
  // As Load, in channel order.
  KVASIR_DEVICE void LoadExact(const Cursor& at, char* stage) const {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    const int32_t s = thread_ % kBlock;
    const int64_t slot = split_ + at.block * kBlock + s;
    const ExactSlots exact = ExactOf(device_, order_.OfKeys(at));
    const bool reads = slot >= slots_.begin && slot < slots_.end &&
                       exact.Has(OwnSlot(item_, 0), slot);
    const char* from = nullptr;
    if (reads) {
      from = RowAt(chunk, RowPlaceOf(exact, *item_.sequence, slot)) +
             at.part * kMostPieces * kPiece;
    }
    const int32_t there = PartPieces(chunk, at.part);
    const int32_t pieces = (there + 1) / 2 * 2;
    KVASIR_NO_UNROLL
    for (int32_t p = thread_ / kBlock; p < pieces;
         p += static_cast<int32_t>(kPrefillThreads) / kBlock) {
      char* const to = stage + (p * kBlock + s) * kPiece;
      if (reads && p < there) {
        simt::CopyAsync<kPiece>(to, from + p * kPiece);
      } else {
        simt::StoreShared(reinterpret_cast<simt::Vec16*>(to), simt::Vec16{});
      }
    }
  }

  KVASIR_DEVICE static uint32_t ParamsOf(const char* stage, int32_t slot) {
    return simt::LoadShared(reinterpret_cast<const uint32_t*>(
                                stage + kMostPieces * kBlock * kPiece) +
                            slot);
  }

  KVASIR_DEVICE const uint32_t* TableOf(
      const LatentChunkOnDevice& chunk) const {
    return tables_ + chunk.table * kTableWords;
  }

  KVASIR_DEVICE void Score(const Cursor& at, const char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (at.chunk == 0) Clear(&score_);
    if (chunk.kind == ChunkKind::kNumbers) {
      Multiply(stage, chunk.pieces, chunk.column, &score_);
    } else {
      if (chunk.starts_run) Clear(&run_);
      // Products of a piece, and pieces that the tile has room for.
      const int32_t products = chunk.kind == ChunkKind::kCodes8 ? 1 : 2;
      const int32_t room = kTilePieces / (2 * products);
      for (int32_t p = 0; p < chunk.pieces; p += room) {
        // All have left the tile.
        if (p > 0) simt::SyncCta();
        const int32_t left = chunk.pieces - p;
        const int32_t count = left < room ? left : room;
        MakeKeyNumbers<T>(chunk, TableOf(chunk), stage, p, count, tile_);
        simt::SyncCta();
        Multiply(tile_, 2 * products * count, chunk.column + 16 * products * p,
                 &run_);
      }
      if (chunk.ends_run) EndRun(chunk, stage);
    }
    if (at.chunk + 1 == chunks_.keys) StoreScores(at);
  }
  // Exact rows' take the place of those that the lane stored of the codec.
  KVASIR_DEVICE void ScoreExact(const Cursor& at, char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (at.chunk == 0 && at.part == 0) Clear(&score_);
    const int32_t pieces = PartPieces(chunk, at.part);
    if (chunk.kind != ChunkKind::kNumbers) {
      OrderExactKeys(chunk.kind, pieces, stage);
      simt::SyncCta();
    }
    Multiply(stage, pieces, chunk.column + at.part * kPromptPartChannels,
             &score_);
    if (at.chunk + 1 == chunks_.keys && order_.IsLastPart(at)) StoreScores(at);
  }
  KVASIR_DEVICE void StoreScores(const Cursor& at) const {
    const float scale = device_.scale * simt::kLog2E;
    KVASIR_UNROLL
    for (int32_t n = 0; n < kWarpTiles; ++n) {
      if (RowTile(n) >= row_tiles_) continue;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row = 8 * RowTile(n) + 2 * c_ + i % 2;
        const int32_t slot = at.block * kBlock + FirstSlot() + g_ + 8 * (i / 2);
        if (at.part >= 0 &&
            ReadAsCodes(/*of_keys=*/true, item_.TokenIn(row)).Has(slot)) {
          continue;
        }
        simt::StoreShared(scores_ + row * kScoreStride + slot,
                          score_.d[n][i] * scale);
      }
    }
  }
  // Of scores that are the warp's: slots of a block, tiles of rows.
  KVASIR_DEVICE int32_t FirstSlot() const { return warp_ % 4 * 16; }
  KVASIR_DEVICE int32_t RowTile(int32_t n) const {
    return warp_ / 4 * kWarpTiles + n;
  }

  struct Scores {
    float d[kWarpTiles][4];
  };
  static KVASIR_DEVICE void Clear(Scores* scores) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < kWarpTiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) scores->d[n][i] = 0.0f;
    }
  }

  // Adds the products of `pieces` of 8 numbers of the slots with queries from
  // `column` on.
  KVASIR_DEVICE void Multiply(const char* numbers, int32_t pieces,
                              int32_t column, Scores* to) const {
    // Lane 8m + r names row r of matrix m: slots 0 to 7, 8 to 15 of the lower
    // piece, then of the upper one; of queries channels 0 to 7, 8 to 15 of a
    // tile of rows, then of the next.
    const int32_t m = lane_ / 8;
    const char* const from =
        numbers +
        (m / 2 * kBlock + FirstSlot() + 8 * (m % 2) + lane_ % 8) * kPiece;
    const uint16_t* const queries =
        q_ + (8 * (RowTile(0) + m / 2) + lane_ % 8) * q_stride_ + column +
        8 * (m % 2);
    for (int32_t p = 0; p < pieces; p += 2) {
      uint32_t a[4];
      simt::LoadMatrices<4>(a, from + p * kBlock * kPiece);
      KVASIR_UNROLL
      for (int32_t n = 0; n < kWarpTiles; n += 2) {
        if (RowTile(n) >= row_tiles_) continue;
        uint32_t both[4];
        simt::LoadMatrices<4>(both, queries + 8 * n * q_stride_ + 8 * p);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const uint32_t b[2] = {both[2 * i], both[2 * i + 1]};
          Product<T>(to->d[n + i], a, b);
        }
      }
    }
  }

  // A run's scale and minimum.
  KVASIR_DEVICE void EndRun(const LatentChunkOnDevice& chunk,
                            const char* stage) {
    const int32_t slot = FirstSlot() + g_;
    const uint32_t params[2] = {ParamsOf(stage, slot),
                                ParamsOf(stage, slot + 8)};
    KVASIR_UNROLL
    for (int32_t n = 0; n < kWarpTiles; ++n) {
      if (RowTile(n) >= row_tiles_) continue;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        float& score = score_.d[n][i];
        score = simt::Fma(run_.d[n][i], LowHalf(params[i / 2]), score);
        if (chunk.kind == ChunkKind::kLevels4) continue;
        const int32_t row = 8 * RowTile(n) + 2 * c_ + i % 2;
        const float sum =
            simt::LoadShared(query_sums_ + chunk.run * kRows + row);
        score = simt::Fma(sum, HighHalf(params[i / 2]), score);
      }
    }
  }

  // Scores to weights of 16 bits, a warp to every eighth row. Weights of blocks
  // that no row sees are not looked at.
  KVASIR_DEVICE void Weigh() {
    KVASIR_NO_UNROLL
    for (int32_t row = warp_; row < rows_; row += kWarps) {
      const SlotRange visible =
          Both(slots_, RowSlots(device_, *item_.sequence, item_.TokenOf(row)));
      const auto begin = static_cast<int32_t>(visible.begin - split_);
      const auto end = static_cast<int32_t>(visible.end - split_);
      auto* const words =
          reinterpret_cast<uint32_t*>(scores_ + row * kScoreStride);
      // Pairs of neighbours.
      float weight[kSplit / 32];
      float max = visible.begin < visible.end ? kLeastMax : kNoSlot;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / kBlock; ++k) {
        if (k < first_block_ || k >= end_block_) continue;
        const auto both = simt::LoadShared(
            reinterpret_cast<const uint64_t*>(words) + 32 * k + lane_);
        KVASIR_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t slot = kBlock * k + 2 * lane_ + j;
          const bool sees = slot >= begin && slot < end;
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
        if (k / 2 < first_block_ || k / 2 >= end_block_) continue;
        weight[k] = weight[k] == kHidden ? 0.0f : simt::Exp2(weight[k] - max);
        sum += weight[k];
      }
      sum = simt::WarpSum(sum);
      // Those of exact rows' values have a sign; codes' are 0 there.
      if (order_.values.any_exact()) {
        const CodecSlots codec =
            ReadAsCodes(/*of_keys=*/false, item_.TokenIn(row));
        KVASIR_UNROLL
        for (int32_t k = 0; k < kSplit / 32; ++k) {
          const int32_t slot = k / 2 * kBlock + 2 * lane_ + k % 2;
          if (!codec.Has(slot)) weight[k] = -weight[k];
        }
      }
      // All lanes have read the scores that weights take the place of.
      simt::SyncWarp();
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / kBlock; ++k) {
        if (k < first_block_ || k >= end_block_) continue;
        uint32_t* const word = words + 32 * k + lane_;
        const uint32_t of_codes =
            simt::MakePair<F16>(weight[2 * k], weight[2 * k + 1]);
        simt::StoreShared(word, order_.values.any_exact()
                                    ? WeightsOf(/*as_exact=*/false, of_codes)
                                    : of_codes);
        simt::StoreShared(word + kOwnWeights,
                          simt::MakePair<T>(weight[2 * k], weight[2 * k + 1]));
      }
      if (lane_ == 0) {
        EndSoftmax(args_, item_, row, {max, sum}, merged_, factors_ + row,
                   kRows);
      }
    }
  }
  // How warps share a chunk of values: 16 channels by 1 to 8 of them, and as
  // many sets of rows as are left.
  struct Share {
    int32_t product;    // of 16 channels
    int32_t row_tile;   // the first
    int32_t row_tiles;  // none: nothing is left for the warp
  };
  KVASIR_DEVICE Share ShareOf(const LatentChunkOnDevice& chunk) const {
    const int32_t products = (chunk.channels + 15) / 16;
    const int32_t ways = products > 4   ? 8
                         : products > 2 ? 4
                         : products > 1 ? 2
                                        : 1;
    const int32_t each = ways * tiles < kWarps ? 1 : ways * tiles / kWarps;
    Share share = {warp_ % ways, warp_ / ways * each, 0};
    const int32_t left = row_tiles_ - share.row_tile;
    if (share.product < products && left > 0) {
      share.row_tiles = left < each ? left : each;
    }
    return share;
  }

  KVASIR_DEVICE void Sum(const Cursor& at, const char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (at.block == order_.values.codec_begin()) ClearSums();
    const Share share = ShareOf(chunk);
    if (chunk.kind == ChunkKind::kNumbers) {
      if (order_.values.HasExact(at.block)) {
        AddSome(/*as_exact=*/false, share, at.block, stage);
      } else {
        AddValues<T, /*any=*/true>(share, at.block, stage);
      }
    } else {
      MakeValueNumbers(chunk, TableOf(chunk), stage,
                       stage + kMostPieces * kBlock * kPiece, tile_);
      simt::SyncCta();
      AddValues<F16, /*any=*/false>(share, at.block, tile_);
    }
    if (at.block + 1 == order_.values.codec_end() &&
        !order_.values.any_exact()) {
      EndSum(chunk, share);
    }
  }
  // Behind the codec's blocks of the chunk.
  KVASIR_DEVICE void SumExact(const Cursor& at, char* stage) {
    const LatentChunkOnDevice& chunk = ChunkOf(at);
    if (!order_.values.any_codec() && at.part == 0 &&
        at.block == order_.values.ExactFrom(order_.values.first())) {
      ClearSums();
    }
    if (chunk.kind == ChunkKind::kCodes4 || chunk.kind == ChunkKind::kLevels4) {
      OrderExactValues(PartPieces(chunk, at.part), stage);
      simt::SyncCta();
    }
    const Share share = ShareOf(chunk);
    Share in_part = share;
    in_part.product -= at.part * kMostPieces / 2;
    if (in_part.product >= 0 && in_part.product < kMostPieces / 2) {
      AddSome(/*as_exact=*/true, in_part, at.block, stage);
    }
    if (order_.values.ExactFrom(at.block + 1) >= order_.values.end() &&
        order_.IsLastPart(at)) {
      EndSum(chunk, share);
    }
  }
  KVASIR_DEVICE void ClearSums() {
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) sum_[n][i] = 0.0f;
    }
  }

  // `any`: numbers may be infinite or NaN.
  template <typename Number, bool any>
  KVASIR_DEVICE void AddValues(const Share& share, int32_t block,
                               const char* numbers) {
    if (share.row_tiles == 0) return;
    const bool some =
        any && SeenBySome(device_, item_, split_ + block * kBlock);
    // Lane 8m + r names row r of matrix m: slots 0 to 7 of both pieces, then 8
    // to 15; of weights 8 slots of a tile of rows, four times.
    const int32_t m = lane_ / 8;
    const char* const from = numbers + ((2 * share.product + m % 2) * kBlock +
                                        8 * (m / 2) + lane_ % 8) *
                                           kPiece;
    const float* const weights =
        scores_ + (8 * share.row_tile + lane_ % 8) * kScoreStride +
        (any ? kOwnWeights : 0) + block * kBlock / 2 + 4 * m;
    KVASIR_UNROLL
    for (int32_t k = 0; k < kBlock / 16; k += 2) {
      uint32_t a[2][4];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        simt::LoadMatrices<4, /*transposed=*/true>(
            a[i], from + 16 * (k + i) * kPiece);
      }
      bool apart = false;
      if (some) apart = simt::Any(!(AreFinite<T>(a[0]) && AreFinite<T>(a[1])));
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n >= share.row_tiles) break;
        uint32_t both[4];
        simt::LoadMatrices<4>(both, weights + 8 * n * kScoreStride + 8 * k);
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          const uint32_t b[2] = {both[2 * i], both[2 * i + 1]};
          if (any && apart) {
            AddApart<T, /*mixed=*/false>(
                device_, item_, /*as_exact=*/false, 8 * (share.row_tile + n),
                split_, kBlock * block + 16 * (k + i), a[i], b, sum_[n]);
          } else {
            Product<Number>(sum_[n], a[i], b);
          }
        }
      }
    }
  }

  // Of a block that some rows or slots read otherwise: numbers of the codec, or
  // exact rows.
  KVASIR_DEVICE void AddSome(bool as_exact, const Share& share, int32_t block,
                             const char* numbers) {
    if (share.row_tiles == 0) return;
    const bool some = item_.num_tokens > 1;
    const int32_t m = lane_ / 8;
    const char* const from = numbers + ((2 * share.product + m % 2) * kBlock +
                                        8 * (m / 2) + lane_ % 8) *
                                           kPiece;
    const float* const weights =
        scores_ + (8 * share.row_tile + lane_ % 8) * kScoreStride +
        kOwnWeights + block * kBlock / 2 + 4 * (m % 2);
    KVASIR_NO_UNROLL
    for (int32_t k = 0; k < kBlock / 16; ++k) {
      uint32_t a[4];
      simt::LoadMatrices<4, /*transposed=*/true>(a, from + 16 * k * kPiece);
      const bool apart = some && simt::Any(!AreFinite<T>(a));
      KVASIR_UNROLL
      for (int32_t n = 0; n < tiles; ++n) {
        if (n >= share.row_tiles) break;
        uint32_t b[2];
        simt::LoadMatrices<2>(b, weights + 8 * n * kScoreStride + 8 * k);
        b[0] = WeightsOf(as_exact, b[0]);
        b[1] = WeightsOf(as_exact, b[1]);
        if (apart) {
          AddApart<T, /*mixed=*/true>(device_, item_, as_exact,
                                      8 * (share.row_tile + n), split_,
                                      kBlock * block + 16 * k, a, b, sum_[n]);
        } else {
          Product<T>(sum_[n], a, b);
        }
      }
    }
  }

  // The channel of a chunk that a lane's row of a product is, or the other one.
  KVASIR_DEVICE int32_t ChannelOf(const LatentChunkOnDevice& chunk,
                                  int32_t product, int32_t other) const {
    const bool codes4 =
        chunk.kind == ChunkKind::kCodes4 || chunk.kind == ChunkKind::kLevels4;
    return 16 * product + 8 * other + (codes4 ? g_ / 2 + 4 * (g_ % 2) : g_);
  }

  // Calls visit(tile of rows, index in the product, row, channel of the chunk)
  // for the sums of a chunk that are the lane's.
  template <typename Visit>
  KVASIR_DEVICE void ForSums(const LatentChunkOnDevice& chunk,
                             const Share& share, const Visit& visit) const {
    KVASIR_UNROLL
    for (int32_t n = 0; n < tiles; ++n) {
      if (n >= share.row_tiles) break;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t channel = ChannelOf(chunk, share.product, i / 2);
        const int32_t row = 8 * (share.row_tile + n) + 2 * c_ + i % 2;
        if (row < rows_ && channel < chunk.channels) visit(n, i, row, channel);
      }
    }
  }

  KVASIR_DEVICE void EndSum(const LatentChunkOnDevice& chunk,
                            const Share& share) {
    ForSums(chunk, share,
            [&](int32_t n, int32_t i, int32_t row, int32_t channel) {
              float* const total =
                  sums_ + row * sums_stride_ + chunk.column + channel;
              const MergeFactors factors = {
                  simt::LoadShared(factors_ + row),
                  simt::LoadShared(factors_ + kRows + row)};
              const float before = merged_ ? simt::LoadShared(total) : 0.0f;
              simt::StoreShared(total, MergeSum(factors, before, sum_[n][i]));
            });
  }

  // Each lane reads the sums that it wrote itself.
  KVASIR_DEVICE void Finish() {
    for (int32_t v = 0; v < chunks_.values; ++v) {
      const LatentChunkOnDevice& chunk =
          device_.chunks[chunks_.first + chunks_.keys + v];
      ForSums(chunk, ShareOf(chunk),
              [&](int32_t, int32_t, int32_t row, int32_t channel) {
                float number = 0.0f;
                if (merged_ &&
                    SeesSlots(simt::LoadShared(factors_ + 3 * kRows + row))) {
                  number =
                      simt::LoadShared(sums_ + row * sums_stride_ +
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

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  char* stages_;
  char* tile_;         // codes as numbers [16 pieces][64 slots][16 bytes]
  float* scores_;      // [rows][kScoreStride]
  uint16_t* q_;        // [rows][q_stride_]
  float* sums_;        // [rows][sums_stride_]
  Place* places_;      // [512]
  float* factors_;     // [4][rows]: EndSoftmax's
  float* query_sums_;  // [runs of keys][rows]
  uint32_t* tables_;   // [tables][kTableWords]
  int32_t q_stride_, sums_stride_;
  int32_t thread_, warp_, lane_;
  int32_t g_, c_;  // lane / 4, lane % 4

  Item item_;
  UnitChunks chunks_;
  int32_t rows_, row_tiles_;
  SlotRange slots_;  // of the split, that any row sees
  int64_t split_;    // its first slot
  int32_t first_block_, end_block_;
  PromptOrder order_;  // of the split
  Scores score_, run_;
  float sum_[tiles][4];
  bool merged_;  // a split of the item
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
