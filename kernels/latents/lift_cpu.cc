#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/latents/lift.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/latents/lift_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/linear/tile-inl.h"

#ifndef KVASIR_KERNELS_LIFT_CPU_ONCE_
#define KVASIR_KERNELS_LIFT_CPU_ONCE_
namespace kvasir::kernels {

// A part of the work, which one thread computes, has at most kLiftRows rows
// (query heads of tokens) and kLiftPanels panels (32 columns each) of a KV
// head's matrix. If rows are few, threads divide the panels, because reading
// the matrix takes most of the time. If rows are many, a thread reads its
// panels repeatedly; they stay in the second-level cache.
inline constexpr int64_t kLiftRows = 48;
inline constexpr int64_t kLiftPanels = 8;
// The most numbers of a row that one pass copies and multiplies. If rows are no
// longer than this, a tile's rows are copied only once for all panels.
inline constexpr int64_t kLiftBlockK = 512;
inline constexpr int64_t kLiftTileRows = 12;
inline constexpr int64_t kLiftScratchFloats =
    kLiftTileRows * (kLiftBlockK + kPanelColumns);
// A launch with fewer multiply-adds than this runs on one thread, because
// waking others would take longer than the work.
inline constexpr int64_t kLiftWorthWaking = 100000;

// A part of the work for one KV head, which has `queries` query heads. Row r is
// query head r % queries of token r / queries.
struct LiftPart {
  int64_t kv_head;
  int64_t queries;
  int64_t row_begin;
  int64_t row_end;
  int64_t panel_begin;
  int64_t panel_end;
};

}  // namespace kvasir::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Memory of a tile: the copied rows and the results.
struct TileMemory {
  float* rows;     // [12, kLiftBlockK]
  float* results;  // [12, 32]
};

int64_t HeadOf(const LiftPart& part, int64_t row) {
  return part.kv_head * part.queries + row % part.queries;
}
int64_t TokenOf(const LiftArgs& params, const LiftPart& part, int64_t row) {
  return params.first_row + row / part.queries;
}

void CopyRows(const LiftArgs& params, const LiftPart& part, int64_t row,
              int rows, int64_t k, int64_t depth, float* to) {
  for (int r = 0; r < rows; ++r) {
    std::memcpy(to + r * kLiftBlockK,
                params.x +
                    TokenOf(params, part, row + r) * params.x_row_stride +
                    params.column_in[HeadOf(part, row + r)] + k,
                static_cast<size_t>(depth) * sizeof(float));
  }
}

void StoreResults(const LiftArgs& params, const LiftPart& part, int64_t row,
                  int rows, int64_t panel, const float* results) {
  const int64_t first = panel * kPanelColumns;
  const int64_t columns =
      std::min(kPanelColumns, params.matrices[part.kv_head].n - first);
  for (int r = 0; r < rows; ++r) {
    std::memcpy(params.y +
                    TokenOf(params, part, row + r) * params.y_row_stride +
                    params.column_out[HeadOf(part, row + r)] + first,
                results + r * kPanelColumns,
                static_cast<size_t>(columns) * sizeof(float));
  }
}

template <typename T>
void LiftTile(const LiftArgs& params, const LiftPart& part, int64_t row,
              int rows, const TileMemory& memory) {
  const PackedMatrixArgs& matrix = params.matrices[part.kv_head];
  const bool one_pass = matrix.k <= kLiftBlockK;
  if (one_pass) CopyRows(params, part, row, rows, 0, matrix.k, memory.rows);
  TileArgs args = {};
  args.a = memory.rows;
  args.a_stride = kLiftBlockK;
  args.b_stride = kPanelColumns;
  args.c = memory.results;
  args.c_stride = kPanelColumns;
  args.ahead_step = kPanelColumns * static_cast<int64_t>(sizeof(T));
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    for (int64_t k = 0; k < matrix.k; k += kLiftBlockK) {
      args.depth = std::min(kLiftBlockK, matrix.k - k);
      if (!one_pass) {
        CopyRows(params, part, row, rows, k, args.depth, memory.rows);
      }
      args.b = static_cast<const T*>(matrix.data) +
               (panel * matrix.k + k) * kPanelColumns;
      // Only the first tile of rows reads the matrix from memory, so only this
      // tile prefetches it.
      args.ahead = row == part.row_begin
                       ? static_cast<const char*>(args.b) + kPrefetchBytes
                       : nullptr;
      args.accumulate = k > 0;
      RunTile<T>(rows, args);
    }
    StoreResults(params, part, row, rows, panel, memory.results);
  }
}

