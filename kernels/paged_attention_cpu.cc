// A unit of work is a tile of rows (queries times the query heads of one KV
// head) of one sequence: its keys and values are brought into cache once per
// block of slots, keys with slots side by side, and both products run on the
// register tile of matmul.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/paged_attention.h"
#include "kernels/scalar_math.h"
#include "kernels/stream.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/paged_attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/tile-inl.h"
#include "kernels/transpose-inl.h"

#ifndef KVASIR_KERNELS_PAGED_ATTENTION_CPU_ONCE_
#define KVASIR_KERNELS_PAGED_ATTENTION_CPU_ONCE_
namespace kvasir::kernels {

inline constexpr int64_t kMaxRows = 64;
inline constexpr int64_t kStreamRows = 12;
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Rows of a unit: what keeps a thread's scratch below 256 KiB.
inline int64_t RowsPerUnit(const PagedAttentionParams& params) {
  return std::max(params.key.width, params.value.width) > 128 ? kMaxRows / 2
                                                              : kMaxRows;
}

struct AttentionUnit {
  const AttentionSequence* sequence;
  int64_t kv_head;
  // Rows are numbered query * heads_per_kv + head within the KV head's.
  int64_t row_begin;
  int64_t row_end;
};

// Walks over all units of a launch, in one fixed order.
class UnitCursor {
 public:
  explicit UnitCursor(const PagedAttentionParams& params) : params_(params) {}

  // Moves forward to unit `index`; false when there are fewer.
  bool MoveTo(int64_t index, AttentionUnit* unit) {
    const int64_t heads_per_kv = params_.num_heads / params_.num_kv_heads;
    const int64_t height = RowsPerUnit(params_);
    for (; sequence_ < params_.num_sequences; ++sequence_) {
      const AttentionSequence& sequence = params_.sequences[sequence_];
      const int64_t rows = sequence.num_rows * heads_per_kv;
      const int64_t tiles = (rows + height - 1) / height;
      const int64_t here = index - first_;
      if (here < tiles * params_.num_kv_heads) {
        const int64_t tile = here / params_.num_kv_heads;
        *unit = {&sequence, here % params_.num_kv_heads, rows * tile / tiles,
                 rows * (tile + 1) / tiles};
        return true;
      }
      first_ += tiles * params_.num_kv_heads;
    }
    return false;
  }

 private:
  const PagedAttentionParams& params_;
  int64_t sequence_ = 0;
  int64_t first_ = 0;  // index of the sequence's first unit
};

// Slots that any row of a unit sees.
inline VisibleRange UnitSlots(const PagedAttentionParams& params,
                              const AttentionUnit& unit) {
  const int64_t heads_per_kv = params.num_heads / params.num_kv_heads;
  const VisibleRange first =
      VisibleSlots(params, *unit.sequence, unit.row_begin / heads_per_kv);
  const VisibleRange last =
      VisibleSlots(params, *unit.sequence, (unit.row_end - 1) / heads_per_kv);
  return {first.begin, last.end};
}

inline int64_t PaddedWidth(int64_t width) { return (width + 31) / 32 * 32; }

// One thread's memory.
struct AttentionScratch {
  float* q;       // [rows, key.width]
  float* keys;    // [key.width, 64]: slots side by side
  float* values;  // [64, padded value width]
  float* scores;  // [rows, 64]
  float* out;     // [rows, padded value width], of the current split
  float* max;     // [rows]
  float* sum;     // [rows]
  float* zeros;   // a key or value of zeros, for slots that nobody sees

