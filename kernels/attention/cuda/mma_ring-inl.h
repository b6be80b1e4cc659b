// Loads the latents for mma_attention-inl.h. Each warp has its own ring of
// stages in shared memory. It copies the latents that it will multiply into
// this ring ahead of time: first the keys of a split and then the values.
// C++17, device code.
//
// A chunk is a run of channels of a latent, in pieces of 16 bytes
// (LatentChunkOnDevice). A stage has one chunk as [piece][slot]: for keys, all
// pieces of 16 slots of a block; for values, the one or two pieces that the
// warp multiplies, of all 64 slots. For codes, one word per slot with its range
// follows. If a block is a whole tile of a page and all its slots are seen, as
// nearly always in a long context, a lane copies it with only one address.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kMmaThreads = kMmaWarps * simt::kWarp;

// Base class of MmaAttention. `exact` is true if keys or values have
// exact slots.
template <MmaKind kind, bool exact>
class MmaRing {
 protected:
  static constexpr int32_t kWarps = static_cast<int32_t>(kMmaWarps);
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kStages = static_cast<int32_t>(MmaStages(kind));
  static constexpr int32_t kPiece = 16;  // bytes
  // The number of slots of each block of keys that a warp loads.
  static constexpr int32_t kWarpSlots = kBlock / kWarps;
  static constexpr int32_t kParamBytes = static_cast<int32_t>(kMmaParamBytes);

  KVASIR_DEVICE explicit MmaRing(const AttentionKernelArgs& args)
      : args_(args),
        device_(args.device),
        thread_(static_cast<int32_t>(simt::Thread())),
        warp_(thread_ / static_cast<int32_t>(simt::kWarp)),
        lane_(static_cast<int32_t>(simt::Lane())) {}

  // Returns the kind of a chunk. It is a compile-time constant if this instance
  // of the class is for one kind only.
  static KVASIR_DEVICE ChunkKind KindOf(const LatentChunkOnDevice& chunk) {
    if constexpr (kind == MmaKind::kNumbers) return ChunkKind::kNumbers;
    if constexpr (kind == MmaKind::kCodes8) return ChunkKind::kCodes8;
    if constexpr (kind == MmaKind::kCodes4) return ChunkKind::kCodes4;
    if constexpr (kind == MmaKind::kLevels4) return ChunkKind::kLevels4;
    return chunk.kind;
  }
  static KVASIR_DEVICE bool HasNumbers(const LatentChunkOnDevice& chunk) {
    return KindOf(chunk) == ChunkKind::kNumbers;
  }
  KVASIR_DEVICE const LatentChunkOnDevice& ChunkOf(int32_t chunk) const {
    return device_.chunks[chunks_.first + chunk];
  }

  // Where a slot of the split is stored. If `page` is negative, no row sees
  // the slot.
  struct alignas(8) Place {
    int32_t page;
    uint16_t tile;  // index in the page
    uint16_t slot;  // index in the tile
  };
  static_assert(kMmaMostPlaces - 1 <= UINT16_MAX);
  KVASIR_DEVICE Place FindPlace(int32_t s) const {
    const auto* const table =
        simt::BitsAs<const int32_t*>(item_.sequence->block_table);
    const int64_t slot = split_ + s;
    Place place = {-1, 0, 0};
    if (slot >= slots_.begin && slot < slots_.end) {
      const int64_t index = Quotient(slot, device_.page_tokens);
      int64_t in_page = slot - index * device_.page_tokens;
      place.page = simt::LoadGlobal(table + index);
      if (in_page >= device_.tile_slots) {
        place.tile =
            static_cast<uint16_t>(Quotient(in_page, device_.tile_slots));
        in_page -= int64_t{place.tile} * device_.tile_slots;
      }
      place.slot = static_cast<uint16_t>(in_page);
    }
    return place;
  }

