// matmul on the CPU. It has two loops over the weights, with the same chain of
// fused multiply-adds per output element:
// - For few rows, each thread streams its panels of weights once, in their
//   stored type.
// - For many rows, a block of panels is converted to float32 in the cache and
//   used for all rows. Between blocks of k, the accumulators are in y.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/device/stream.h"
#include "kernels/linear/matmul.h"
#include "kernels/linear/matmul_part.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/matmul_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/linear/tile-inl.h"

#ifndef KVASIR_KERNELS_MATMUL_CPU_ONCE_
#define KVASIR_KERNELS_MATMUL_CPU_ONCE_
namespace kvasir::kernels {

// The size of the float32 block in the loop for many rows:
// [panels][kBlockK][32]. It takes 512 KiB, half of a small second-level cache.
// The panel that is being used (32 KiB) passes through the first-level cache.
inline constexpr int64_t kBlockK = 256;
inline constexpr int64_t kBlockPanels = 16;
// In the loop for many rows, the tile's rows of x are copied without gaps to
// the memory after the block. If they were read in place and their stride were
// a power of two, they would use only a few sets of the cache.
inline constexpr int64_t kScratchFloats =
    kBlockK * (kBlockPanels * kPanelColumns + kMaxTileRows) +
    kMaxTileRows * kPanelColumns;

// If there are several tiles of rows, the loop for few rows handles this many k
// at a time: one block of k for all tiles, then the next block. So the block's
// weights (32 KiB if they have 16 bits) are in the cache for all tiles.
inline constexpr int64_t kFewRowsBlockK = 512;

}  // namespace kvasir::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Divides rows into tiles of nearly equal height.
class RowTiles {
 public:
  RowTiles(int64_t begin, int64_t end)
      : begin_(begin),
        rows_(end - begin),
        tiles_((rows_ + kTileRows - 1) / kTileRows) {}
  int64_t count() const { return tiles_; }
  int64_t begin(int64_t tile) const { return begin_ + rows_ * tile / tiles_; }
  int height(int64_t tile) const {
    return static_cast<int>(begin(tile + 1) - begin(tile));
  }

 private:
  int64_t begin_;
  int64_t rows_;
  int64_t tiles_;
};

// A tile of y: `rows` rows from `row` on, in the columns of one panel. A block
// of k adds the terms from k_begin on.
struct TilePlace {
  int64_t panel;
  int64_t row;
  int rows;
  int64_t k_begin;
  bool last;  // true for the last block of k, after which the bias is added
};

// A function that computes one tile. RunTileInto calls it for a tile of y. If
// the last panel has fewer than 32 columns, RunTileInto passes a dense copy
// (`edge`) of this part of y.
using TileFunction = void (*)(int rows, const TileArgs& args);

void RunTileInto(TileFunction tile, const MatmulArgs& params,
                 const TilePlace& place, float* edge, TileArgs args) {
  const int64_t first = place.panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, params.weight.n - first);
  float* y = params.y + place.row * params.y_row_stride + first;
  args.accumulate = place.k_begin > 0;
  args.bias =
      place.last && params.bias != nullptr ? params.bias + first : nullptr;
  if (columns == kPanelColumns) {
    args.c = y;
    args.c_stride = params.y_row_stride;
    tile(place.rows, args);
    return;
  }
  float bias[kPanelColumns] = {};
  if (args.bias != nullptr) {
    std::copy_n(args.bias, columns, bias);
    args.bias = bias;
  }
  args.c = edge;
  args.c_stride = kPanelColumns;
  for (int r = 0; args.accumulate && r < place.rows; ++r) {
    float* row = edge + r * kPanelColumns;
    std::copy_n(y + r * params.y_row_stride, columns, row);
    std::fill(row + columns, row + kPanelColumns, 0.0f);
  }
  tile(place.rows, args);
  for (int r = 0; r < place.rows; ++r) {
    std::copy_n(edge + r * kPanelColumns, columns, y + r * params.y_row_stride);
  }
}

template <typename T>
const T* PanelOf(const PackedMatrixArgs& weight, int64_t panel) {
  return static_cast<const T*>(weight.data) + panel * weight.k * kPanelColumns;
}

template <typename T>
void FewRows(const MatmulArgs& params, const MatmulPart& part, float* edge) {
  const RowTiles tiles(part.row_begin, part.row_end);
  const int64_t depth = params.weight.k;
  const int64_t block = tiles.count() == 1 ? depth : kFewRowsBlockK;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    for (int64_t k = 0; k < depth; k += block) {
      const int64_t k_end = std::min(depth, k + block);
      TileArgs args = {};
      args.depth = k_end - k;
      args.a_stride = params.x_row_stride;
      args.b = PanelOf<T>(params.weight, panel) + k * kPanelColumns;
      args.b_stride = kPanelColumns;
      for (int64_t tile = 0; tile < tiles.count(); ++tile) {
        const int64_t row = tiles.begin(tile);
        args.a = params.x + row * params.x_row_stride + k;
        // Only the first tile reads the weights from memory, so only it
        // prefetches. A row of float32 weights takes two cache lines. The CPU
        // fetches the second line together with the first.
        args.ahead = tile == 0
                         ? static_cast<const char*>(args.b) + kPrefetchBytes
                         : nullptr;
        args.ahead_step = kPanelColumns * static_cast<int64_t>(sizeof(T));
        const TilePlace place = {panel, row, tiles.height(tile), k,
                                 k_end == depth};
        RunTileInto(&RunTile<T>, params, place, edge, args);
      }
    }
  }
}

