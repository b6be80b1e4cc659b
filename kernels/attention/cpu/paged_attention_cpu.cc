// paged_attention on CPUs. A unit of work is some query heads of some tokens of
// a sequence. For each block of slots, the latents that these heads share are
// read into the CPU cache once, with keys transposed. Codes are multiplied by
// code_dots.h, and bfloat16 numbers by pair_tile-inl.h if there are few rows.
// Other products use the register tile of matmul. If keys are rebuilt or values
// lifted, a unit of a long prompt has one KV head and as many tokens as
// possible. Its rows are divided into panels, which share each rebuilt block.
#include <algorithm>
#include <atomic>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/paged_attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/attention_mass-inl.h"
#include "kernels/attention/cpu/unit_worker-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void ComputeUnit(const AttentionGrid& grid, const AttentionUnit& unit,
                 float* scratch) {
  UnitWorker(grid, unit, scratch).Compute();
}

void ComputeSplit(const AttentionGrid& grid, const AttentionUnit& unit,
                  int64_t split, float* scratch) {
  UnitWorker worker(grid, unit, scratch);
  worker.Start(worker.FirstSlot(split));
  worker.ComputeSplit(split, (split + 1) * kAttentionSplitSlots);
}

// Adds one split of a unit to the unit's total. A thread computed the split in
// the scratch memory `part`. `first` and `last` say whether it is the unit's
// first or last split.
void MergeSplit(const AttentionGrid& grid, const AttentionUnit& unit,
                float* part, bool first, bool last,
                const AttentionTotal& total) {
  const UnitWorker worker(grid, unit, part);
  const PanelWorker& panel = worker.first_panel();
  if (first) panel.ClearTotal(total);
  panel.Merge(total);
  if (last) panel.Finish(total);
}