  // Fills places_ with the places of all slots of the split. If all blocks are
  // whole tiles, fills in only the place of each block's first slot. All
  // threads of the CTA must call it, because it has a barrier.
  KVASIR_DEVICE void FindPlaces() {
    constexpr auto kThreads = static_cast<int32_t>(kMmaThreads);
    // Reads the block table before the barrier, so that the latency of the read
    // overlaps with the wait.
    const bool whole = device_.in_blocks && first_whole_ == 0 &&
                       end_whole_ == kSplit / kBlock &&
                       !(exact && (keys_.any_exact() || values_.any_exact()));
    Place places[kSplit / kThreads] = {};
    if (whole) {
      if (thread_ < kSplit / kBlock) places[0] = FindPlace(thread_ * kBlock);
    } else {
      KVASIR_UNROLL
      for (int32_t i = 0; i < kSplit / kThreads; ++i) {
        places[i] = FindPlace(thread_ + kThreads * i);
      }
    }
    // After this barrier, no thread reads queries, places or weights of the
    // previous split any more.
    simt::SyncCta();
    if (whole) {
      if (thread_ < kSplit / kBlock) {
        simt::StoreShared(places_ + thread_ * kBlock, places[0]);
      }
    } else {
      KVASIR_UNROLL
      for (int32_t i = 0; i < kSplit / kThreads; ++i) {
        simt::StoreShared(places_ + thread_ + kThreads * i, places[i]);
      }
    }
  }

  // Finds which blocks of the split have visible slots, which have only visible
  // slots, and which are read as codes or as exact rows.
  KVASIR_DEVICE void FindBlocks() {
    first_block_ = static_cast<int32_t>(slots_.begin - split_) / kBlock;
    end_block_ = static_cast<int32_t>(slots_.end - 1 - split_) / kBlock + 1;
    first_whole_ =
        static_cast<int32_t>(slots_.begin - split_ + kBlock - 1) / kBlock;
    end_whole_ = static_cast<int32_t>(slots_.end - split_) / kBlock;
    if constexpr (exact) {
      keys_ = BlocksOf(device_.key_exact, item_, slots_, split_);
      values_ = BlocksOf(device_.value_exact, item_, slots_, split_);
    }
  }
  // A range of blocks of the split. KeyBlocks and ValueBlocks return the range
  // of blocks in which at least one row reads latents (not exact rows).
  struct Blocks {
    int32_t begin;
    int32_t end;
    KVASIR_DEVICE bool none() const { return exact && begin >= end; }
  };
  KVASIR_DEVICE Blocks KeyBlocks() const {
    if constexpr (exact) return {keys_.codec_begin(), keys_.codec_end()};
    return {first_block_, end_block_};
  }
  KVASIR_DEVICE Blocks ValueBlocks() const {
    if constexpr (exact) return {values_.codec_begin(), values_.codec_end()};
    return {first_block_, end_block_};
  }
  KVASIR_DEVICE void NextStage(char** stage) const {
    *stage += device_.warp_stage_bytes;
    if (*stage == ring_ + kStages * device_.warp_stage_bytes) *stage = ring_;
  }
  // Waits until all lanes can read the next stage and none uses the previous
  // stage any more. Then starts to load new data into the previous stage.
  KVASIR_DEVICE void Step() {
    simt::WaitCopies<kStages - 2>();
    simt::SyncWarp();
    LoadNext();
  }

  // Starts to copy the warp's share of the next chunk and block, if the split
  // has more. Keys come first, block by block with all chunks of a block. Then
  // come the values, chunk by chunk with all blocks of a chunk.
  KVASIR_DEVICE void LoadNext() {
    if (load_chunk_ < chunks_.keys) {
      LoadKeys(load_block_, to_);
      bool other = chunks_.keys > 1;
      if (++load_chunk_ == chunks_.keys) {
        if (++load_block_ < KeyBlocks().end) {
          load_chunk_ = 0;
        } else {
          BeginValues();
          other = load_chunk_ < chunks_.keys + chunks_.values;
        }
      }
      if (other) Look();
    } else if (load_chunk_ < chunks_.keys + chunks_.values) {
      LoadValues(load_block_, to_);
      if (++load_block_ == ValueBlocks().end) {
        load_block_ = ValueBlocks().begin;
        ++load_chunk_;
        if (load_chunk_ < chunks_.keys + chunks_.values) Look();
      }
    }
    NextStage(&to_);
    simt::CommitCopies();
  }
  KVASIR_DEVICE void BeginValues() {
    load_chunk_ = chunks_.keys + (ValueBlocks().none() ? chunks_.values : 0);
    load_block_ = ValueBlocks().begin;
  }

