// Adds a block's values to the outputs of rows. An output is a sum of weights
// times latents, which are read into the CPU cache once for all rows. For
// inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_VALUE_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_VALUE_SUMS_INL_H_
#undef KVASIR_KERNELS_VALUE_SUMS_INL_H_
#else
#define KVASIR_KERNELS_VALUE_SUMS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/attention/cpu/code_dots.h"
#include "kernels/attention/cpu/latent_tile-inl.h"
#include "kernels/attention/cpu/pair_tile-inl.h"
#include "kernels/attention/cpu/rebuild-inl.h"
#include "kernels/attention/cpu/value_lift-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/grid/attention_rows.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Up to this number of rows, unquantized values are read directly from the KV
// cache instead of from a copy in a tile.
inline constexpr int64_t kStreamRows = 12;

// Like Multiply, for any number of columns. The unused columns of the last
// register tile are not written to c.
template <typename T>
void MultiplyColumns(TileArgs args, int64_t rows, int64_t columns) {
  const int64_t whole = columns / kTileColumns * kTileColumns;
  if (whole > 0) Multiply<T>(args, rows, whole);
  const int64_t rest = columns - whole;
  if (rest == 0) return;
  HWY_ALIGN float tile[kTileRows * kTileColumns];
  args.b = static_cast<const T*>(args.b) + whole;
  args.ahead = nullptr;
  float* const c = args.c + whole;
  const int64_t c_stride = args.c_stride;
  args.c = tile;
  args.c_stride = kTileColumns;
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t height = std::min<int64_t>(kTileRows, rows - row);
    for (int64_t r = 0; r < height; ++r) {
      std::copy_n(c + (row + r) * c_stride, rest, tile + r * kTileColumns);
    }
    RunTile<T>(static_cast<int>(height), args);
    for (int64_t r = 0; r < height; ++r) {
      std::copy_n(tile + r * kTileColumns, rest, c + (row + r) * c_stride);
    }
    args.a += height * args.a_stride;
  }
}

// Sums weights times values for the rows of a panel.
// Threads: each object is used by one thread only.
class ValueSums {
 public:
  // `state` points to the memory of the panel's PanelState.
  ValueSums(const AttentionGrid& grid, const UnitRows& unit, float* scratch,
            float* state, BlockLoader* loader, ValueLifter* lifter)
      : params_(grid.params()),
        grid_(grid),
        unit_(unit),
        scratch_(scratch),
        state_(state),
        loader_(*loader),
        lifter_(*lifter) {}

  // Adds the values of those slots of the loader's block that are read as
  // `read`. The weights are in scratch().scores.
  void AddBlock(ReadAs read) {
    read_ = read;
    const auto add = [&](int64_t p, const HeadSpan& span) {
      if (grid_.value(p).lifted) {
        AddLifted(p, span);
      } else if (read == ReadAs::kStored && grid_.value(p).codes) {
        AddValueCodes(p, span);
      } else {
        AddValues(p, span);
      }
    };
    if (read == ReadAs::kStored) {
      unit_.ForValueSpans(add);
    } else {
      unit_.ForExactValueSpans(add);
    }
  }

  // Ends a split: adds the sums of minima to the outputs. If a part has
  // separate sums for codes and for exact rows, combines them.
  void EndSplit() const {
    unit_.ForValueSpans([&](int64_t p, const HeadSpan& span) {
      if (grid_.value(p).lifted) return;
      if (grid_.value(p).sums_weights) {
        ApplyFixedRanges(p, span);
      } else if (grid_.value(p).codes && !grid_.value(p).fixed_ranges) {
        AddMinima(p, span);
      }
    });
  }

 private:
  float* OutRow(int64_t p, int64_t r) const {
    return state_ + grid_.state().out + r * grid_.out_width() +
           grid_.value(p).out_offset;
  }
  float* MinimaRow(int64_t p, int64_t r) const {
    return state_ + grid_.state().out_minima + r * grid_.minima_width() +
           grid_.value(p).minima_offset;
  }