void AddMassOfItem(const AttentionGrid& grid, const MassItem& item,
                   float* scratch, float* tile) {
  MassWorker(grid, item, scratch, tile).Run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {

HWY_EXPORT(ComputeUnit);
HWY_EXPORT(ComputeSplit);
HWY_EXPORT(MergeSplit);
HWY_EXPORT(AddMassOfItem);

// The starts of one thread's scratch and of its tile for attention mass.
struct ThreadMemory {
  ThreadMemory(const AttentionGrid& grid, float* all, int64_t thread)
      : scratch(all + grid.scratch().floats * thread),
        tile(grid.mass_memory() + grid.mass().tiles +
             grid.mass().tile.floats * thread) {}
  float* scratch;
  float* tile;
};

// Adds the attention mass of a sequence whose weights were kept. All units of
// the sequence must have been computed.
void AddKeptMass(const AttentionGrid& grid, const AttentionSequence& sequence,
                 const ThreadMemory& memory) {
  const VisibleRange slots = CountedSlots(grid.params(), sequence);
  MassItem item = {&sequence, 0, static_cast<int64_t>(grid.mass().units.size()),
                   0};
  for (item.split = slots.begin / kAttentionSplitSlots;
       item.split * kAttentionSplitSlots < slots.end; ++item.split) {
    HWY_DYNAMIC_DISPATCH(AddMassOfItem)
    (grid, item, memory.scratch, memory.tile);
  }
}

// Computes each unit on one thread. Used if TakesSplits returned false. If a
// sequence's weights are kept, the thread that finishes the sequence's last
// unit also adds the attention mass, because the weights are still in its
// cache.
void RunByUnits(const AttentionGrid& grid, float* scratch, CpuStream& stream) {
  const bool adds_mass = grid.mass().any();
  const AttentionGrid::Sequences sequences = grid.sequences();
  for (int64_t i = 0; adds_mass && i < sequences.count; ++i) {
    const AttentionSequence& sequence = sequences.data[i];
    if (!KeepsWeights(sequence)) continue;
    grid.MassPendingOf(sequence.first_row) = grid.CutOf(sequence).units();
  }
  std::atomic<int64_t> next{0};
  stream.pool().Run([&](int thread) {
    const ThreadMemory memory(grid, scratch, thread);
    UnitCursor cursor(grid);
    AttentionUnit unit;
    while (cursor.MoveTo(next.fetch_add(1, std::memory_order_relaxed), &unit)) {
      HWY_DYNAMIC_DISPATCH(ComputeUnit)(grid, unit, memory.scratch);
      if (!adds_mass || !KeepsWeights(*unit.sequence)) continue;
      std::atomic_ref<int64_t> pending(
          grid.MassPendingOf(unit.sequence->first_row));
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        AddKeptMass(grid, *unit.sequence, memory);
      }
    }
  });
}

// Divides units among threads by splits. Used for few units over long contexts.
// The threads compute one split each, then the calling thread merges these
// splits in order. This repeats until all splits are merged.
class SplitRunner {
 public:
  SplitRunner(const AttentionGrid& grid, float* scratch, CpuStream& stream)
      : grid_(grid), scratch_(scratch), stream_(stream) {}

  void Add(const AttentionUnit& unit) {
    const VisibleRange slots = UnitSlots(grid_.params(), unit);
    const int64_t first = slots.begin / kAttentionSplitSlots;
    const int64_t last = (slots.end - 1) / kAttentionSplitSlots;
    for (int64_t split = first; split <= last; ++split) {
      wave_[count_++] = {unit, split, split == first, split == last};
      if (count_ == std::min(stream_.pool().num_threads(), kMaxWave)) Flush();
    }
  }

  void Flush() {
    stream_.pool().ForRanges(
        count_, [&](int64_t begin, int64_t end, int /*thread*/) {
          for (int64_t i = begin; i < end; ++i) {
            HWY_DYNAMIC_DISPATCH(ComputeSplit)
            (grid_, wave_[i].unit, wave_[i].split, MemoryOf(i));
          }
        });
    for (int64_t i = 0; i < count_; ++i) {
      HWY_DYNAMIC_DISPATCH(MergeSplit)
      (grid_, wave_[i].unit, MemoryOf(i), wave_[i].first, wave_[i].last,
       {max_, sum_});
    }
    count_ = 0;
  }

 private:
  static constexpr int kMaxWave = 64;
  struct Task {
    AttentionUnit unit;
    int64_t split;
    bool first;
    bool last;
  };

  float* MemoryOf(int64_t task) const {
    return scratch_ + grid_.scratch().floats * task;
  }

  const AttentionGrid& grid_;
  float* const scratch_;
  CpuStream& stream_;
  Task wave_[kMaxWave];
  int count_ = 0;
  // The softmax maxima and sums of the unit whose splits are being merged.
  float max_[kAttentionMaxRows];
  float sum_[kAttentionMaxRows];
};

// Adds the attention mass of all sequences or, if `skips_kept`, of those
// without kept weights. The softmax sums of all rows must be known.
void AddMass(const AttentionGrid& grid, bool skips_kept, float* scratch,
             CpuStream& stream) {
  const MassPlan& mass = grid.mass();
  MassItem any;
  if (!MassCursor(grid.params(), mass, skips_kept).MoveTo(0, &any)) return;
  std::atomic<int64_t> next{0};
  stream.pool().Run([&](int thread) {
    const ThreadMemory memory(grid, scratch, thread);
    MassCursor cursor(grid.params(), mass, skips_kept);
    MassItem item;
    while (cursor.MoveTo(next.fetch_add(1, std::memory_order_relaxed), &item)) {
      HWY_DYNAMIC_DISPATCH(AddMassOfItem)
      (grid, item, memory.scratch, memory.tile);
    }
  });
}

void RunBySplits(const AttentionGrid& grid, float* scratch, CpuStream& stream) {
  SplitRunner runner(grid, scratch, stream);
  UnitCursor cursor(grid);
  AttentionUnit unit;
  for (int64_t i = 0; cursor.MoveTo(i, &unit); ++i) runner.Add(unit);
  runner.Flush();
}

}  // namespace

void PagedAttentionSimd(const AttentionLaunchArgs& launch, float* scratch,
                        CpuStream& stream) {
  const AttentionGrid& grid = *launch.grid;
  if (launch.takes_splits) {
    RunBySplits(grid, scratch, stream);
  } else {
    RunByUnits(grid, scratch, stream);
  }
  if (!grid.mass().any()) return;
  AddMass(grid, !launch.takes_splits, scratch, stream);
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