  // How the lane copies whole blocks of the chunk that is loaded next. Set
  // by Look.
  struct Loading {
    const char* codes;  // the lane's address in tile 0 of page 0
    int32_t params;  // offset from `codes` to the ranges that the lane copies
    int32_t page_bytes;
    int32_t tile_bytes;
    int32_t piece_stride;
    // The number of the chunk's pieces from the first one that the lane (for
    // keys) or the warp (for values) loads.
    int32_t pieces;
    bool in_blocks;
    bool has_params;
  };
  KVASIR_DEVICE void Look() {
    const LatentChunkOnDevice& chunk = ChunkOf(load_chunk_);
    const bool keys = load_chunk_ < chunks_.keys;
    const int32_t first = FirstPiece(chunk);
    const int32_t at =
        keys ? (kWarpSlots * warp_ + lane_ % kWarpSlots) * kPiece +
                   lane_ / kWarpSlots * chunk.piece_stride
             : first * chunk.piece_stride + lane_ * kPiece;
    loading_.codes = chunk.arena + chunk.codes_offset + at;
    loading_.params = chunk.params_offset - chunk.codes_offset - at +
                      (keys ? 4 * kWarpSlots * warp_ : 0) + lane_ * kPiece;
    loading_.page_bytes = static_cast<int32_t>(chunk.page_bytes);
    loading_.tile_bytes = chunk.tile_bytes;
    loading_.piece_stride = chunk.piece_stride;
    loading_.pieces =
        keys ? chunk.pieces - lane_ / kWarpSlots : chunk.pieces - first;
    loading_.in_blocks = chunk.in_blocks;
    loading_.has_params = !HasNumbers(chunk) && (!keys || chunk.ends_run);
  }
  // Returns the address of the lane's first piece if the block can be copied as
  // a whole, otherwise null. A block can be copied as a whole if its slots are
  // in one tile, at least one row sees each slot, and no row reads any of them
  // as an exact row.
  KVASIR_DEVICE const char* WholeBlock(int32_t block) const {
    if (!loading_.in_blocks || block < first_whole_ || block >= end_whole_ ||
        (exact && (load_chunk_ < chunks_.keys ? keys_.HasExact(block)
                                              : values_.HasExact(block)))) {
      return nullptr;
    }
    const Place place = simt::LoadShared(places_ + block * kBlock);
    return loading_.codes + int64_t{place.page} * loading_.page_bytes +
           int64_t{place.tile} * loading_.tile_bytes;
  }
  KVASIR_DEVICE char* StageParams(char* stage) const {
    return stage + device_.warp_stage_bytes - kParamBytes;
  }

  // Where a slot is stored in the chunk's arena.
  struct Address {
    const char* tile;
    int32_t slot;
    bool there;  // true if at least one row reads the slot's latent
  };
  KVASIR_DEVICE Address AddressOf(const LatentChunkOnDevice& chunk,
                                  int32_t s) const {
    const Place place = simt::LoadShared(places_ + s);
    // If all rows read the slot as an exact row, the cache may have no latent
    // of it.
    if (place.page < 0 ||
        (exact && !ReadAsCodes(load_chunk_ < chunks_.keys, item_.num_tokens - 1)
                       .Has(s))) {
      return {chunk.arena, 0, false};
    }
    return {chunk.arena + place.page * chunk.page_bytes +
                int64_t{place.tile} * chunk.tile_bytes,
            place.slot, true};
  }
  // Copies a piece of 16 bytes, or writes zeros if no row reads the slot.
  static KVASIR_DEVICE void CopyPiece(char* to, bool there, const char* from) {
    if (there) {
      simt::CopyAsync<kPiece>(to, from);
    } else {
      simt::StoreShared(reinterpret_cast<simt::Vec16*>(to), simt::Vec16{});
    }
  }
  KVASIR_DEVICE void CopyParams(const LatentChunkOnDevice& chunk,
                                const Address& address, char* stage,
                                int32_t s) const {
    char* const to = StageParams(stage) + 4 * s;
    if (address.there) {
      simt::CopyAsync<4>(to, address.tile + chunk.params_offset +
                                 address.slot * chunk.params_stride);
    } else {
      simt::StoreShared(reinterpret_cast<uint32_t*>(to), 0u);
    }
  }

