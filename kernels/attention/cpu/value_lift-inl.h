// Computes lifted values from latents (ValueLiftArgs in paged_attention.h), a
// block of 64 slots at a time. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_VALUE_LIFT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_VALUE_LIFT_INL_H_
#undef KVASIR_KERNELS_VALUE_LIFT_INL_H_
#else
#define KVASIR_KERNELS_VALUE_LIFT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/cpu/latent_tile-inl.h"
#include "kernels/attention/cpu/rebuild-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Computes the lifted values of one block at a time.
// Threads: each object is used by one thread only.
class ValueLifter {
 public:
  ValueLifter(const AttentionGrid& grid, float* scratch, BlockLoader* loader)
      : params_(grid.params()),
        grid_(grid),
        loader_(*loader),
        values_(scratch + grid.scratch().values),
        raw_(scratch + grid.scratch().lift_raw),
        sums_(scratch + grid.scratch().column_sums) {}

  // set_holds(true) declares that all values of the block are already lifted.
  // Lift then only returns them.
  void set_holds(bool holds) { holds_ = holds; }

  // Returns the values of the block's slots for the span's KV head, [64,
  // tile_stride of the part]. They are valid until the next call for the same
  // part. The values of slots that no row sees are undefined.
  const float* Lift(int64_t part_index, const HeadSpan& span) {
    const AttentionGrid::ValuePart& part = grid_.value(part_index);
    const AttentionValuePartArgs& from = params_.values[part_index];
    float* const tile = values_ + part.tile_offset;
    if (holds_) return tile;
    loader_.StartGroup(from.latents, from.latents.groups[span.group]);
    const Task task = {from.latents,
                       from.latents.groups[span.group],
                       grid_.chunks(part.first_group, span.group),
                       from.lift->up[span.kv_head],
                       from.lift->dims,
                       part.tile_stride,
                       tile};
    if (!part.codes) {
      LiftNumbers(task);
    } else if (part.fixed_ranges) {
      LiftFixed(task);
    } else {
      LiftCodes(task);
    }
    return tile;
  }

 private:
  struct Task {
    const LatentPartArgs& part;
    const LatentGroup& group;
    AttentionGrid::Chunks chunks;
    const float* up;  // [R', d]
    int64_t dims;     // d
    int64_t stride;   // distance between the values of two slots
    float* tile;
  };

  // Some channels of the 64 slots in the loader's tile: the `depth` channels of
  // slot s begin at numbers + s * stride.
  struct Factors {
    const float* numbers;
    int64_t stride;
    int64_t depth;
  };

  // Computes the matrix product factors.numbers * up and stores it in `to`, or
  // adds it to `to` if `accumulate`. `to` is [64, task.stride].
  void Multiply64(const Task& task, const Factors& factors, const float* up,
                  float* to, bool accumulate) const {
    const BlockSlots& slots = loader_.slots();
    const int64_t whole = task.dims / kTileColumns * kTileColumns;
    const int64_t rest = task.dims - whole;
    TileArgs args = {};
    args.depth = factors.depth;
    args.a = factors.numbers + slots.begin * factors.stride;
    args.a_stride = factors.stride;
    args.b = up;
    args.b_stride = task.dims;
    args.c = to + slots.begin * task.stride;
    args.c_stride = task.stride;
    args.accumulate = accumulate;
    if (whole > 0) Multiply<float>(args, slots.end - slots.begin, whole);
    if (rest == 0) return;
    HWY_ALIGN float columns[kChunkChannels * kTileColumns];
    for (int64_t c = 0; c < factors.depth; ++c) {
      float* row = columns + c * kTileColumns;
      std::copy_n(up + c * task.dims + whole, rest, row);
      std::fill(row + rest, row + kTileColumns, 0.0f);
    }
    args.b = columns;
    args.b_stride = kTileColumns;
    args.c += whole;
    Multiply<float>(args, slots.end - slots.begin, kTileColumns);
  }

  void LiftNumbers(const Task& task) const {
    for (const LatentChunk* chunk = task.chunks.begin; chunk != task.chunks.end;
         ++chunk) {
      loader_.LoadValues(task.part, task.group, *chunk, kChunkChannels);
      Multiply64(task, {loader_.tile(), kChunkChannels, chunk->width},
                 task.up + chunk->begin * task.dims, task.tile,
                 chunk->begin > 0);
    }
  }

  static int64_t PieceStride(const CodePiece& piece) {
    return (piece.width + kTileColumns - 1) / kTileColumns * kTileColumns;
  }

  void LiftCodes(const Task& task) const {
    for (const LatentChunk* chunk = task.chunks.begin; chunk != task.chunks.end;
         ++chunk) {
      loader_.LoadValueRanges(task.part, task.group, *chunk);
      const CodePiece* pieces = grid_.pieces(*chunk);
      for (int64_t p = 0; p < chunk->num_pieces; ++p) {
        const CodePiece& piece = pieces[p];
        const int64_t stride = PieceStride(piece);
        loader_.LoadValueCodes(task.part, task.group, piece, stride);
        Multiply64(task, {loader_.tile(), stride, piece.width},
                   task.up + piece.begin * task.dims, raw_, !piece.starts_run);
        if (!piece.ends_run) continue;
        const CodeRun& run = task.group.runs[piece.run];
        SumColumns(task, {run.begin, run.begin + run.width}, nullptr);
        ApplyRanges(task, loader_.scales(p), loader_.minima(p), piece.run == 0);
      }
    }
  }