void LiftSomeRows(const LiftArgs& params, const LiftPart& part,
                  float* scratch) {
  const TileMemory memory = {scratch, scratch + kLiftTileRows * kLiftBlockK};
  for (int64_t row = part.row_begin; row < part.row_end; row += kTileRows) {
    const int rows =
        static_cast<int>(std::min<int64_t>(kTileRows, part.row_end - row));
    switch (params.matrices[part.kv_head].dtype) {
      case DType::kF32:
        LiftTile<float>(params, part, row, rows, memory);
        break;
      case DType::kF16:
        LiftTile<F16>(params, part, row, rows, memory);
        break;
      case DType::kBf16:
        LiftTile<Bf16>(params, part, row, rows, memory);
    }
  }
}

struct Pairs {
  Vec a;
  Vec b;
};

HWY_INLINE Pairs LoadPairs(const ComplexLiftArgs& params, const float* from,
                           const int32_t* pairs) {
  const hn::RebindToSigned<Floats> d32;
  const auto f = hn::LoadU(d32, pairs);
  if (params.pairing == RopePairing::kHalfSplit) {
    return {hn::GatherIndex(kFloats, from, f),
            hn::GatherIndex(kFloats, from + params.num_pairs, f)};
  }
  const auto even = hn::Add(f, f);
  return {hn::GatherIndex(kFloats, from, even),
          hn::GatherIndex(kFloats, from + 1, even)};
}

// Computes as many channels as a vector has lanes, from channel c on.
HWY_INLINE void LiftChannels(const ComplexLiftArgs& params,
                             const ComplexChannelsArgs& channels, int64_t c,
                             const float* from, float* to) {
  Pairs pairs = LoadPairs(params, from, channels.pairs + c);
  if (channels.up != nullptr) {
    const Vec real = LoadFloats(channels.up + c);
    const Vec imaginary = LoadFloats(channels.up + channels.num_channels + c);
    pairs = {Fma(pairs.a, real, hn::Mul(pairs.b, imaginary)),
             Fma(pairs.b, real, hn::Neg(hn::Mul(pairs.a, imaginary)))};
  }
  if (params.out_pairing == RopePairing::kHalfSplit) {
    hn::StoreU(pairs.a, kFloats, to + c);
    hn::StoreU(pairs.b, kFloats, to + channels.num_channels + c);
    return;
  }
#if HWY_TARGET != HWY_SCALAR
  hn::StoreInterleaved2(pairs.a, pairs.b, kFloats, to + 2 * c);
#else
  hn::StoreU(pairs.a, kFloats, to + 2 * c);
  hn::StoreU(pairs.b, kFloats, to + 2 * c + 1);
#endif
}

void LiftChannel(const ComplexLiftArgs& params,
                 const ComplexChannelsArgs& channels, int64_t c,
                 const float* from, float* to) {
  const int64_t f = channels.pairs[c];
  const bool halves = params.pairing == RopePairing::kHalfSplit;
  float a = from[halves ? f : 2 * f];
  float b = from[halves ? params.num_pairs + f : 2 * f + 1];
  if (channels.up != nullptr) {
    const float real = channels.up[c];
    const float imaginary = channels.up[channels.num_channels + c];
    const float lifted = std::fma(a, real, b * imaginary);
    b = std::fma(b, real, -(a * imaginary));
    a = lifted;
  }
  const bool halves_out = params.out_pairing == RopePairing::kHalfSplit;
  to[halves_out ? c : 2 * c] = a;
  to[halves_out ? channels.num_channels + c : 2 * c + 1] = b;
}