  // Returns the arguments for multiplying the rows' weights by the values of
  // consecutive slots. The caller sets b.
  TileArgs ValueArgs(const float* weights, RowRange rows, VisibleRange slots,
                     float* to, int64_t to_stride) const {
    TileArgs args = {};
    args.depth = slots.end - slots.begin;
    args.a = weights + rows.begin * kBlock + slots.begin;
    args.a_stride = kBlock;
    args.c = to;
    args.c_stride = to_stride;
    args.accumulate = true;
    return args;
  }
  const float* Weights() const { return scratch_ + grid_.scratch().scores; }

  void AddLifted(int64_t p, const HeadSpan& span) {
    const float* tile = lifter_.Lift(p, span);
    const int64_t stride = grid_.value(p).tile_stride;
    unit_.ForValueSlots(read_, unit_.RowsOf(span), loader_.block(),
                        [&](RowRange rows, VisibleRange visible) {
                          AddTile(Weights(), rows, visible, {tile, stride},
                                  params_.values[p].lift->dims,
                                  OutRow(p, rows.begin));
                        });
  }

  void AddValues(int64_t p, const HeadSpan& span) {
    const LatentPartArgs& part = params_.values[p].latents;
    const LatentGroup& group = part.groups[span.group];
    const RowRange span_rows = unit_.RowsOf(span);
    const int64_t block = loader_.block();
    loader_.StartGroup(part, group);
    if (span_rows.size() <= kStreamRows && group.width % kTileColumns == 0 &&
        grid_.exact(part) == nullptr) {
      // For few rows, copying the block into a tile costs more than it saves,
      // so the block is read in place.
      unit_.ForValueSlots(
          read_, span_rows, block, [&](RowRange rows, VisibleRange visible) {
            VisitDType(part.dtype, [&](auto type) {
              Stream<decltype(type)>(part, group, {0, group.width}, Weights(),
                                     rows, visible, OutRow(p, rows.begin));
            });
          });
      return;
    }
    const AttentionGrid::Chunks chunks =
        grid_.chunks(grid_.value(p).first_group, span.group);
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      const int64_t stride = PadTile(chunk->width);
      loader_.LoadValues(part, group, *chunk, stride);
      unit_.ForValueSlots(
          read_, span_rows, block, [&](RowRange rows, VisibleRange visible) {
            AddTile(Weights(), rows, visible, {loader_.tile(), stride},
                    chunk->width, OutRow(p, rows.begin) + chunk->begin);
          });
    }
  }

  static int64_t PadTile(int64_t columns) {
    return (columns + kTileColumns - 1) / kTileColumns * kTileColumns;
  }

  // The values of a block, [64, stride].
  struct ValueTile {
    const float* values;
    int64_t stride;
  };

  // Adds weights times values that were copied into a tile once for all rows,
  // which is faster for many rows.
  void AddTile(const float* weights, RowRange rows, VisibleRange visible,
               ValueTile tile, int64_t columns, float* to) const {
    TileArgs args = ValueArgs(weights, rows, visible, to, grid_.out_width());
    args.b = tile.values + visible.begin * tile.stride;
    args.b_stride = tile.stride;
    MultiplyColumns<float>(args, rows.size(), columns);
  }

  // `count` numbers of a slot, from byte `offset_bytes` of its data on.
  struct Columns {
    int64_t offset_bytes;
    int64_t count;
  };

  // Adds weights times unquantized values that are read in place, which is
  // faster for few rows.
  template <typename T>
  void Stream(const LatentPartArgs& part, const LatentGroup& group,
              Columns columns, const float* weights, RowRange rows,
              VisibleRange visible, float* to) const {
    const int64_t block = loader_.block();
    for (int64_t s = visible.begin; s < visible.end;) {
      const BlockLoader::Run run =
          loader_.RunAt(part, group, block + s, block + visible.end);
      const char* from = run.codes + columns.offset_bytes;
      const VisibleRange slots = {s, s + run.count};
      if (std::is_same_v<T, Bf16> && TakesValuePairs(rows.size())) {
        ValuePairsArgs args = {};
        args.depth = run.count;
        args.slots = from;
        args.slot_bytes = group.codes.stride_bytes;
        args.a = weights + rows.begin * kBlock + s;
        args.c = to;
        args.c_stride = grid_.out_width();
        args.columns = columns.count;
        args.ahead = loader_.ahead();
        RunValuePairs(rows.size(), args);
      } else {
        constexpr int64_t kTileBytes =
            kTileColumns * static_cast<int64_t>(sizeof(T));
        TileArgs args = ValueArgs(weights, rows, slots, to, grid_.out_width());
        args.b_stride =
            group.codes.stride_bytes / static_cast<int64_t>(sizeof(T));
        args.ahead_step = kTileBytes;
        // Multiplies one tile of columns at a time, because the prefetch queue
        // seldom has contiguous memory for several tiles.
        for (int64_t tile = 0; tile < columns.count / kTileColumns; ++tile) {
          args.b = from + tile * kTileBytes;
          args.c = to + tile * kTileColumns;
          args.ahead = AskAhead(args.depth * kTileBytes, kTileBytes);
          Multiply<T>(args, rows.size(), kTileColumns);
        }
      }
      s += run.count;
    }
  }

  // Returns the address of the next `bytes` bytes of the prefetch queue, which
  // the caller then prefetches in steps of `step` bytes while it computes. If
  // `step` is longer than a cache line, or the queue cannot give that many
  // bytes (AheadLines::Take), prefetches as many lines itself and returns null.
  const char* AskAhead(int64_t bytes, int64_t step) const {
    AheadLines& ahead = *loader_.ahead();
    const char* at =
        step <= AheadLines::kLineBytes ? ahead.Take(bytes) : nullptr;
    if (at == nullptr) ahead.Ask(bytes / AheadLines::kLineBytes);
    return at;
  }

  void AddValueCodes(int64_t p, const HeadSpan& span) {
    const LatentPartArgs& part = params_.values[p].latents;
    const LatentGroup& group = part.groups[span.group];
    const AttentionGrid::ValuePart& value = grid_.value(p);
    const bool in_slots = part.static_scale == nullptr;
    const RowRange rows = unit_.RowsOf(span);
    const AttentionGrid::Chunks chunks =
        grid_.chunks(value.first_group, span.group);
    loader_.StartGroup(part, group);
    const BlockSlots& slots = loader_.FindSlots(part, group);
    if (value.sums_weights) SumWeights(p, span);
    auto* const digits = reinterpret_cast<WeightDigits*>(
        scratch_ + grid_.scratch().weight_digits);
    // The run for which `digits` was computed; -1: none yet.
    int64_t run = -1;
    for (const LatentChunk* chunk = chunks.begin; chunk != chunks.end;
         ++chunk) {
      if (in_slots) {
        loader_.LoadValueRanges(part, group, *chunk);
        if (part.num_levels == 0) SumMinima(p, span, *chunk);
      }
      const CodePiece* const pieces = grid_.pieces(*chunk);
      for (int64_t i = 0; i < chunk->num_pieces; ++i) {
        if (run < 0 || (in_slots && pieces[i].run != run)) {
          run = pieces[i].run;
          CutWeights(rows, in_slots ? loader_.scales(i) : nullptr,
                     value.level_step, !in_slots || pieces[i].place.bits() == 8,
                     digits);
        }
        ValueDotsArgs args = {};
        args.slots = slots.codes;
        args.begin = slots.begin;
        args.end = slots.end;
        args.room = slots.room;
        args.place = pieces[i].place;
        args.width = pieces[i].width;
        args.levels = value.levels;
        static_assert(kValueDotsFloats <= kChunkChannels * kBlock);
        args.numbers = loader_.StartTile();
        args.digits = digits;
        args.c = OutRow(p, rows.begin) + pieces[i].begin;
        args.c_stride = grid_.out_width();
        args.ahead = loader_.ahead();
        RunValueDots(rows.size(), args);
      }
    }
  }

  // Writes the digits of the rows' weights for the block's slots, times `scale`
  // [64] if it is not null. The units are multiplied by `step`. Slots that a
  // row does not read get 0. Sets the sums of the integers only if `sums`.
  void CutWeights(RowRange rows, const float* scale, float step, bool sums,
                  WeightDigits* digits) const {
    int64_t next = rows.begin;
    const auto clear = [&](int64_t end) {
      for (; next < end; ++next) digits[next - rows.begin] = WeightDigits();
    };
    unit_.ForValueSlots(read_, rows, loader_.block(),
                        [&](RowRange own, VisibleRange visible) {
                          clear(own.begin);
                          HWY_ALIGN float masked[kBlock];
                          for (; next < own.end; ++next) {
                            CutRow(WeightsOf(next, visible, masked), scale,
                                   step, sums, digits + (next - rows.begin));
                          }
                        });
    clear(rows.end);
  }
  static void CutRow(const float* weights, const float* scale, float step,
                     bool sums, WeightDigits* digits) {
    const hn::RebindToSigned<Floats> d32;
    HWY_ALIGN float scaled[kBlock];
    // The bits of magnitudes, as integers, have the same order as the
    // magnitudes. Infinity and then NaN are above all numbers.
    auto largest = hn::Zero(d32);
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      Vec x = LoadFloats(weights + s);
      if (scale != nullptr) x = hn::Mul(x, LoadFloats(scale + s));
      hn::Store(x, kFloats, scaled + s);
      largest = hn::Max(largest, hn::BitCast(d32, hn::Abs(x)));
    }
    const DigitScale cut = DigitScale::Of(
        std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(d32, largest))),
        kMostWeightDigits);
    if (cut.inverse == 0.0f) *digits = WeightDigits();
    digits->unit = cut.unit * step;
    if (cut.inverse == 0.0f) return;
    const auto integer = [&](int64_t s) {
      return hn::NearestInt(
          hn::Mul(hn::Load(kFloats, scaled + s), Broadcast(cut.inverse)));
    };
    auto sum = hn::Zero(d32);
    for (int64_t q = 0; q < kBlock / 4; q += kVecLanes) {
      const auto even = integer(q);
      const auto odd = integer(q + 16);
      const auto even_above = integer(q + 32);
      const auto odd_above = integer(q + 48);
      sum = hn::Add(
          sum, hn::Add(hn::Add(even, odd), hn::Add(even_above, odd_above)));
      const auto store = [&](auto low, auto high, uint32_t* to) {
        hn::StoreU(hn::BitCast(kWords, hn::Or(low, hn::ShiftLeft<16>(high))),
                   kWords, to + q);
      };
      store(even, even_above, digits->even);
      store(odd, odd_above, digits->odd);
    }
    digits->sum = sums ? hn::GetLane(hn::SumOfLanes(d32, sum)) : 0;
  }

  // For each run that begins in the chunk, adds the sum of weight * minimum
  // over the block's slots to the rows' sums of minima.
  void SumMinima(int64_t p, const HeadSpan& span, const LatentChunk& chunk) {
    const CodePiece* pieces = grid_.pieces(chunk);
    unit_.ForValueSlots(read_, unit_.RowsOf(span), loader_.block(),
                        [&](RowRange rows, VisibleRange visible) {
                          for (int64_t i = 0; i < chunk.num_pieces; ++i) {
                            if (!pieces[i].starts_run) continue;
                            SumProducts(
                                rows, visible, loader_.minima(i),
                                MinimaRow(p, rows.begin) + pieces[i].run);
                          }
                        });
  }

  // Adds the weights of the block's slots to each row's sum of weights. Static
  // ranges need this sum if there are also exact rows.
  void SumWeights(int64_t p, const HeadSpan& span) {
    HWY_ALIGN float ones[kBlock];
    std::fill_n(ones, kBlock, 1.0f);
    unit_.ForValueSlots(read_, unit_.RowsOf(span), loader_.block(),
                        [&](RowRange rows, VisibleRange visible) {
                          SumProducts(rows, visible, ones,
                                      MinimaRow(p, rows.begin));
                        });
  }

  // For each row, adds the dot product of the row's weights and `factors` [64]
  // over the block's slots to the row's sum. `sums` points to the first row's
  // sum.
  void SumProducts(RowRange rows, VisibleRange visible, const float* factors,
                   float* sums) const {
    HWY_ALIGN float masked[kBlock];
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      *sums = *sums + Dot(WeightsOf(r, visible, masked), factors);
      sums += grid_.minima_width();
    }
  }

  // Returns a row's weights. If values have exact slots, the weights of slots
  // outside `visible` are replaced by zeros, in a copy at `masked`. Otherwise
  // the softmax has made them 0.
  const float* WeightsOf(int64_t r, VisibleRange visible, float* masked) const {
    const float* weights = Weights() + r * kBlock;
    const bool whole = visible.begin == 0 && visible.end == kBlock;
    if (whole || !params_.value_exact.any()) return weights;
    std::fill_n(masked, kBlock, 0.0f);
    std::copy(weights + visible.begin, weights + visible.end,
              masked + visible.begin);
    return masked;
  }

  // For a part with static ranges and exact rows: applies the ranges to the
  // sums of codes, and then adds the sums of exact rows.
  void ApplyFixedRanges(int64_t p, const HeadSpan& span) const {
    const LatentPartArgs& part = params_.values[p].latents;
    const LatentGroup& group = part.groups[span.group];
    const float* scale = part.static_scale + group.column;
    const float* minimum = part.static_minimum + group.column;
    const RowRange rows = unit_.RowsOf(span);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float weights = MinimaRow(p, r)[0];
      const float* exact = OutRow(p + grid_.num_stored_values(), r);
      float* out = OutRow(p, r);
      for (int64_t i = 0; i < group.width; ++i) {
        out[i] = std::fma(out[i], scale[i], weights * minimum[i]) + exact[i];
      }
    }
  }

  static float Dot(const float* a, const float* b) {
    Wide lanes = MakeWide([](int) { return hn::Zero(kFloats); });
    for (int64_t s = 0; s < kBlock; s += kLanes) {
      for (int i = 0; i < kVecsPerWide; ++i) {
        const int64_t at = s + i * kVecLanes;
        lanes.part[i] =
            Fma(LoadFloats(a + at), LoadFloats(b + at), lanes.part[i]);
      }
    }
    return SumOf(lanes);
  }

  // Adds the sums of minima to the channels of their runs.
  void AddMinima(int64_t p, const HeadSpan& span) const {
    const LatentGroup& group = params_.values[p].latents.groups[span.group];
    const RowRange rows = unit_.RowsOf(span);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t run = 0; run < group.num_runs; ++run) {
        const float minimum = MinimaRow(p, r)[run];
        float* out = OutRow(p, r) + group.runs[run].begin;
        for (int64_t i = 0; i < group.runs[run].width; ++i) {
          out[i] = out[i] + minimum;
        }
      }
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const UnitRows& unit_;
  float* const scratch_;
  float* const state_;
  BlockLoader& loader_;
  ValueLifter& lifter_;
  // The form in which AddBlock reads values.
  ReadAs read_ = ReadAs::kStored;
};

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_VALUE_SUMS_INL_H_