  // Loads a chunk of keys as [piece][16 slots][16 bytes]. If it is the last
  // chunk of a run, also loads each slot's range (scale and minimum). An odd
  // number of pieces is padded with a piece of zeros.
  KVASIR_DEVICE void LoadKeys(int32_t block, char* stage) const {
    if (const char* const from = WholeBlock(block); from != nullptr) {
      // Two lanes copy each slot: one lane the even pieces, the other lane the
      // odd pieces.
      char* const to = stage + lane_ * kPiece;
      KVASIR_UNROLL
      for (int32_t i = 0; i < kMostKeyPieces / 2; ++i) {
        if (2 * i < loading_.pieces) {
          simt::CopyAsync<kPiece>(
              to + 32 * i * kPiece,
              from + int64_t{2 * i} * loading_.piece_stride);
        }
      }
      if (loading_.has_params && lane_ < kWarpSlots / 4) {
        simt::CopyAsync<kPiece>(StageParams(stage) + lane_ * kPiece,
                                from + loading_.params);
      }
      return;
    }
    const LatentChunkOnDevice& chunk = ChunkOf(load_chunk_);
    const int32_t s = lane_ % kWarpSlots;
    const Address address =
        AddressOf(chunk, block * kBlock + kWarpSlots * warp_ + s);
    const char* const from =
        address.tile + chunk.codes_offset + address.slot * chunk.slot_stride;
    const int32_t pieces = (chunk.pieces + 1) / 2 * 2;
    KVASIR_NO_UNROLL
    for (int32_t p = lane_ / kWarpSlots; p < pieces; p += 2) {
      CopyPiece(stage + (p * kWarpSlots + s) * kPiece,
                address.there && p < chunk.pieces,
                from + p * chunk.piece_stride);
    }
    if (loading_.has_params && lane_ < kWarpSlots) {
      CopyParams(chunk, address, stage, s);
    }
  }