void ComplexLiftRows(const ComplexLiftArgs& params, int64_t begin,
                     int64_t end) {
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < params.num_heads; ++h) {
      const ComplexChannelsArgs& channels = params.channels[h / queries];
      const float* from =
          params.x + t * params.x_row_stride + params.column_in[h];
      float* to = params.y + t * params.y_row_stride + params.column_out[h];
      int64_t c = 0;
      for (; c + kVecLanes <= channels.num_channels; c += kVecLanes) {
        LiftChannels(params, channels, c, from, to);
      }
      for (; c < channels.num_channels; ++c) {
        LiftChannel(params, channels, c, from, to);
      }
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {

HWY_EXPORT(LiftSomeRows);
HWY_EXPORT(ComplexLiftRows);

int64_t PartsOf(int64_t count, int64_t at_once) {
  return (count + at_once - 1) / at_once;
}

// Divides a launch into parts, which have consecutive indices.
class LiftParts {
 public:
  explicit LiftParts(const LiftArgs& params)
      : params_(params),
        queries_(params.num_heads / params.num_kv_heads),
        rows_(params.num_rows * queries_) {
    for (int64_t j = 0; j < params.num_kv_heads; ++j) {
      count_ += PartsOfHead(j);
      multiply_adds_ += rows_ * params.matrices[j].k * params.matrices[j].n;
    }
  }
  int64_t count() const { return count_; }
  int64_t multiply_adds() const { return multiply_adds_; }

  LiftPart at(int64_t index) const {
    LiftPart part = {};
    while (index >= PartsOfHead(part.kv_head)) {
      index -= PartsOfHead(part.kv_head);
      ++part.kv_head;
    }
    const int64_t panels = params_.matrices[part.kv_head].num_panels();
    const int64_t panel_parts = PartsOf(panels, kLiftPanels);
    part.queries = queries_;
    part.row_begin = index / panel_parts * kLiftRows;
    part.row_end = std::min(rows_, part.row_begin + kLiftRows);
    part.panel_begin = index % panel_parts * kLiftPanels;
    part.panel_end = std::min(panels, part.panel_begin + kLiftPanels);
    return part;
  }

 private:
  int64_t PartsOfHead(int64_t j) const {
    return PartsOf(rows_, kLiftRows) *
           PartsOf(params_.matrices[j].num_panels(), kLiftPanels);
  }

  const LiftArgs& params_;
  const int64_t queries_;
  const int64_t rows_;
  int64_t count_ = 0;
  int64_t multiply_adds_ = 0;
};

}  // namespace

int64_t LiftScratch(int threads) { return kLiftScratchFloats * threads; }

void LiftSimd(const LiftArgs& params, float* scratch, CpuStream& stream) {
  const LiftParts parts(params);
  // A thread takes the next part when it has finished one.
  std::atomic<int64_t> next{0};
  const auto work = [&](int thread) {
    for (int64_t i = next++; i < parts.count(); i = next++) {
      HWY_DYNAMIC_DISPATCH(LiftSomeRows)
      (params, parts.at(i), scratch + thread * kLiftScratchFloats);
    }
  };
  if (parts.multiply_adds() < kLiftWorthWaking) {
    work(0);
  } else {
    stream.pool().Run(work);
  }
}

void ComplexLiftSimd(const ComplexLiftArgs& params, CpuStream& stream) {
  int64_t numbers = 0;
  for (int64_t j = 0; j < params.num_kv_heads; ++j) {
    numbers += 2 * params.channels[j].num_channels;
  }
  numbers *= params.num_heads / params.num_kv_heads;
  ForRows(stream, params.num_rows, numbers,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(ComplexLiftRows)
            (params, params.first_row + begin, params.first_row + end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
