// Loads the queries and latents of an item for prefill_attention-inl.h. Queries
// are staged in shared memory. Latents are copied chunk by chunk, in the order
// of prefill_order.h, into stages that all warps read. C++17, device code.
//
// The sums take most registers. To save registers, addresses in shared memory
// are computed again for each use, and only a few values about the next load
// are kept.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/prefill_operands.h"
#include "kernels/attention/cuda/prefill_order.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kPrefillThreads = 128;

// Base class of PrefillAttention. A warp has `tiles` tiles of 16 rows.
template <typename T, int32_t tiles>
class PrefillLoads {
 protected:
  static constexpr int32_t kRows = 64 * tiles;
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kStages = 3;
  static constexpr int32_t kPiece = 16;  // bytes
  static constexpr int32_t kMostPieces = 8;
  // bytes of one piece for all slots of a block
  static constexpr int32_t kPieceBytes = kBlock * kPiece;
  // A stage holds up to 8 pieces of each slot, then one word for each slot (its
  // range).
  static constexpr int32_t kStageBytes = kMostPieces * kPieceBytes + kBlock * 4;
  // the number of pieces in the tile; a piece has 8 decoded numbers
  static constexpr int32_t kTilePieces = 16;
  static constexpr int32_t kTileBytes = kTilePieces * kPieceBytes;
  static constexpr int32_t kTableWords = kLevelTableWords;
  static_assert(kStages * kStageBytes + kMmaNextBytes == kPromptFixedBytes);
  static_assert(kTileBytes == kPromptTileBytes);
  static_assert(kTableWords * 4 == kMmaTableBytes);
  // The number of rows that a lane has: rows g and g + 8 of each tile, with g =
  // lane / 4.
  static constexpr int32_t kLaneRows = 2 * tiles;

  KVASIR_DEVICE explicit PrefillLoads(const AttentionKernelArgs& args)
      : args_(args), device_(args.device) {
    FillLevelTables<T>(device_, Tables());
  }

  // Two words of shared memory, which the kernel uses alternately. One thread
  // stores the index of the CTA's next item there for all threads.
  KVASIR_DEVICE uint32_t* next_item() const {
    return reinterpret_cast<uint32_t*>(StageAt(kStages));
  }

  // Begins an item: stages its queries and starts its first loads. All threads
  // of the CTA must call it, because it has barriers.
  KVASIR_DEVICE void Begin(const Item& item, const UnitChunks& chunks) {
    item_ = item;
    chunks_ = chunks;
    FindOrder();
    load_ = order_.First(device_);
    const bool sees = !order_.Done(load_);
    for (int32_t k = 0; sees && k < chunks_.keys; ++k) StageQueries(ChunkOf(k));
    // After this barrier, no thread uses the stages and query sums of the
    // previous item any more.
    simt::SyncCta();
    if (sees) {
      for (int32_t k = 0; k < chunks_.keys; ++k) SumQueries(k);
      BeginLoads();
    }
  }

  // ---- shared memory

  KVASIR_DEVICE static char* StageAt(int32_t stage) {
    return simt::Shared() + stage * kStageBytes;
  }
  // Returns the tile that holds decoded numbers, [16 pieces][64
  // slots][16 bytes].
  KVASIR_DEVICE static char* Tile() {
    return simt::Shared() + kPromptFixedBytes;
  }
  KVASIR_DEVICE int32_t QueryStride() const {
    return static_cast<int32_t>(PromptQueryStride(device_));
  }
  // Returns the staged queries, [rows][QueryStride()].
  KVASIR_DEVICE uint16_t* Queries() const {
    return reinterpret_cast<uint16_t*>(Tile() +
                                       (device_.has_codes ? kTileBytes : 0));
  }
  // Returns the sums of queries, [runs of keys][rows].
  KVASIR_DEVICE float* QuerySums() const {
    return reinterpret_cast<float*>(Queries() + kRows * QueryStride());
  }
  // Returns the tables of levels, [tables][kTableWords].
  KVASIR_DEVICE uint32_t* Tables() const {
    return reinterpret_cast<uint32_t*>(QuerySums() +
                                       device_.most_key_runs * kRows);
  }
  KVASIR_DEVICE static int32_t Thread() {
    return static_cast<int32_t>(simt::Thread());
  }
  KVASIR_DEVICE static int32_t Lane() {
    return static_cast<int32_t>(simt::Lane());
  }