  // Adds the contribution of a run of codes to the values: the tile becomes
  // fma(sums_, minimum, fma(raw_, scale, tile)). If `is_new`, its old content
  // counts as 0.
  void ApplyRanges(const Task& task, const float* scales, const float* minima,
                   bool is_new) const {
    const BlockSlots& slots = loader_.slots();
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      const Vec scale = Broadcast(scales[s]);
      const Vec minimum = Broadcast(minima[s]);
      const float* raw = raw_ + s * task.stride;
      float* to = task.tile + s * task.stride;
      for (int64_t i = 0; i < task.stride; i += kVecLanes) {
        const Vec old = is_new ? hn::Zero(kFloats) : LoadFloats(to + i);
        const Vec scaled = Fma(LoadFloats(raw + i), scale, old);
        hn::StoreU(Fma(LoadFloats(sums_ + i), minimum, scaled), kFloats,
                   to + i);
      }
    }
  }

  void LiftFixed(const Task& task) const {
    const float* scale = task.part.static_scale + task.group.column;
    for (const LatentChunk* chunk = task.chunks.begin; chunk != task.chunks.end;
         ++chunk) {
      const CodePiece* pieces = grid_.pieces(*chunk);
      for (int64_t p = 0; p < chunk->num_pieces; ++p) {
        const CodePiece& piece = pieces[p];
        const int64_t stride = PieceStride(piece);
        loader_.LoadValueCodes(task.part, task.group, piece, stride);
        for (int64_t first = 0; first < piece.width; first += kBlock) {
          const int64_t depth = std::min(kBlock, piece.width - first);
          const int64_t begin = piece.begin + first;
          for (int64_t c = 0; c < depth; ++c) {
            const float* up = task.up + (begin + c) * task.dims;
            float* scaled = raw_ + c * task.dims;
            for (int64_t i = 0; i < task.dims; ++i) {
              scaled[i] = up[i] * scale[begin + c];
            }
          }
          Multiply64(task, {loader_.tile() + first, stride, depth}, raw_,
                     task.tile, begin > 0);
        }
      }
    }
    SumColumns(task, {0, task.group.width},
               task.part.static_minimum + task.group.column);
    const BlockSlots& slots = loader_.slots();
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      float* to = task.tile + s * task.stride;
      for (int64_t i = 0; i < task.stride; i += kVecLanes) {
        hn::StoreU(hn::Add(LoadFloats(to + i), LoadFloats(sums_ + i)), kFloats,
                   to + i);
      }
    }
  }

  struct Channels {
    int64_t begin;
    int64_t end;
  };

  // Computes the contribution of the codes' minima to each element of a value.
  // If minima are stored in slots, sums_[i] is the sum of column i of `up` over
  // `channels`; the caller multiplies it by the minimum. If minima are static,
  // sums_[i] is the dot product of the column and the minima.
  void SumColumns(const Task& task, Channels channels,
                  const float* minima) const {
    constexpr int64_t kWide = 4 * kVecLanes;
    int64_t i = 0;
    for (; i + kWide <= task.dims; i += kWide) {
      SumVecs<4>(task, channels, minima, i);
    }
    for (; i + kVecLanes <= task.dims; i += kVecLanes) {
      SumVecs<1>(task, channels, minima, i);
    }
    for (; i < task.stride; ++i) {
      float sum = 0.0f;
      for (int64_t c = channels.begin; i < task.dims && c < channels.end; ++c) {
        const float number = task.up[c * task.dims + i];
        sum =
            minima != nullptr ? std::fma(number, minima[c], sum) : sum + number;
      }
      sums_[i] = sum;
    }
  }
  template <int kVecs>
  void SumVecs(const Task& task, Channels channels, const float* minima,
               int64_t column) const {
    Vec sums[kVecs];
    for (Vec& sum : sums) sum = hn::Zero(kFloats);
    for (int64_t c = channels.begin; c < channels.end; ++c) {
      const float* up = task.up + c * task.dims + column;
      const Vec minimum = Broadcast(minima != nullptr ? minima[c] : 0.0f);
      for (int v = 0; v < kVecs; ++v) {
        const Vec number = LoadFloats(up + v * kVecLanes);
        sums[v] = minima != nullptr ? Fma(number, minimum, sums[v])
                                    : hn::Add(sums[v], number);
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(sums[v], kFloats, sums_ + column + v * kVecLanes);
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  BlockLoader& loader_;
  float* const values_;
  float* const raw_;
  float* const sums_;
  bool holds_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_VALUE_LIFT_INL_H_