  // Returns the index, in a chunk of values, of the first piece that this warp
  // loads and multiplies.
  KVASIR_DEVICE int32_t FirstPiece(const LatentChunkOnDevice& chunk) const {
    return HasNumbers(chunk) ? 2 * warp_ : warp_;
  }
  // Loads the warp's one or two pieces of a chunk of values as [piece][64
  // slots][16 bytes]. For codes, also loads each slot's range.
  KVASIR_DEVICE void LoadValues(int32_t block, char* stage) const {
    if (loading_.pieces <= 0) return;
    if (const char* const from = WholeBlock(block); from != nullptr) {
      char* const to = stage + lane_ * kPiece;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        simt::CopyAsync<kPiece>(to + 32 * i * kPiece, from + 32 * i * kPiece);
      }
      if (loading_.has_params) {
        if (lane_ < kBlock / 4) {
          simt::CopyAsync<kPiece>(StageParams(stage) + lane_ * kPiece,
                                  from + loading_.params);
        }
      } else {
        KVASIR_UNROLL
        for (int32_t i = 0; i < 2; ++i) {
          simt::CopyAsync<kPiece>(
              to + (kBlock + 32 * i) * kPiece,
              from + loading_.piece_stride + 32 * i * kPiece);
        }
      }
      return;
    }
    const LatentChunkOnDevice& chunk = ChunkOf(load_chunk_);
    const int32_t first = FirstPiece(chunk);
    KVASIR_NO_UNROLL
    for (int32_t s = lane_; s < kBlock; s += 32) {
      const Address address = AddressOf(chunk, block * kBlock + s);
      const char* const from = address.tile + chunk.codes_offset +
                               address.slot * chunk.slot_stride +
                               first * chunk.piece_stride;
      CopyPiece(stage + s * kPiece, address.there, from);
      if (HasNumbers(chunk)) {
        CopyPiece(stage + (kBlock + s) * kPiece,
                  address.there && first + 1 < chunk.pieces,
                  from + chunk.piece_stride);
      } else {
        CopyParams(chunk, address, stage, s);
      }
    }
  }
  KVASIR_DEVICE uint32_t* ParamsOf(char* stage) const {
    return reinterpret_cast<uint32_t*>(StageParams(stage));
  }

  // Returns the slots of the split that a token reads as codes.
  KVASIR_DEVICE CodecSlots ReadAsCodes(bool of_keys, int32_t token) const {
    return CodecSlotsOf(ExactOf(device_, of_keys), OwnSlot(item_, token),
                        split_);
  }
  // Returns the place (RowPlaceOf) of the exact row of slot `s` of the split,
  // or kNoExactRow if no row reads the slot as an exact row.
  KVASIR_DEVICE int64_t ExactPlace(bool of_keys, int32_t s) const {
    const int64_t slot = split_ + s;
    const ExactSlots slots = ExactOf(device_, of_keys);
    if (slot < slots_.begin || slot >= slots_.end ||
        !slots.Has(OwnSlot(item_, 0), slot)) {
      return kNoExactRow;
    }
    return RowPlaceOf(slots, *item_.sequence, slot);
  }

  // Returns a 32-bit word of a piece of keys: word lane % 4 of the piece for
  // slot lane / 4 + further.
  KVASIR_DEVICE uint32_t WordOf(const char* stage, int32_t piece,
                                int32_t further) const {
    return simt::LoadShared(reinterpret_cast<const uint32_t*>(
        stage + (piece * kWarpSlots + lane_ / 4 + further) * kPiece +
        4 * (lane_ % 4)));
  }
  // BoundParams rearranges the ranges of a stage in place, so that the scales
  // of two neighbouring slots are in one word (PairParams), and their minima in
  // another. It also limits the scales so that no decoded value is infinite,
  // because weight 0 times an infinite value is not 0.
  struct alignas(8) PairParams {
    uint32_t scale;
    uint32_t minimum;
  };
  KVASIR_DEVICE void BoundParams(const LatentChunkOnDevice& chunk,
                                 char* stage) const {
    auto* const words = reinterpret_cast<PairParams*>(ParamsOf(stage)) + lane_;
    const PairParams slots = simt::LoadShared(words);
    PairParams pair;
    pair.minimum = simt::PickBytes(slots.scale, slots.minimum, 0x7632u);
    const uint32_t most =
        KindOf(chunk) == ChunkKind::kLevels4
            ? chunk.most_scale
            : simt::FmaPair(F16{}, pair.minimum, chunk.less_scale,
                            chunk.most_scale);
    pair.scale = simt::MinPair(
        simt::PickBytes(slots.scale, slots.minimum, 0x5410u), most);
    simt::StoreShared(words, pair);
    simt::SyncWarp();
  }
  // Returns the scales and minima of slots 8i + 2c and 8i + 2c + 1 of a block,
  // with c = lane % 4.
  KVASIR_DEVICE PairParams ParamsAt(char* stage, int32_t i) const {
    return simt::LoadShared(
        reinterpret_cast<const PairParams*>(ParamsOf(stage)) + 4 * i +
        lane_ % 4);
  }
  // Loads the codes of values of 32 slots, from slot 32k of the block on.
  // words[i] gets 2 bytes of the (8i + 2c)-th of these slots and 2 bytes of the
  // next slot, with c = lane % 4.
  KVASIR_DEVICE void LoadCodes(const char* stage, int32_t k,
                               uint32_t (&words)[4]) const {
    simt::LoadMatrices<4, /*transposed=*/true>(
        words, stage + (32 * k + lane_) * kPiece);
  }

  // Returns the channel of the chunk to which the lane's sums in sum_[t]
  // belong. A product gives a lane the sums of two channels; `other` selects
  // the first (0) or the second (1).
  KVASIR_DEVICE int32_t ChannelOf(ChunkKind what, int32_t t,
                                  int32_t other) const {
    const int32_t g = lane_ / 4;
    switch (what) {
      case ChunkKind::kNumbers:
        return 16 * warp_ + g + 8 * other;
      case ChunkKind::kCodes8:
        return 16 * warp_ + 2 * g + other;
      default:
        return 32 * warp_ + 4 * g + t + 2 * other;
    }
  }

  // Writes an empty partial result, for an item that sees no slot of the split.
  KVASIR_DEVICE void ClearPartial() {
    const auto floats = static_cast<int32_t>(device_.partial_floats());
    for (int32_t i = thread_; i < item_.rows() * floats;
         i += static_cast<int32_t>(kMmaThreads)) {
      const int32_t at = i % floats;
      simt::StoreGlobal(PartialRow(args_, item_, i / floats) + at,
                        at == device_.out_width ? kNoSlot : 0.0f);
    }
  }

  // Starts to load the first stages of a split. Must be called after FindPlaces
  // and a barrier.
  KVASIR_DEVICE void BeginLoads() {
    load_chunk_ = 0;
    load_block_ = KeyBlocks().begin;
    if (KeyBlocks().none()) BeginValues();
    if (load_chunk_ < chunks_.keys + chunks_.values) Look();
    to_ = ring_;
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < kStages - 1; ++i) LoadNext();
  }

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  char* ring_;     // [kStages][warp_stage_bytes]: the warp's stages
  Place* places_;  // [512]
  const int32_t thread_, warp_, lane_;

  Item item_;
  UnitChunks chunks_;
  SlotRange slots_;  // slots of the split that at least one row sees
  int64_t split_;    // first slot of the split
  int32_t first_block_, end_block_;
  // The range of blocks of which every slot is seen by at least one row.
  int32_t first_whole_, end_whole_;
  SideBlocks keys_, values_;         // only if `exact`
  int32_t load_chunk_, load_block_;  // the chunk and block that are loaded next
  Loading loading_;
  char* to_;  // the stage to be loaded next
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