  // ---- rows

  KVASIR_DEVICE int32_t FirstRow() const {
    return static_cast<int32_t>(simt::Warp()) * 16 * tiles;
  }
  // Returns the index in the item of the lane's r-th row.
  KVASIR_DEVICE int32_t RowOf(int32_t r) const {
    return FirstRow() + 16 * (r / 2) + 8 * (r % 2) + Lane() / 4;
  }
  // Returns how the item's tokens read keys (if `of_keys`) or values.
  KVASIR_DEVICE SideReads SideOf(bool of_keys) const {
    return ReadsOf(ExactOf(device_, of_keys), order_.own);
  }
  // Returns the slots from the first one that `begin_token` sees to the last
  // one that `end_token` sees. For the tokens from `first` to `last`,
  // SeenBy(first, last) has the slots that at least one token sees.
  // SeenBy(last, first) has the slots that every token sees.
  KVASIR_DEVICE Slots SeenBy(int32_t begin_token, int32_t end_token) const {
    const int64_t begin =
        RowSlots(device_, *item_.sequence, item_.first_token + begin_token)
            .begin;
    const int64_t end =
        RowSlots(device_, *item_.sequence, item_.first_token + end_token).end;
    return {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
  }

  KVASIR_DEVICE void FindOrder() {
    const int32_t last = item_.num_tokens - 1;
    order_.seen = SeenBy(0, last);
    const auto own = static_cast<int32_t>(OwnSlot(item_, 0));
    order_.own = {own, own + last + 1};
    seen_by_all_ = SeenBy(last, 0);
    warp_seen_ = {0, 0};
    if (FirstRow() < item_.rows()) {
      const int32_t end = FirstRow() + 16 * tiles;
      const int32_t end_row = end < item_.rows() ? end : item_.rows();
      warp_seen_ =
          SeenBy(item_.TokenIn(FirstRow()), item_.TokenIn(end_row - 1));
    }
  }
  // Computes masked_ and idle_ for the current visit (prefill_order.h).
  KVASIR_DEVICE void Look() {
    const int32_t begin = visit_.block() * kBlock;
    // Subtracts `begin` instead of adding kBlock to it, because the end of the
    // last block may exceed the range of an int32_t.
    masked_ = begin < seen_by_all_.begin || seen_by_all_.end - begin < kBlock;
    if (device_.has_exact && !masked_) {
      const Slots slots = {begin, begin + kBlock};
      masked_ = SideOf(true).Has(!visit_.keys_exact(), slots) ||
                SideOf(false).Has(!visit_.values_exact(), slots);
    }
    idle_ = begin >= warp_seen_.end || warp_seen_.begin - begin >= kBlock;
  }
  // The slots of the visit's block that one row sees, and which of their keys
  // and values it reads as latents. Slots are counted from the block's start.
  struct RowReads {
    Slots seen;
    Slots keys, values;  // slots read as latents, not exact rows

    KVASIR_DEVICE bool Has(const Visit& visit, int32_t s) const {
      return s >= seen.begin && s < seen.end &&
             (s >= keys.begin && s < keys.end) != visit.keys_exact() &&
             (s >= values.begin && s < values.end) != visit.values_exact();
    }
  };
  KVASIR_DEVICE RowReads ReadsOfRow(int32_t row) const {
    const int32_t first = visit_.block() * kBlock;
    if (row >= item_.rows()) return {{0, 0}, {0, 0}, {0, 0}};
    const int32_t token = item_.TokenIn(row);
    const int32_t own = order_.own.begin + token;
    const Slots seen = SeenBy(token, token);
    const auto codec = [&](const ExactSlots& exact) {
      const SideReads reads = ReadsOf(exact, {own, own + 1});
      return Slots{reads.sinks - first,
                   exact.window > 0 ? reads.codec_end - first : kBlock};
    };
    return {{seen.begin - first, seen.end - first},
            codec(device_.key_exact),
            codec(device_.value_exact)};
  }

  // ---- queries

  // Stages the queries of the warp's rows for a chunk of keys, in pieces of 16
  // bytes. A lane copies every fourth piece of every eighth row, which avoids
  // bank conflicts. It loads several pieces before it stores them, to hide the
  // latency.
  KVASIR_DEVICE void StageQueries(const LatentChunkOnDevice& chunk) {
    const int32_t pieces = (chunk.channels + 15) / 16 * 2;
    const int32_t first_row = FirstRow() + Lane() % 8;
    const uint16_t* from[kLaneRows];
    KVASIR_UNROLL
    for (int32_t r = 0; r < kLaneRows; ++r) {
      const int32_t row = first_row + 8 * r;
      from[r] = nullptr;
      if (row >= item_.rows()) continue;
      from[r] =
          static_cast<const uint16_t*>(args_.q) +
          RowStart(args_, item_, row, chunk.head_column, device_.q_row_stride) +
          chunk.channel;
    }
    KVASIR_NO_UNROLL
    for (int32_t first = Lane() / 8; first < pieces; first += 8) {
      simt::Vec16 words[2][kLaneRows];
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t channel = 8 * (first + 4 * i);
        KVASIR_UNROLL
        for (int32_t r = 0; r < kLaneRows; ++r) {
          words[i][r] = {};
          if (from[r] == nullptr || channel >= chunk.channels) continue;
          words[i][r] = simt::LoadGlobal(
              reinterpret_cast<const simt::Vec16*>(from[r] + channel));
        }
      }
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t piece = first + 4 * i;
        if (piece >= pieces) continue;
        KVASIR_UNROLL
        for (int32_t r = 0; r < kLaneRows; ++r) {
          StoreQueries(
              chunk.kind, words[i][r], piece,
              Queries() + (first_row + 8 * r) * QueryStride() + chunk.column);
        }
      }
    }
  }
  // Computes the sums of queries over the channels of a run of keys. Each
  // thread computes the sum of one row.
  KVASIR_DEVICE void SumQueries(int32_t k) {
    const LatentChunkOnDevice& first = ChunkOf(k);
    if (first.kind == ChunkKind::kNumbers ||
        first.kind == ChunkKind::kLevels4 || !first.starts_run ||
        Thread() >= kRows) {
      return;
    }
    float sum = 0.0f;
    for (bool ends = false; !ends; ++k) {
      const LatentChunkOnDevice& chunk = ChunkOf(k);
      const uint16_t* const from =
          Queries() + Thread() * QueryStride() + chunk.column;
      KVASIR_NO_UNROLL
      for (int32_t c = 0; c < chunk.channels; c += 8) {
        const auto words =
            simt::LoadShared(reinterpret_cast<const simt::Vec16*>(from + c));
        KVASIR_UNROLL
        for (int32_t i = 0; i < 8; ++i) {
          sum += simt::ToFloat(simt::BitsAs<T>(
              static_cast<uint16_t>(words.word[i / 2] >> (16 * (i % 2)))));
        }
      }
      ends = chunk.ends_run;
    }
    simt::StoreShared(QuerySums() + first.run * kRows + Thread(), sum);
  }

  // ---- latents

  KVASIR_DEVICE const LatentChunkOnDevice& ChunkOf(int32_t chunk) const {
    return device_.chunks[chunks_.first + chunk];
  }
  // Each thread copies slot Thread() % 64 of a block. Returns the page of this
  // slot, or a negative number if no row sees the slot.
  KVASIR_DEVICE int32_t PageOf(int32_t block) const {
    constexpr auto kSlots = static_cast<uint32_t>(kBlock);
    // `block` may be after the last possible block. Then `slot` overflows to a
    // negative number.
    const auto slot = static_cast<int32_t>(
        static_cast<uint32_t>(block) * kSlots + simt::Thread() % kSlots);
    if (slot < order_.seen.begin || slot >= order_.seen.end) return -1;
    return simt::LoadGlobal(
        simt::BitsAs<const int32_t*>(item_.sequence->block_table) +
        Quotient(slot, device_.page_tokens));
  }
  // Starts the first loads of an item. The page of a slot is read from the
  // block table one block before the slot is loaded.
  KVASIR_DEVICE void BeginLoads() {
    load_at_ = {0, 0};
    stage_ = 0;
    page_ = PageOf(load_.block());
    next_page_ = PageOf(load_.block() + 1);
    FindSlot();
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < kStages - 1; ++i) LoadNext(i);
  }
  // Sets place_ to the index of the next slot's tile in its page and of the
  // slot in the tile. Both fit into 16 bits, because pages have at most
  // kMmaMostPlaces tiles, and tiles at most kMmaMostPlaces slots.
  KVASIR_DEVICE void FindSlot() {
    const int32_t slot = load_.block() * kBlock + Thread() % kBlock;
    const uint32_t in_page = Remainder(slot, device_.page_tokens);
    const uint32_t tile = Quotient(in_page, device_.tile_slots);
    const auto slots = static_cast<uint32_t>(device_.tile_slots);
    place_ = tile << 16 | (in_page - tile * slots);
  }
  // Starts the copies of the next chunk, if there is one.
  KVASIR_DEVICE void LoadNext(int32_t stage) {
    if (!order_.Done(load_)) {
      const bool of_keys = load_at_.chunk < chunks_.keys;
      const bool exact = of_keys ? load_.keys_exact() : load_.values_exact();
      const LatentChunkOnDevice& chunk = ChunkOf(load_at_.chunk);
      char* const to = StageAt(stage);
      exact ? LoadExact(chunk, of_keys, to) : LoadLatents(chunk, of_keys, to);
      load_at_.Next(exact, chunk);
      if (load_at_.chunk == chunks_.keys + chunks_.values) NextVisit();
    }
    simt::CommitCopies();
  }
  KVASIR_DEVICE void NextVisit() {
    load_at_.chunk = 0;
    const int32_t block = load_.block();
    load_ = order_.Next(device_, load_);
    if (order_.Done(load_) || load_.block() == block) return;
    page_ = next_page_;  // blocks are visited in order, without gaps
    next_page_ = PageOf(load_.block() + 1);
    FindSlot();
  }
  // Loads a chunk of latents as [piece][64 slots][16 bytes]. For codes, also
  // loads each slot's range. Slots that no row reads get zeros. An odd number
  // of pieces is padded with a piece of zeros.
  KVASIR_DEVICE void LoadLatents(const LatentChunkOnDevice& chunk, bool of_keys,
                                 char* stage) const {
    const int32_t s = Thread() % kBlock;
    bool reads = page_ >= 0;
    if (device_.has_exact) {
      // If all rows read the slot as an exact row, the cache may have no latent
      // of it.
      const SideReads side = SideOf(of_keys);
      const int32_t slot = load_.block() * kBlock + s;
      reads = reads && slot >= side.sinks && slot < side.codec_end;
    }
    const auto tile_slot = static_cast<int32_t>(place_ & 0xffffu);
    const char* const tile = chunk.arena + page_ * chunk.page_bytes +
                             int64_t{place_ >> 16} * chunk.tile_bytes;
    CopyPieces(reads, chunk.pieces,
               tile + chunk.codes_offset + tile_slot * chunk.slot_stride,
               chunk.piece_stride, stage);
    if (chunk.kind == ChunkKind::kNumbers || Thread() >= kBlock) return;
    char* const word = stage + kMostPieces * kPieceBytes + 4 * s;
    if (reads) {
      simt::CopyAsync<4>(
          word, tile + chunk.params_offset + tile_slot * chunk.params_stride);
    } else {
      simt::StoreShared(reinterpret_cast<uint32_t*>(word), 0u);
    }
  }
  // Loads one part (kPromptPartChannels) of the chunk's channels, in channel
  // order, from the exact rows of the block.
  KVASIR_DEVICE void LoadExact(const LatentChunkOnDevice& chunk, bool of_keys,
                               char* stage) const {
    const int32_t slot = load_.block() * kBlock + Thread() % kBlock;
    const SideReads side = SideOf(of_keys);
    const bool reads =
        page_ >= 0 && (slot < side.sinks || slot >= side.exact_from);
    const char* from = nullptr;
    if (reads) {
      from = RowAt(chunk, RowPlaceOf(ExactOf(device_, of_keys), *item_.sequence,
                                     slot)) +
             load_at_.part * kMostPieces * kPiece;
    }
    CopyPieces(reads, PartPieces(chunk, load_at_.part), from, kPiece, stage);
  }
  KVASIR_DEVICE void CopyPieces(bool reads, int32_t pieces, const char* from,
                                int32_t stride, char* stage) const {
    constexpr auto kStep = static_cast<int32_t>(kPrefillThreads) / kBlock;
    char* const to = stage + Thread() % kBlock * kPiece;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kMostPieces / kStep; ++i) {
      const int32_t p = Thread() / kBlock + kStep * i;
      if (reads && p < pieces) {
        simt::CopyAsync<kPiece>(to + p * kPieceBytes,
                                from + int64_t{p} * stride);
      } else if (p < (pieces + 1) / 2 * 2) {
        simt::StoreShared(reinterpret_cast<simt::Vec16*>(to + p * kPieceBytes),
                          simt::Vec16{});
      }
    }
  }
  // Identifies the content of one stage: a chunk of latents, or a part of a
  // chunk's exact rows.
  struct Part {
    int32_t chunk;
    int32_t part;

    KVASIR_DEVICE void Next(bool exact, const LatentChunkOnDevice& loaded) {
      ++part;
      if (exact && part < PartsOf(loaded)) return;
      part = 0;
      ++chunk;
    }
  };
  // Returns the number of pieces of 8 numbers in a part.
  KVASIR_DEVICE static int32_t PartPieces(const LatentChunkOnDevice& chunk,
                                          int32_t part) {
    const int32_t left = chunk.channels / 8 - part * kMostPieces;
    return left < kMostPieces ? left : kMostPieces;
  }
  // Waits for the next chunk and returns its stage. After the barrier, no
  // thread uses the tile of decoded numbers or the previous stage any more. So
  // the next load into the previous stage is started.
  KVASIR_DEVICE char* Step() {
    simt::WaitCopies<kStages - 2>();
    simt::SyncCta();
    char* const stage = StageAt(stage_);
    LoadNext(stage_ == 0 ? kStages - 1 : stage_ - 1);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return stage;
  }
  KVASIR_DEVICE static const uint32_t* ParamsOf(const char* stage) {
    return reinterpret_cast<const uint32_t*>(stage + kMostPieces * kPieceBytes);
  }
  KVASIR_DEVICE const uint32_t* TableOf(
      const LatentChunkOnDevice& chunk) const {
    return Tables() + chunk.table * kTableWords;
  }

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;

  Item item_;
  UnitChunks chunks_;
  PromptOrder order_;
  Slots seen_by_all_;  // slots that every row of the item sees
  Slots warp_seen_;    // slots that at least one row of the warp sees
  Visit visit_;
  // False if, in this visit, every row reads every slot of the block.
  bool masked_;
  bool idle_;  // true if no row of the warp sees a slot of the block
  int32_t stage_;
  // The visit and the part of it that are loaded next.
  Visit load_;
  Part load_at_;
  // The pages of this thread's slot in the block that is loaded next and in the
  // block after it. Negative if no row sees the slot.
  int32_t page_, next_page_;
  // The place of this thread's slot in page_. Upper half: index of the tile in
  // the page. Lower half: index of the slot in the tile.
  uint32_t place_;
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