  static int64_t Floats(const PagedAttentionParams& params) {
    const int64_t rows = RowsPerUnit(params);
    const int64_t width = PaddedWidth(params.value.width);
    const int64_t floats =
        rows * params.key.width +
        kAttentionBlockSlots * (params.key.width + width + rows) +
        rows * (width + 2) + kAttentionMaxWidth;
    return (floats + kLanes - 1) / kLanes * kLanes;
  }
  static AttentionScratch Of(const PagedAttentionParams& params, float* base) {
    const int64_t rows = RowsPerUnit(params);
    const int64_t width = PaddedWidth(params.value.width);
    AttentionScratch scratch;
    scratch.q = base;
    scratch.keys = scratch.q + rows * params.key.width;
    scratch.values = scratch.keys + params.key.width * kAttentionBlockSlots;
    scratch.scores = scratch.values + kAttentionBlockSlots * width;
    scratch.out = scratch.scores + rows * kAttentionBlockSlots;
    scratch.max = scratch.out + rows * width;
    scratch.sum = scratch.max + rows;
    scratch.zeros = scratch.sum + rows;
    return scratch;
  }
};

// Softmax of a unit's rows over the splits merged so far; the output itself is
// in params.out.
struct AttentionTotal {
  float max[kMaxRows];
  float sum[kMaxRows];
};

}  // namespace kvasir::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// A unit at work on one thread.
class UnitWorker {
 public:
  UnitWorker(const PagedAttentionParams& params, const AttentionUnit& unit,
             const AttentionScratch& scratch)
      : params_(params),
        unit_(unit),
        scratch_(scratch),
        heads_per_kv_(params.num_heads / params.num_kv_heads),
        key_group_(params.key_group ? params.key_group[unit.kv_head]
                                    : unit.kv_head),
        value_group_(params.value_group ? params.value_group[unit.kv_head]
                                        : unit.kv_head),
        rows_(unit.row_end - unit.row_begin),
        width_(params.value.width),
        padded_(PaddedWidth(width_)),
        slots_(UnitSlots(params, unit)),
        streams_(rows_ <= kStreamRows && width_ % kTileColumns == 0 &&
                 params.value.slot_stride_bytes %
                         DTypeBytes(params.value.dtype) ==
                     0) {}

  void LoadQueries() const {
    for (int64_t r = 0; r < rows_; ++r) {
      std::memcpy(scratch_.q + r * params_.key.width,
                  params_.q + QueryRow(r) * params_.q_row_stride +
                      QueryHead(r) * params_.key.width,
                  static_cast<size_t>(params_.key.width) * sizeof(float));
    }
    std::fill_n(scratch_.zeros, kAttentionMaxWidth, 0.0f);
    // The columns between the width and its padding take part in products
    // whose results nobody reads.
    for (int64_t s = 0; s < kAttentionBlockSlots; ++s) {
      std::fill(scratch_.values + s * padded_ + width_,
                scratch_.values + (s + 1) * padded_, 0.0f);
    }
  }

  // Leaves the result over the slots of one split in the scratch.
  void ComputeSplit(int64_t split) const {
    std::fill_n(scratch_.out, rows_ * padded_, 0.0f);
    std::fill_n(scratch_.max, rows_, kNothing);
    std::fill_n(scratch_.sum, rows_, 0.0f);
    const int64_t begin = std::max(slots_.begin, split * kAttentionSplitSlots);
    const int64_t end =
        std::min(slots_.end, (split + 1) * kAttentionSplitSlots);
    int64_t block = begin / kAttentionBlockSlots * kAttentionBlockSlots;
    for (; block < end; block += kAttentionBlockSlots) {
      AddBlock(block, {std::max(begin, block),
                       std::min(end, block + kAttentionBlockSlots)});
    }
  }

  void ClearTotal(AttentionTotal* total) const {
    std::fill_n(total->max, rows_, kNothing);
    std::fill_n(total->sum, rows_, 0.0f);
    for (int64_t r = 0; r < rows_; ++r) std::fill_n(OutOf(r), width_, 0.0f);
  }

  // Adds a split's result, which may be another thread's.
  void Merge(const AttentionScratch& part, AttentionTotal* total) const {
    for (int64_t r = 0; r < rows_; ++r) {
      if (part.max[r] == kNothing && part.sum[r] == 0.0f) continue;
      const float max =
          total->max[r] > part.max[r] ? total->max[r] : part.max[r];
      const float old_factor = Exp(total->max[r] - max);
      const float new_factor = Exp(part.max[r] - max);
      total->sum[r] =
          std::fma(total->sum[r], old_factor, part.sum[r] * new_factor);
      total->max[r] = max;
      MergeOut(part.out + r * padded_, old_factor, new_factor, OutOf(r));
    }
  }

