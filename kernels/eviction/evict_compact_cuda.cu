// evict_compact on a GPU. A CTA moves some of the pieces of one region in one
// eviction. A piece is what a tile stores of a slot without a gap: a granule,
// or all bytes of the slot if there are no granules.
//
// A CTA moves a piece in words of 16, 4 or 1 bytes, kWordsAtOnce at a time: all
// threads load, wait for each other, and store. Slots only move to lower
// places. So a word that is overwritten was loaded in the same turn or before.
//
// Layout: the latents of every cache for GPUs are moved in words of 16 bytes,
// and planes of metadata in words of 1 or 4 bytes. Neighbouring threads move
// neighbouring words, and kept slots are often neighbours, so most accesses
// fill sectors.
//
// Bytes: every moved slot is read and written once. Lower bound of the time:
// the greater of these bytes divided by the memory's bandwidth, and the latency
// of n / 768 turns for n kept words of a piece.
#include "kernels/eviction/evict_compact.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kUnderWay = 3;
constexpr uint32_t kWordsAtOnce = kThreads * kUnderWay;
// The number of CTAs that divide the pieces of a region.
constexpr uint32_t kPieceCtas = 8;

// Moves the slots of one eviction in one region.
class Mover {
 public:
  KVASIR_DEVICE Mover(const EvictCompactArgs& args, const Eviction& eviction,
                      const EvictRegionArgs& region)
      : region_(region),
        page_tokens_(static_cast<uint32_t>(args.page_tokens)),
        from_(simt::BitsAs<const int32_t*>(eviction.block_table)),
        to_(simt::BitsAs<const int32_t*>(eviction.to_table)),
        kept_(args.kept_slots + eviction.first_kept +
              region.unit * eviction.kept),
        count_(static_cast<uint32_t>(eviction.kept)),
        granule_(region.region.granule_bytes),
        piece_(granule_ > 0 ? granule_ : region.slot_bytes) {}

  KVASIR_DEVICE void Run() const {
    const auto distances = static_cast<uint64_t>(
        simt::BitsAs<int64_t>(region_.arena) | region_.page_bytes |
        region_.tile_bytes | region_.region.offset_bytes |
        region_.region.stride_bytes | piece_);
    if (distances % 16 == 0) {
      MovePieces<simt::Vec16>();
    } else if (distances % 4 == 0) {
      MovePieces<uint32_t>();
    } else {
      MovePieces<uint8_t>();
    }
  }

 private:
  template <typename Word>
  KVASIR_DEVICE void MovePieces() const {
    const auto pieces =
        static_cast<uint32_t>((region_.slot_bytes + piece_ - 1) / piece_);
    for (uint32_t p = simt::CtaY(); p < pieces; p += simt::CtasY()) {
      MovePiece<Word>(p * granule_ * region_.tile_slots);
    }
  }
  // Moves a piece that is at `offset` in the region.
  template <typename Word>
  KVASIR_DEVICE void MovePiece(int64_t offset) const {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
    const auto in_slot = static_cast<uint32_t>(piece_ / kBytes);
    // The first word of a turn is word `word` of slot `first`.
    uint32_t word = 0;
    for (uint32_t first = 0; first < count_;) {
      Word held[kUnderWay] = {};
      Word* to[kUnderWay] = {};
      KVASIR_UNROLL
      for (uint32_t k = 0; k < kUnderWay; ++k) {
        const uint32_t i = word + kThreads * k + simt::Thread();
        const uint32_t slot = first + i / in_slot;
        if (slot >= count_) continue;
        const int64_t at = offset + kBytes * (i % in_slot);
        const auto kept = static_cast<uint32_t>(simt::LoadGlobal(kept_ + slot));
        auto* const from = reinterpret_cast<Word*>(AddressOf(from_, kept) + at);
        auto* const target = reinterpret_cast<Word*>(AddressOf(to_, slot) + at);
        if (from == target) continue;
        held[k] = simt::LoadGlobal(from);
        to[k] = target;
      }
      simt::SyncCta();
      KVASIR_UNROLL
      for (uint32_t k = 0; k < kUnderWay; ++k) {
        if (to[k] != nullptr) simt::StoreGlobal(to[k], held[k]);
      }
      word += kWordsAtOnce;
      first += word / in_slot;
      word %= in_slot;
    }
  }
  KVASIR_DEVICE char* AddressOf(const int32_t* table, uint32_t slot) const {
    const int64_t page = simt::LoadGlobal(table + slot / page_tokens_);
    const uint32_t in_page = slot % page_tokens_;
    const auto tile_slots = static_cast<uint32_t>(region_.tile_slots);
    const uint32_t tile = in_page / tile_slots;
    return static_cast<char*>(region_.arena) + page * region_.page_bytes +
           tile * region_.tile_bytes + region_.region.offset_bytes +
           (in_page - tile * tile_slots) * region_.region.stride_bytes;
  }

  const EvictRegionArgs& region_;
  const uint32_t page_tokens_;
  const int32_t* const from_;
  const int32_t* const to_;
  const int32_t* const kept_;
  const uint32_t count_;
  const int64_t granule_;
  const int64_t piece_;
};

KVASIR_KERNEL(kThreads)
EvictCompactKernel(EvictCompactArgs args) {
  const auto regions = static_cast<uint32_t>(args.num_regions);
  const Eviction eviction = args.evictions[simt::CtaX() / regions];
  const EvictRegionArgs region = args.regions[simt::CtaX() % regions];
  Mover(args, eviction, region).Run();
}

}  // namespace

void EvictCompactCuda(const EvictCompactArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "evict_compact";
  launch.grid_x = simt::Ctas(args.num_evictions * args.num_regions);
  launch.grid_y = kPieceCtas;
  launch.threads = kThreads;
  simt::Launch(launcher, launch, EvictCompactKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