template <typename T>
void ConvertPanel(const T* from, int64_t depth, float* to) {
  for (int64_t i = 0; i < depth * kPanelColumns; i += 2 * kVecLanes) {
    hn::StoreU(LoadFloats(from + i), kFloats, to + i);
    hn::StoreU(LoadFloats(from + i + kVecLanes), kFloats, to + i + kVecLanes);
  }
}

// Computes the terms of one block of k, for all rows and panels of the part.
template <typename T>
void ManyRowsBlock(const MatmulArgs& params, const MatmulPart& part, int64_t k,
                   float* scratch) {
  const int64_t depth = std::min(kBlockK, params.weight.k - k);
  float* block = scratch;
  float* rows = block + kBlockK * kBlockPanels * kPanelColumns;
  float* edge = rows + kBlockK * kMaxTileRows;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    ConvertPanel(PanelOf<T>(params.weight, panel) + k * kPanelColumns, depth,
                 block + (panel - part.panel_begin) * kBlockK * kPanelColumns);
  }
  const RowTiles tiles(part.row_begin, part.row_end);
  TileArgs args = {};
  args.depth = depth;
  args.a = rows;
  static_assert(kBlockK == kPackedStride);
  args.a_stride = kPackedStride;
  args.b_stride = kPanelColumns;
  for (int64_t tile = 0; tile < tiles.count(); ++tile) {
    TilePlace place = {0, tiles.begin(tile), tiles.height(tile), k,
                       k + depth == params.weight.k};
    for (int r = 0; r < place.rows; ++r) {
      std::memcpy(rows + r * kBlockK,
                  params.x + (place.row + r) * params.x_row_stride + k,
                  static_cast<size_t>(depth) * sizeof(float));
    }
    for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
      place.panel = panel;
      args.b = block + (panel - part.panel_begin) * kBlockK * kPanelColumns;
      RunTileInto(&RunPackedTile, params, place, edge, args);
    }
  }
}

template <typename T>
void ManyRows(const MatmulArgs& params, const MatmulPart& part,
              float* scratch) {
  for (int64_t panel = part.panel_begin; panel < part.panel_end;
       panel += kBlockPanels) {
    MatmulPart block = part;
    block.panel_begin = panel;
    block.panel_end = std::min(part.panel_end, panel + kBlockPanels);
    for (int64_t k = 0; k < params.weight.k; k += kBlockK) {
      ManyRowsBlock<T>(params, block, k, scratch);
    }
  }
}

template <typename T>
void RunPartOf(const MatmulArgs& params, const MatmulPart& part,
               float* scratch) {
  if (part.row_end - part.row_begin <= kFewRows) {
    FewRows<T>(params, part, scratch);
  } else {
    ManyRows<T>(params, part, scratch);
  }
}

void RunPart(const MatmulArgs& params, const MatmulPart& part, float* scratch) {
  switch (params.weight.dtype) {
    case DType::kF32:
      return RunPartOf<float>(params, part, scratch);
    case DType::kF16:
      return RunPartOf<F16>(params, part, scratch);
    case DType::kBf16:
      return RunPartOf<Bf16>(params, part, scratch);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(RunPart);
}  // namespace

int64_t MatmulScratch(int threads) { return kScratchFloats * threads; }

void RunMatmulPart(const MatmulArgs& params, const MatmulPart& part, int thread,
                   float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunPart)
  (params, part, scratch + kScratchFloats * thread);
}

void MatmulSimd(const MatmulArgs& params, float* scratch, CpuStream& stream) {
  // Parts are ranges of panels, and also of rows if there are too few panels.
  // There are more parts than threads: a thread takes the next part when it has
  // finished one, so one late thread does not delay the others for long.
  const int64_t threads = stream.pool().num_threads();
  const int64_t panels = params.weight.num_panels();
  const int64_t row_parts =
      std::clamp<int64_t>(threads / panels, 1,
                          std::max<int64_t>(1, params.num_rows / kMaxTileRows));
  const int64_t parts_per_thread = params.num_rows <= kFewRows
                                       ? kFewRowsPartsPerThread
                                       : kManyRowsPartsPerThread;
  const int64_t panel_parts =
      std::min(panels, threads == 1 ? 1 : parts_per_thread * threads);
  const auto run_part = [&](int64_t index, int thread) {
    const int64_t p = index % panel_parts;
    const int64_t r = index / panel_parts;
    RunMatmulPart(params,
                  {panels * p / panel_parts, panels * (p + 1) / panel_parts,
                   params.num_rows * r / row_parts,
                   params.num_rows * (r + 1) / row_parts},
                  thread, scratch);
  };
  std::atomic<int64_t> next{0};
  const auto run = [&](int thread) {
    int64_t index;
    while ((index = next.fetch_add(1, std::memory_order_relaxed)) <
           panel_parts * row_parts) {
      run_part(index, thread);
    }
  };
  const int64_t work = params.num_rows * params.weight.k * params.weight.n;
  if (work < kWorthWaking) {
    run(0);
  } else {
    stream.pool().Run(run);
  }
  stream.AddWeightBytesRead(params.weight.bytes() * row_parts);
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