  void Finish(const AttentionTotal& total) const {
    for (int64_t r = 0; r < rows_; ++r) {
      if (total.sum[r] == 0.0f && total.max[r] == kNothing) continue;
      float* out = OutOf(r);
      const Vec sum = Broadcast(total.sum[r]);
      int64_t i = 0;
      for (; i + kVecLanes <= width_; i += kVecLanes) {
        hn::StoreU(hn::Div(LoadFloats(out + i), sum), kFloats, out + i);
      }
      for (; i < width_; ++i) out[i] = out[i] / total.sum[r];
    }
  }

 private:
  int64_t QueryOf(int64_t r) const {
    return (unit_.row_begin + r) / heads_per_kv_;
  }
  int64_t QueryRow(int64_t r) const {
    return unit_.sequence->first_row + QueryOf(r);
  }
  int64_t QueryHead(int64_t r) const {
    return unit_.kv_head * heads_per_kv_ +
           (unit_.row_begin + r) % heads_per_kv_;
  }
  float* OutOf(int64_t r) const {
    return params_.out + QueryRow(r) * params_.out_row_stride +
           QueryHead(r) * width_;
  }

  // The part of a block that row r sees, relative to the block.
  VisibleRange InBlock(int64_t r, int64_t block) const {
    const VisibleRange slots =
        VisibleSlots(params_, *unit_.sequence, QueryOf(r));
    return {std::max<int64_t>(slots.begin - block, 0),
            std::min(slots.end - block, kAttentionBlockSlots)};
  }

  // Addresses of the block's slots; those outside `needed` name the zeros.
  void FindSlots(const KvSideView& view, int64_t group, int64_t block,
                 VisibleRange needed, const char** addresses) const {
    for (int64_t s = 0; s < kAttentionBlockSlots; ++s) {
      addresses[s] = reinterpret_cast<const char*>(scratch_.zeros);
    }
    for (int64_t s = needed.begin; s < needed.end;) {
      const Run run = RunAt(view, group, s, needed.end);
      for (int64_t i = 0; i < run.count; ++i) {
        addresses[s - block + i] = run.address + i * view.slot_stride_bytes;
      }
      s += run.count;
    }
  }

  // The slots from `slot` to the end of its page, or to `end`.
  struct Run {
    const char* address;
    int64_t count;
  };
  Run RunAt(const KvSideView& view, int64_t group, int64_t slot,
            int64_t end) const {
    const int64_t in_page = slot % params_.page_tokens;
    return {SlotAddress(view,
                        unit_.sequence->block_table[slot / params_.page_tokens],
                        group, in_page),
            std::min(end - slot, params_.page_tokens - in_page)};
  }

  // Where the next block begins in memory, to be asked for while this one is
  // computed; where there is none, an address that does no harm.
  const char* NextBlock(const KvSideView& view, int64_t group,
                        int64_t next) const {
    if (next >= slots_.end) return reinterpret_cast<const char*>(scratch_.q);
    return RunAt(view, group, next, slots_.end).address;
  }

  void LoadKeys(int64_t block, VisibleRange needed) const {
    const char* addresses[kAttentionBlockSlots];
    FindSlots(params_.key, key_group_, block, needed, addresses);
    switch (params_.key.dtype) {
      case DType::kF32:
        return TransposeRows<float>(addresses, kAttentionBlockSlots,
                                    params_.key.width, scratch_.keys);
      case DType::kF16:
        return TransposeRows<F16>(addresses, kAttentionBlockSlots,
                                  params_.key.width, scratch_.keys);
      case DType::kBf16:
        return TransposeRows<Bf16>(addresses, kAttentionBlockSlots,
                                   params_.key.width, scratch_.keys);
    }
  }

  template <typename T>
  void ConvertValues(const char* const* addresses, int64_t begin,
                     int64_t end) const {
    for (int64_t s = begin; s < end; ++s) {
      const T* from = reinterpret_cast<const T*>(addresses[s]);
      float* to = scratch_.values + s * padded_;
      int64_t i = 0;
      for (; i + kVecLanes <= width_; i += kVecLanes) {
        hn::StoreU(LoadFloats(from + i), kFloats, to + i);
      }
      for (; i < width_; ++i) to[i] = ToFloat(from[i]);
    }
  }

