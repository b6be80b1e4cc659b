// Loads the latents for mma_attention-inl.h. Each warp has its own ring of
// stages in shared memory. It copies the latents that it will multiply into
// this ring ahead of time: first the keys of a split and then the values.
// C++17, device code.
//
// A chunk is a run of channels of a latent, in pieces of 16 bytes
// (LatentChunkOnDevice). A stage has one chunk as [piece][slot]: for keys, all
// pieces of 16 slots of a block; for values, the one or two pieces that the
// warp multiplies, of all 64 slots. The ranges of codes, one word per slot, are
// loaded for the whole split. If a block is a whole tile of a page and all its
// slots are seen, as nearly always in a long context, a lane copies it with
// only one address.
#pragma once

#include <type_traits>

#include "kernels/attention/cuda/attention_exact.h"
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_operands.h"
#include "kernels/attention/cuda/mma_planes.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kMmaThreads = kMmaWarps * simt::kWarp;

// Base class of MmaAttention. Items have at most `tiles` tiles of 8 rows.
// `exact` is true if keys or values have exact slots.
template <int32_t tiles, MmaKind kind, bool exact>
class MmaRing {
 protected:
  static constexpr int32_t kWarps = static_cast<int32_t>(kMmaWarps);
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kStages = static_cast<int32_t>(MmaStages(kind));
  static constexpr int32_t kPiece = 16;  // bytes
  // True if chunks may have a high plane.
  static constexpr bool kHasPlanes =
      kind == MmaKind::kAny || kind == MmaKind::kLevels3;
  // The number of slots of each block of keys that a warp loads.
  static constexpr int32_t kWarpSlots = kBlock / kWarps;

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
    if constexpr (kind == MmaKind::kLevels3) return ChunkKind::kLevels3;
    return chunk.kind;
  }
  static KVASIR_DEVICE bool HasNumbers(const LatentChunkOnDevice& chunk) {
    return KindOf(chunk) == ChunkKind::kNumbers;
  }
  static KVASIR_DEVICE bool HasStaticRanges(const LatentChunkOnDevice& chunk) {
    return kind == MmaKind::kAny && chunk.channel_scales != nullptr;
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
  // The places of the split's slots [512], at the start of shared memory.
  static KVASIR_DEVICE Place* Places() {
    return reinterpret_cast<Place*>(simt::Shared());
  }
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

  // Fills Places() with the places of all slots of the split. If all blocks are
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
        simt::StoreShared(Places() + thread_ * kBlock, places[0]);
      }
    } else {
      KVASIR_UNROLL
      for (int32_t i = 0; i < kSplit / kThreads; ++i) {
        simt::StoreShared(Places() + thread_ + kThreads * i, places[i]);
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
    KVASIR_DEVICE bool Has(int32_t block) const {
      return block >= begin && block < end;
    }
  };
  KVASIR_DEVICE Blocks KeyBlocks() const {
    if constexpr (exact) return {keys_.codec_begin(), keys_.codec_end()};
    return {first_block_, end_block_};
  }
  KVASIR_DEVICE Blocks ValueBlocks() const {
    if constexpr (exact) return {values_.codec_begin(), values_.codec_end()};
    return {first_block_, end_block_};
  }
  // The blocks of a split that can be copied as a whole, if the chunk's
  // `in_blocks` is true: their slots are in one tile, at least one row sees
  // each slot, and no row reads any of them as an exact row.
  KVASIR_DEVICE Blocks WholeBlocks(bool of_keys) const {
    if constexpr (!exact) return {first_whole_, end_whole_};
    // The instance for 8 rows and any kind copies the blocks of a side: with a
    // reference, nvcc 13.0 keeps its whole object in local memory. In the other
    // instances, a copy would take more registers.
    using Side = std::conditional_t<tiles == 1 && kind == MmaKind::kAny,
                                    const SideBlocks, const SideBlocks&>;
    Side side = of_keys ? keys_ : values_;
    return {
        side.sinks_end() > first_whole_ ? side.sinks_end() : first_whole_,
        side.window_begin() < end_whole_ ? side.window_begin() : end_whole_};
  }
  // Goes on to the next stage. The previous one is the next to be loaded.
  KVASIR_DEVICE void NextStage() {
    to_ = stage_;
    stage_ += device_.warp_stage_bytes;
    if (stage_ == ring_ + kStages * device_.warp_stage_bytes) stage_ = ring_;
  }
  KVASIR_DEVICE const char* Stage() const { return simt::Shared() + stage_; }
  // Waits until all lanes can read Stage() and none uses the previous stage any
  // more. Then starts to load new data into the previous stage.
  template <bool one, bool values>
  KVASIR_DEVICE void Step() {
    simt::WaitCopies<kStages - 2>();
    simt::SyncWarp();
    LoadNext<one, values>(simt::Shared() + to_);
  }

  // Starts to copy the warp's share of the next chunk and block, if the split
  // has more. Keys come first, block by block with all chunks of a block. Then
  // come the values, chunk by chunk with all blocks of a chunk. `one` may be
  // true if only one chunk of keys is left, and `values` if none is left.
  template <bool one, bool values>
  KVASIR_DEVICE void LoadNext(char* stage) {
    if (load_block_ < load_end_) {
      LoadBlock<values>(stage);
      if (!one && load_chunk_ < chunks_.keys) {
        if (++load_chunk_ == chunks_.keys) {
          load_chunk_ = 0;
          ++load_block_;
        }
        load_block_ == load_end_ ? BeginChunk(chunks_.keys) : Look();
      } else if (++load_block_ == load_end_) {
        BeginChunk(load_chunk_ + 1);
      }
    }
    simt::CommitCopies();
  }
  // Makes a chunk of values the next one to be loaded, if there is one.
  KVASIR_DEVICE void BeginChunk(int32_t chunk) {
    load_chunk_ = chunk;
    load_block_ = ValueBlocks().begin;
    const bool ends =
        chunk == chunks_.keys + chunks_.values || ValueBlocks().none();
    load_end_ = ends ? 0 : ValueBlocks().end;
    if (!ends) Look();
  }

  // How the lane copies whole blocks of the chunk that is loaded next. Set
  // by Look.
  struct Loading {
    const LatentChunkOnDevice* chunk;
    const char* from;  // the lane's first address in tile 0 of page 0
    int32_t page_bytes;
    uint32_t tile_bytes;
    int32_t copies;     // how many pieces the lane copies
    uint32_t distance;  // from one of these pieces to the next, in bytes
    // high_copies: the number of high-plane pieces that the lane copies. high:
    // the distance in bytes from `from` to the first one. high_to: its offset
    // in the stage. If there are two, they belong to slots that are 32 apart.
    int32_t high_copies;
    int32_t high;
    int32_t high_to;
    int32_t first_whole;
    uint32_t num_whole;  // number of blocks that can be copied as a whole
  };
  KVASIR_DEVICE void Look() {
    const LatentChunkOnDevice& chunk = ChunkOf(load_chunk_);
    const bool of_keys = load_chunk_ < chunks_.keys;
    const int32_t half = lane_ / kWarpSlots;
    const int32_t first = FirstPiece(chunk);
    const int32_t at =
        of_keys
            ? (kWarpSlots * warp_ + lane_ % kWarpSlots) * kPiece +
                  half * chunk.piece_stride
            : first * chunk.piece_stride + StagedSlot(chunk, lane_) * kPiece;
    loading_.chunk = &chunk;
    loading_.from = chunk.arena + chunk.codes_offset + at;
    loading_.page_bytes = static_cast<int32_t>(chunk.page_bytes);
    loading_.tile_bytes = static_cast<uint32_t>(chunk.tile_bytes);
    loading_.distance =
        static_cast<uint32_t>((of_keys ? 2 * kBlock : 32) * kPiece);
    loading_.copies = of_keys                 ? (chunk.pieces - half + 1) / 2
                      : first >= chunk.pieces ? 0
                      : HasNumbers(chunk)     ? 4
                                              : 2;
    if constexpr (kHasPlanes) {
      loading_.high_copies = chunk.high_bytes == 0 ? 0
                             : of_keys ? (chunk.high_pieces - half + 1) / 2
                                       : loading_.copies;
      loading_.high =
          of_keys ? chunk.high_offset : HighPiece(chunk, FirstPiece(chunk));
      loading_.high_to =
          of_keys ? FirstHigh(chunk) * kWarpSlots * kPiece : kBlock * kPiece;
      if (!chunk.has_low) loading_.copies = 0;
    }
    const Blocks whole = WholeBlocks(of_keys);
    loading_.first_whole = whole.begin;
    loading_.num_whole = chunk.in_blocks && whole.begin < whole.end
                             ? static_cast<uint32_t>(whole.end - whole.begin)
                             : 0;
  }
  // Loads a block of the next chunk. For a whole block, a lane copies pieces
  // that are equally far apart. Two lanes copy each slot of keys: one lane the
  // even pieces, the other lane the odd pieces. A lane copies two slots of each
  // piece of values.
  template <bool values>
  KVASIR_DEVICE void LoadBlock(char* stage) const {
    if (static_cast<uint32_t>(load_block_ - loading_.first_whole) >=
        loading_.num_whole) {
      !values&& load_chunk_ < chunks_.keys ? LoadKeys(stage)
                                           : LoadValues(stage);
      return;
    }
    const Place place = simt::LoadShared(Places() + load_block_ * kBlock);
    const char* const from = loading_.from +
                             int64_t{place.page} * loading_.page_bytes +
                             uint64_t{place.tile} * loading_.tile_bytes;
    char* const to = stage + lane_ * kPiece;
    constexpr bool kFewBits = kind == MmaKind::kCodes4 ||
                              kind == MmaKind::kLevels4 ||
                              kind == MmaKind::kLevels3;
    constexpr bool kTwo = kFewBits || (values && kind == MmaKind::kCodes8);
    constexpr int32_t kMost = (kTwo ? kMostKeyPieces4 : kMostKeyPieces) / 2;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kMost; ++i) {
      if (i < loading_.copies) {
        simt::CopyAsync<kPiece>(
            to + 32 * i * kPiece,
            from + static_cast<uint32_t>(i) * loading_.distance);
      }
    }
    if constexpr (kHasPlanes) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < 2; ++i) {
        if (i < loading_.high_copies) {
          simt::CopyAsync<kPiece>(to + loading_.high_to + 32 * i * kPiece,
                                  from + loading_.high + 32 * i * kPiece);
        }
      }
    }
  }

  // Where a slot is stored in the chunk's arena.
  struct Address {
    const char* tile;
    int32_t slot;
    bool there;  // true if at least one row reads the slot's latent
  };
  KVASIR_DEVICE Address AddressOf(const LatentChunkOnDevice& chunk,
                                  bool of_keys, int32_t s) const {
    const Place place = simt::LoadShared(Places() + s);
    // If all rows read the slot as an exact row, the cache may have no latent
    // of it.
    if (place.page < 0 ||
        (exact && !ReadAsCodes(of_keys, item_.num_tokens - 1).Has(s))) {
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
  static KVASIR_DEVICE void CopyParams(const LatentChunkOnDevice& chunk,
                                       const Address& address, char* to) {
    if (address.there) {
      simt::CopyAsync<4>(to, address.tile + chunk.params_offset +
                                 address.slot * chunk.params_stride);
    } else {
      simt::StoreShared(reinterpret_cast<uint32_t*>(to), 0u);
    }
  }

  // Loads the next block of a chunk of keys as [piece][16 slots][16 bytes]. An
  // odd number of pieces is padded with a piece of zeros.
  KVASIR_DEVICE void LoadKeys(char* stage) const {
    const LatentChunkOnDevice& chunk = *loading_.chunk;
    const int32_t s = lane_ % kWarpSlots;
    const Address address = AddressOf(
        chunk, /*of_keys=*/true, load_block_ * kBlock + kWarpSlots * warp_ + s);
    const char* const from =
        address.tile + chunk.codes_offset + address.slot * chunk.slot_stride;
    const int32_t pieces = FirstHigh(chunk);
    KVASIR_NO_UNROLL
    for (int32_t p = lane_ / kWarpSlots; p < pieces; p += 2) {
      CopyPiece(stage + (p * kWarpSlots + s) * kPiece,
                address.there && chunk.has_low && p < chunk.pieces,
                from + p * chunk.piece_stride);
    }
    if (kHasPlanes && lane_ / kWarpSlots < chunk.high_pieces) {
      const int32_t p = lane_ / kWarpSlots;
      CopyPiece(stage + ((pieces + p) * kWarpSlots + s) * kPiece, address.there,
                from + chunk.high_offset + p * chunk.piece_stride);
    }
  }
  // Returns the index, in a chunk of values, of the first piece that this warp
  // loads and multiplies.
  KVASIR_DEVICE int32_t FirstPiece(const LatentChunkOnDevice& chunk) const {
    return HasNumbers(chunk) ? 2 * warp_ : warp_;
  }
  // Returns which slot of a block is at index `i` of a stage of values. Numbers
  // are in the order of slots. Codes are in an order that gives each lane four
  // neighbouring slots (SumCodes). In every 16 slots, these are at indices 2c,
  // 2c + 1, 2c + 8 and 2c + 9, with c = lane % 4.
  static KVASIR_DEVICE int32_t StagedSlot(const LatentChunkOnDevice& chunk,
                                          int32_t i) {
    if (HasNumbers(chunk)) return i;
    return i / 16 * 16 + i % 8 / 2 * 4 + i / 8 % 2 * 2 + i % 2;
  }
  // Loads the next block of the warp's one or two pieces of a chunk of values
  // as [piece][64 slots][16 bytes].
  KVASIR_DEVICE void LoadValues(char* stage) const {
    const LatentChunkOnDevice& chunk = *loading_.chunk;
    const int32_t first = FirstPiece(chunk);
    if (first >= chunk.pieces) return;
    KVASIR_NO_UNROLL
    for (int32_t i = lane_; i < kBlock; i += 32) {
      const Address address =
          AddressOf(chunk, /*of_keys=*/false,
                    load_block_ * kBlock + StagedSlot(chunk, i));
      const char* const from = address.tile + chunk.codes_offset +
                               address.slot * chunk.slot_stride +
                               first * chunk.piece_stride;
      CopyPiece(stage + i * kPiece, address.there && chunk.has_low, from);
      if (kHasPlanes && chunk.high_bytes > 0) {
        CopyPiece(stage + (kBlock + i) * kPiece, address.there,
                  from + HighPiece(chunk, FirstPiece(chunk)));
      }
      if (HasNumbers(chunk)) {
        CopyPiece(stage + (kBlock + i) * kPiece,
                  address.there && first + 1 < chunk.pieces,
                  from + chunk.piece_stride);
      }
    }
  }
  // Calls visit(chunk) for the first chunk of each run of codes of keys or of
  // values.
  template <typename Visit>
  KVASIR_DEVICE void ForRuns(bool of_keys, const Visit& visit) const {
    if constexpr (kind != MmaKind::kNumbers) {
      const int32_t begin = of_keys ? 0 : chunks_.keys;
      const int32_t end = begin + (of_keys ? chunks_.keys : chunks_.values);
      KVASIR_NO_UNROLL
      for (int32_t k = begin; k < end; ++k) {
        const LatentChunkOnDevice& chunk = ChunkOf(k);
        if (!HasNumbers(chunk) && chunk.starts_run) visit(chunk);
      }
    }
  }
  // Starts to load the ranges of a run for the whole split to `params` [512].
  // The lane loads the ranges of slots `s` to `s` + 3.
  KVASIR_DEVICE void LoadParams(bool of_keys, const LatentChunkOnDevice& run,
                                int32_t s, uint32_t* params) const {
    auto* const to = reinterpret_cast<char*>(params + s);
    if (HasStaticRanges(run)) {
      constexpr uint32_t kOnes = simt::PairOfOnes<F16>();
      simt::StoreShared(reinterpret_cast<simt::Vec16*>(to),
                        simt::Vec16{{kOnes, kOnes, kOnes, kOnes}});
      return;
    }
    const int32_t block = s / kBlock;
    if (run.in_blocks && WholeBlocks(of_keys).Has(block)) {
      const Place place = simt::LoadShared(Places() + block * kBlock);
      simt::CopyAsync<kPiece>(to, run.arena + place.page * run.page_bytes +
                                      int64_t{place.tile} * run.tile_bytes +
                                      run.params_offset + s % kBlock * 4);
      return;
    }
    // Lanes begin with different ones of their four slots, because that avoids
    // most bank conflicts.
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t k = (i + lane_ / 4) % 4;
      CopyParams(run, AddressOf(run, of_keys, s + k), to + 4 * k);
    }
  }
  // Starts to load the ranges of the split. A warp loads those of the slots
  // whose keys it multiplies, and a quarter of those of values.
  KVASIR_DEVICE void LoadAllParams() const {
    if (!KeyBlocks().none()) {
      ForRuns(/*of_keys=*/true, [&](const LatentChunkOnDevice& run) {
        LoadParams(/*of_keys=*/true, run,
                   lane_ / 4 * kBlock + kWarpSlots * warp_ + lane_ % 4 * 4,
                   KeyParams(run));
      });
    }
    if (!ValueBlocks().none()) {
      ForRuns(/*of_keys=*/false, [&](const LatentChunkOnDevice& run) {
        LoadParams(/*of_keys=*/false, run, 4 * thread_, ValueParams(run));
      });
    }
  }
  // The ranges of a run of keys or of values for the slots of a split [512].
  KVASIR_DEVICE uint32_t* KeyParams(const LatentChunkOnDevice& run) const {
    return params_ + run.run * kSplit;
  }
  KVASIR_DEVICE uint32_t* ValueParams(const LatentChunkOnDevice& run) const {
    return params_ +
           (static_cast<int32_t>(device_.most_key_runs) + run.run) * kSplit;
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

  // BoundValueParams rearranges the ranges that the thread loaded, so that the
  // scales of two neighbouring slots are in one word, and their minima in the
  // next one. It also limits the scales so that a float16 can hold every
  // decoded value, as prefill_operands.h does.
  KVASIR_DEVICE void BoundValueParams() const {
    if (ValueBlocks().none()) return;
    if constexpr (exact) {
      // Without keys that are codes, the warp has not waited for a copy yet.
      if (KeyBlocks().none()) simt::WaitCopies<kStages - 2>();
    }
    ForRuns(/*of_keys=*/false, [&](const LatentChunkOnDevice& run) {
      auto* const words =
          reinterpret_cast<simt::Vec16*>(ValueParams(run)) + thread_;
      const simt::Vec16 slots = simt::LoadShared(words);
      simt::Vec16 pairs;
      KVASIR_UNROLL
      for (int32_t i = 0; i < 4; i += 2) {
        const uint32_t minimum =
            simt::PickBytes(slots.word[i], slots.word[i + 1], 0x7632u);
        const uint32_t most =
            HasLevels(KindOf(run))
                ? run.most_scale
                : simt::FmaPair(F16{}, minimum, run.less_scale, run.most_scale);
        pairs.word[i] = simt::MinPair(
            simt::PickBytes(slots.word[i], slots.word[i + 1], 0x5410u), most);
        pairs.word[i + 1] = minimum;
      }
      simt::StoreShared(words, pairs);
    });
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
      case ChunkKind::kCodes3:
      case ChunkKind::kLevels3:
        return 64 * warp_ + 8 * g + t % 2 * 2 + t / 2 + 4 * other;
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
    if (KeyBlocks().none()) {
      BeginChunk(chunks_.keys);
    } else {
      load_chunk_ = 0;
      load_block_ = KeyBlocks().begin;
      load_end_ = KeyBlocks().end;
      Look();
    }
    LoadAllParams();  // belong to the first group of copies
    stage_ = to_ = ring_;
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < kStages - 1; ++i) {
      LoadNext</*one=*/false, /*values=*/false>(simt::Shared() + to_);
      to_ += device_.warp_stage_bytes;
    }
  }

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  // Offsets in shared memory: of the warp's stages [kStages][warp_stage_bytes],
  // of the stage to be multiplied next and of the stage to be loaded next.
  int32_t ring_, stage_, to_;
  uint32_t* params_;  // see KeyParams and ValueParams
  const int32_t thread_, warp_, lane_;

  Item item_;
  UnitChunks chunks_;
  SlotRange slots_;  // slots of the split that at least one row sees
  int64_t split_;    // first slot of the split
  int32_t first_block_, end_block_;
  // The range of blocks of which every slot is seen by at least one row.
  int32_t first_whole_, end_whole_;
  SideBlocks keys_, values_;  // only if `exact`
  // The chunk and block that are loaded next, and the end of the blocks of keys
  // or values, or 0 if nothing is left to be loaded.
  int32_t load_chunk_, load_block_, load_end_;
  Loading loading_;
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
