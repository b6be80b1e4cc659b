// Adds the attention weights of rows to the mass of slots (paged_attention.h),
// after the softmax sums of all rows are known. Weights that were not kept are
// computed again from the keys. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_ATTENTION_MASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_ATTENTION_MASS_INL_H_
#undef KVASIR_KERNELS_ATTENTION_MASS_INL_H_
#else
#define KVASIR_KERNELS_ATTENTION_MASS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/cpu/unit_worker-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Adds the mass of one MassItem on one thread. No other item adds mass to the
// same slots in the same units of eviction, so no lock is needed.
class MassWorker {
 public:
  MassWorker(const AttentionGrid& grid, const MassItem& item, float* scratch,
             float* tile)
      : params_(grid.params()),
        grid_(grid),
        sequence_(*item.sequence),
        first_unit_(item.first_unit),
        num_units_(item.num_units),
        split_(item.split),
        scratch_(scratch),
        tile_(tile) {}

  void Run() const {
    if (KeepsWeights(sequence_)) return AddKept();
    const MassUnit& unit = UnitAt(first_unit_);
    for (int64_t query = sequence_.first_counted_row;
         query < sequence_.num_rows;) {
      const int64_t count =
          std::min(unit.tile_queries, sequence_.num_rows - query);
      AddTile(unit, query, count);
      query += count;
    }
  }

 private:
  const MassUnit& UnitAt(int64_t index) const {
    return grid_.mass().units[static_cast<size_t>(index)];
  }

  // Returns the slots of the split that at least one of the queries [query,
  // query + count) sees.
  VisibleRange SlotsOf(int64_t query, int64_t count) const {
    const VisibleRange slots = {
        VisibleSlots(params_, sequence_, query).begin,
        VisibleSlots(params_, sequence_, query + count - 1).end};
    return {std::max(slots.begin, split_ * kAttentionSplitSlots),
            std::min(slots.end, (split_ + 1) * kAttentionSplitSlots)};
  }

  void AddKept() const {
    const VisibleRange visible = VisibleSlots(params_, sequence_, 0);
    const int64_t num_heads = params_.num_heads;
    const float* kept =
        grid_.mass_memory() + grid_.mass().weights + sequence_.weights_at;
    const int64_t* heads = grid_.mass().heads.data();
    // Kept weights need no tile. Its memory holds one factor per query head.
    float* const factors = tile_;
    ForBlocks(SlotsOf(0, 1), [&](int64_t /*block*/, VisibleRange slots) {
      const float* from =
          kept + KeptBlockOffset(num_heads, visible, slots.begin);
      FindFactors(from + num_heads * kBlock, factors);
      for (int64_t u = first_unit_; u < first_unit_ + num_units_; ++u) {
        const MassUnit& unit = UnitAt(u);
        const int64_t* of_unit = heads + unit.first_head;
        AddRows(unit, slots, unit.num_heads, [&](int64_t i, float* factor) {
          *factor = factors[of_unit[i]];
          return from + of_unit[i] * kBlock;
        });
      }
    });
  }
  // Computes the factors of one block, one per query head of the sequence's
  // only row. A kept weight times this factor is the final softmax weight.
  void FindFactors(const float* block_maxima, float* factors) const {
    const float* maxima = grid_.MassMaximaOf(sequence_.first_row);
    const float* inverses = grid_.MassInversesOf(sequence_.first_row);
    int64_t h = 0;
    for (; h + kVecLanes <= params_.num_heads; h += kVecLanes) {
      const Vec down =
          hn::Sub(LoadFloats(block_maxima + h), LoadFloats(maxima + h));
      hn::StoreU(hn::Mul(ExpVec(down), LoadFloats(inverses + h)), kFloats,
                 factors + h);
    }
    for (; h < params_.num_heads; ++h) {
      factors[h] = Exp(block_maxima[h] - maxima[h]) * inverses[h];
    }
  }