  void LoadValues(int64_t block, VisibleRange needed) const {
    const char* addresses[kAttentionBlockSlots];
    FindSlots(params_.value, value_group_, block, needed, addresses);
    const int64_t begin = needed.begin - block;
    const int64_t end = needed.end - block;
    switch (params_.value.dtype) {
      case DType::kF32:
        return ConvertValues<float>(addresses, begin, end);
      case DType::kF16:
        return ConvertValues<F16>(addresses, begin, end);
      case DType::kBf16:
        return ConvertValues<Bf16>(addresses, begin, end);
    }
  }

  // c = a b for `rows` rows, columns in steps of a tile. The tiles of the first
  // rows ask for the memory at args.ahead, one part after the other.
  template <typename T>
  static void Multiply(TileArgs args, int64_t rows, int64_t columns) {
    const TileArgs start = args;
    for (int64_t row = 0; row < rows;) {
      const int64_t tiles = (rows - row + kTileRows - 1) / kTileRows;
      const auto height = static_cast<int>((rows - row) / tiles);
      for (int64_t column = 0; column < columns; column += kTileColumns) {
        args.a = start.a + row * start.a_stride;
        args.b = static_cast<const T*>(start.b) + column;
        args.c = start.c + row * start.c_stride + column;
        RunTile<T>(height, args);
        if (args.ahead != nullptr) args.ahead += args.ahead_step * args.depth;
      }
      args.ahead = nullptr;
      row += height;
    }
  }

  void AddBlock(int64_t block, VisibleRange needed) const {
    LoadKeys(block, needed);
    if (!streams_) LoadValues(block, needed);
    TileArgs scores = {};
    scores.depth = params_.key.width;
    scores.a = scratch_.q;
    scores.a_stride = params_.key.width;
    scores.b = scratch_.keys;
    scores.b_stride = kAttentionBlockSlots;
    scores.c = scratch_.scores;
    scores.c_stride = kAttentionBlockSlots;
    if (streams_) {
      // Two columns of tiles, width lines each: 64 slots of 2-byte numbers.
      scores.ahead =
          NextBlock(params_.key, key_group_, block + kAttentionBlockSlots);
      scores.ahead_step = 64;
    }
    Multiply<float>(scores, rows_, kAttentionBlockSlots);
    // Rows that see the same part of the block share its values.
    for (int64_t r = 0; r < rows_;) {
      const VisibleRange visible = InBlock(r, block);
      int64_t end = r + 1;
      while (end < rows_) {
        const VisibleRange other = InBlock(end, block);
        if (other.begin != visible.begin || other.end != visible.end) break;
        ++end;
      }
      if (visible.begin < visible.end) {
        for (int64_t row = r; row < end; ++row) Softmax(row, visible);
        if (streams_) {
          StreamValues(block, r, end, visible);
        } else {
          AddValues(r, end, visible);
        }
      }
      r = end;
    }
  }

  // Products of the weights [row_begin, row_end) of a run of slots; b is set by
  // the caller.
  TileArgs ValueArgs(int64_t row_begin, int64_t slot, int64_t count) const {
    TileArgs args = {};
    args.depth = count;
    args.a = scratch_.scores + row_begin * kAttentionBlockSlots + slot;
    args.a_stride = kAttentionBlockSlots;
    args.c = scratch_.out + row_begin * padded_;
    args.c_stride = padded_;
    args.accumulate = true;
    return args;
  }

  // Many rows: values were converted once for all of them.
  void AddValues(int64_t row_begin, int64_t row_end,
                 VisibleRange visible) const {
    TileArgs args =
        ValueArgs(row_begin, visible.begin, visible.end - visible.begin);
    args.b = scratch_.values + visible.begin * padded_;
    args.b_stride = padded_;
    Multiply<float>(args, row_end - row_begin, padded_);
  }