  // Adds the weights of queries [query, query + count) to the mass.
  void AddTile(const MassUnit& unit, int64_t query, int64_t count) const {
    const VisibleRange slots = SlotsOf(query, count);
    if (slots.begin >= slots.end) return;
    const WeightSink sink = {tile_, tile_ + grid_.mass().tile.factors, query,
                             unit.num_heads};
    const int64_t rows = count * unit.num_heads;
    std::fill_n(sink.factors, rows * kBlocksOfSplit, kUnseen);
    for (int64_t s = 0; s < unit.num_slices; ++s) {
      const AttentionUnit panels = {
          &sequence_, &grid_.slice(unit.first_slice + s), query, count};
      UnitWorker(grid_, panels, scratch_).WeighSplit(split_, sink);
    }
    ForBlocks(slots, [&](int64_t block, VisibleRange in_block) {
      AddRows(unit, in_block, rows, [&](int64_t i, float* factor) {
        *factor = sink.factors[i * kBlocksOfSplit + block];
        return sink.weights + i * kAttentionSplitSlots + block * kBlock;
      });
    });
  }

  // Divides `slots` into blocks and calls add(index, slots) for each block.
  // `index` is the block's index in its split.
  template <typename Add>
  static void ForBlocks(VisibleRange slots, const Add& add) {
    for (int64_t s = slots.begin; s < slots.end;) {
      const int64_t end = std::min(slots.end, (s / kBlock + 1) * kBlock);
      add(s % kAttentionSplitSlots / kBlock, VisibleRange{s, end});
      s = end;
    }
  }

  // Adds the weights of `count` rows, in order, to the mass of slots of one
  // block. row(i, factor) returns the weights of row i for the block, and sets
  // *factor to the number that turns them into softmax weights, or to kUnseen.
  template <typename Row>
  void AddRows(const MassUnit& unit, VisibleRange slots, int64_t count,
               const Row& row) const {
    const int64_t in_page = slots.begin % params_.page_tokens;
    if (slots.end - slots.begin == kBlock &&
        in_page + kBlock <= params_.page_tokens) {
      return AddToBlock(
          count, row,
          ScoresOf(params_.metadata, PageOf(slots.begin), unit.unit) + in_page);
    }
    HWY_ALIGN float mass[kBlock] = {};
    float* const first = mass + slots.begin % kBlock;
    ForMemory(unit, slots, [&](const float* scores, int64_t at, int64_t run) {
      std::copy_n(scores, run, first + at);
    });
    AddToBlock(count, row, mass);
    ForMemory(unit, slots, [&](float* scores, int64_t at, int64_t run) {
      std::copy_n(first + at, run, scores);
    });
  }
  template <typename Row>
  static HWY_INLINE void AddToBlock(int64_t count, const Row& row,
                                    float* mass) {
    // Processes at most eight vectors of sums at a time, so that they stay in
    // registers.
    constexpr int kVecs = static_cast<int>(kBlock) / kVecLanes;
    constexpr int kHeld = kVecs < 8 ? kVecs : 8;
    for (int v = 0; v < kVecs; v += kHeld) {
      Vec sums[kHeld];
      for (int k = 0; k < kHeld; ++k) {
        sums[k] = LoadFloats(mass + (v + k) * kVecLanes);
      }
      for (int64_t i = 0; i < count; ++i) {
        float factor;
        const float* weights = row(i, &factor) + v * kVecLanes;
        if (factor == kUnseen) continue;
        const Vec factors = Broadcast(factor);
        for (int k = 0; k < kHeld; ++k) {
          sums[k] = Fma(LoadFloats(weights + k * kVecLanes), factors, sums[k]);
        }
      }
      for (int k = 0; k < kHeld; ++k) {
        hn::StoreU(sums[k], kFloats, mass + (v + k) * kVecLanes);
      }
    }
  }

  // Calls use(masses, first, count) for each run of slots whose masses are
  // contiguous in memory. `first` is the index of the run's first slot within
  // `slots`.
  template <typename Use>
  void ForMemory(const MassUnit& unit, VisibleRange slots,
                 const Use& use) const {
    const int64_t page_tokens = params_.page_tokens;
    for (int64_t s = slots.begin; s < slots.end;) {
      const int64_t in_page = s % page_tokens;
      const int64_t run = std::min(slots.end - s, page_tokens - in_page);
      use(ScoresOf(params_.metadata, PageOf(s), unit.unit) + in_page,
          s - slots.begin, run);
      s += run;
    }
  }

  int64_t PageOf(int64_t slot) const {
    return sequence_.block_table.device_address()[slot / params_.page_tokens];
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const AttentionSequence& sequence_;
  const int64_t first_unit_;
  const int64_t num_units_;
  const int64_t split_;
  float* const scratch_;
  float* const tile_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_ATTENTION_MASS_INL_H_