  // Few rows: values are read where they lie.
  void StreamValues(int64_t block, int64_t row_begin, int64_t row_end,
                    VisibleRange visible) const {
    const KvSideView& view = params_.value;
    const char* ahead =
        NextBlock(view, value_group_, block + kAttentionBlockSlots);
    for (int64_t s = visible.begin; s < visible.end;) {
      const Run run = RunAt(view, value_group_, block + s, block + visible.end);
      TileArgs args = ValueArgs(row_begin, s, run.count);
      args.b = run.address;
      args.b_stride = view.slot_stride_bytes / DTypeBytes(view.dtype);
      args.ahead = ahead;
      args.ahead_step = kTileColumns * DTypeBytes(view.dtype);
      const int64_t rows = row_end - row_begin;
      switch (view.dtype) {
        case DType::kF32:
          Multiply<float>(args, rows, width_);
          break;
        case DType::kF16:
          Multiply<F16>(args, rows, width_);
          break;
        case DType::kBf16:
          Multiply<Bf16>(args, rows, width_);
          break;
      }
      ahead += run.count * view.slot_stride_bytes;
      s += run.count;
    }
  }

  // Scores become weights; what was summed before is brought to the new
  // maximum.
  void Softmax(int64_t r, VisibleRange visible) const {
    constexpr int kVecs = static_cast<int>(kAttentionBlockSlots) / kVecLanes;
    float* scores = scratch_.scores + r * kAttentionBlockSlots;
    const Vec scale = Broadcast(params_.scale);
    Vec vecs[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      vecs[v] = hn::Mul(LoadFloats(scores + v * kVecLanes), scale);
    }
    if (visible.end - visible.begin < kAttentionBlockSlots) {
      const Vec begin = Broadcast(static_cast<float>(visible.begin));
      const Vec end = Broadcast(static_cast<float>(visible.end));
      for (int v = 0; v < kVecs; ++v) {
        const Vec slot = hn::Iota(kFloats, static_cast<float>(v * kVecLanes));
        vecs[v] =
            hn::IfThenElse(hn::And(hn::Ge(slot, begin), hn::Lt(slot, end)),
                           vecs[v], Broadcast(kNothing));
      }
    }
    Wide lanes = MakeWide([](int) { return Broadcast(kNothing); });
    for (int v = 0; v < kVecs; ++v) {
      Vec& lane = lanes.part[v % kVecsPerWide];
      lane = Larger(vecs[v], lane);
    }
    const float block_max = MaxOf(lanes);
    const float max = scratch_.max[r] > block_max ? scratch_.max[r] : block_max;
    const float correction =
        hn::GetLane(ExpVec(Broadcast(scratch_.max[r] - max)));
    const Vec max_vec = Broadcast(max);
    lanes = MakeWide([](int) { return hn::Zero(kFloats); });
    for (int v = 0; v < kVecs; ++v) {
      const Vec weight = ExpVec(hn::Sub(vecs[v], max_vec));
      hn::StoreU(weight, kFloats, scores + v * kVecLanes);
      Vec& lane = lanes.part[v % kVecsPerWide];
      lane = hn::Add(lane, weight);
    }
    scratch_.sum[r] = std::fma(scratch_.sum[r], correction, SumOf(lanes));
    scratch_.max[r] = max;
    float* out = scratch_.out + r * padded_;
    const Vec correction_vec = Broadcast(correction);
    for (int64_t i = 0; i < padded_; i += kVecLanes) {
      hn::StoreU(hn::Mul(LoadFloats(out + i), correction_vec), kFloats,
                 out + i);
    }
  }

  void MergeOut(const float* part, float old_factor, float new_factor,
                float* out) const {
    const Vec old_vec = Broadcast(old_factor);
    const Vec new_vec = Broadcast(new_factor);
    int64_t i = 0;
    for (; i + kVecLanes <= width_; i += kVecLanes) {
      const Vec added = hn::Mul(LoadFloats(part + i), new_vec);
      hn::StoreU(Fma(LoadFloats(out + i), old_vec, added), kFloats, out + i);
    }
    for (; i < width_; ++i) {
      out[i] = std::fma(out[i], old_factor, part[i] * new_factor);
    }
  }

  const PagedAttentionParams& params_;
  const AttentionUnit unit_;
  const AttentionScratch scratch_;
  const int64_t heads_per_kv_;
  const int64_t key_group_;
  const int64_t value_group_;
  const int64_t rows_;
  const int64_t width_;
  const int64_t padded_;
  const VisibleRange slots_;
  // Few rows make little of a block: it is used where it lies as far as
  // possible, and the next one is asked for meanwhile.
  const bool streams_;
};

void ComputeUnit(const PagedAttentionParams& params, const AttentionUnit& unit,
                 const AttentionScratch& scratch) {
  const UnitWorker worker(params, unit, scratch);
  const VisibleRange slots = UnitSlots(params, unit);
  AttentionTotal total;
  worker.ClearTotal(&total);
  if (slots.begin >= slots.end) return;
  worker.LoadQueries();
  for (int64_t split = slots.begin / kAttentionSplitSlots;
       split * kAttentionSplitSlots < slots.end; ++split) {
    worker.ComputeSplit(split);
    worker.Merge(scratch, &total);
  }
  worker.Finish(total);
}

void ComputeSplit(const PagedAttentionParams& params, const AttentionUnit& unit,
                  int64_t split, const AttentionScratch& scratch) {
  const UnitWorker worker(params, unit, scratch);
  worker.LoadQueries();
  worker.ComputeSplit(split);
}

// Merges splits computed by others: `first` starts the unit's total, `last`
// ends it.
void MergeSplit(const PagedAttentionParams& params, const AttentionUnit& unit,
                const AttentionScratch& part, bool first, bool last,
                AttentionTotal* total) {
  const UnitWorker worker(params, unit, part);
  if (first) worker.ClearTotal(total);
  worker.Merge(part, total);
  if (last) worker.Finish(*total);
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

// Enough units for all threads: each is one thread's from beginning to end.
void RunByUnits(const PagedAttentionParams& params, float* scratch,
                CpuStream& stream) {
  const int64_t floats = AttentionScratch::Floats(params);
  std::atomic<int64_t> next{0};
  stream.pool().Run([&](int thread) {
    const auto memory = AttentionScratch::Of(params, scratch + floats * thread);
    UnitCursor cursor(params);
    AttentionUnit unit;
    while (cursor.MoveTo(next.fetch_add(1, std::memory_order_relaxed), &unit)) {
      HWY_DYNAMIC_DISPATCH(ComputeUnit)(params, unit, memory);
    }
  });
}

// Few units over long contexts: threads take splits, as many at a time as there
// are threads, and the caller merges them in order.
class SplitRunner {
 public:
  SplitRunner(const PagedAttentionParams& params, float* scratch,
              CpuStream& stream)
      : params_(params), scratch_(scratch), stream_(stream) {}

  void Add(const AttentionUnit& unit) {
    const VisibleRange slots = UnitSlots(params_, unit);
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
            (params_, wave_[i].unit, wave_[i].split, MemoryOf(i));
          }
        });
    for (int64_t i = 0; i < count_; ++i) {
      HWY_DYNAMIC_DISPATCH(MergeSplit)
      (params_, wave_[i].unit, MemoryOf(i), wave_[i].first, wave_[i].last,
       &total_);
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

  AttentionScratch MemoryOf(int64_t task) const {
    return AttentionScratch::Of(
        params_, scratch_ + AttentionScratch::Floats(params_) * task);
  }

  const PagedAttentionParams& params_;
  float* const scratch_;
  CpuStream& stream_;
  Task wave_[kMaxWave];
  int count_ = 0;
  AttentionTotal total_;
};

}  // namespace

int64_t PagedAttentionScratch(const PagedAttentionParams& params, int threads) {
  return AttentionScratch::Floats(params) * threads;
}

void PagedAttentionSimd(const PagedAttentionParams& params, float* scratch,
                        CpuStream& stream) {
  const int threads = stream.pool().num_threads();
  int64_t units = 0;
  bool splits = false;
  {
    UnitCursor cursor(params);
    AttentionUnit unit;
    for (; units < threads && cursor.MoveTo(units, &unit); ++units) {
      const VisibleRange slots = UnitSlots(params, unit);
      if (slots.begin >= slots.end) return RunByUnits(params, scratch, stream);
      splits = splits || slots.end - slots.begin > kAttentionSplitSlots;
    }
  }
  if (units >= threads || !splits) return RunByUnits(params, scratch, stream);
  SplitRunner runner(params, scratch, stream);
  UnitCursor cursor(params);
  AttentionUnit unit;
  for (int64_t i = 0; cursor.MoveTo(i, &unit); ++i) runner.Add(unit);
  runner.Flush();
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
