// matmul on a GPU: one CTA per tile of y. All tile sizes compute an element of
// y by the same operations in the same order. So a row has the same bits
// whatever the number of rows.
//
// If x and W have one 16-bit type: a chain of ceil(K / 16) mma.m16n8k16 in the
// order of k, with rows of x as A and rows of W as B, summed in float32. Both
// are padded with zeros after K. The sum over K is not split. There are four
// tile shapes:
// - up to 16 rows: 16 x 32. Such narrow tiles give many CTAs, 128 for N = 4096.
//   Each reads its rows of W once, 256 bytes of a row at a time, three stages
//   ahead;
// - up to 64 rows: 64 x 32;
// - more rows: the largest of 128 x 128, 64 x 128 and 64 x 32 that gives work
//   to half of the multiprocessors. Larger tiles read less from the
//   second-level cache, whose bandwidth limits the speed with many rows.
// CTAs run in the order of tile_order.h.
// Other types: one chain of fused multiply-adds in the order of k over exact
// float32 values, with the CPU's bits. It is for tests and small models, and as
// fast as the float32 units.
// grouped_matmul has tiles of 16 or 64 rows, each with rows of one group. A row
// has the same bits as in matmul with our kernels.
// If the launcher has a library, the library computes the products that
// LibraryFor (matmul.cc) selects, in its own order of additions. For these,
// BiasKernel converts the bias to y's type (4 N bytes read, 2 N written).
//
// Layout: W in rows (WeightLayout::kRows), x in rows x_row_stride apart. If
// rows of both begin at multiples of 16 bytes, they are copied by cp.async;
// otherwise a thread gathers 16 bytes of single numbers. In shared memory,
// chunks of 16 bytes are swizzled within their row so that ldmatrix has no bank
// conflicts.
//
// Bytes, with B bytes per number: each tile of 16, 64 or 128 rows reads W (N K
// B bytes), the first from memory, the others from the second-level cache. Each
// tile of 32 or 128 columns reads x (M K B bytes), which stays in this cache.
// The M N numbers of y are written once. Operations: 2 M N K.
//
// The lower bound of the time is N K B divided by the memory bandwidth for few
// rows, and the operations divided by the rate of the tensor cores for many
// rows.
//
// For 16 rows, 8 columns and 16 k (256 bytes of W), a warp executes 1 mma, 1.5
// ldmatrix and 0.75 cp.async. With all other instructions, a lane executes 3.3
// instructions per byte of W (counted in PTX).
#include <algorithm>

#include "kernels/device/gemm.h"
#include "kernels/linear/grouped_matmul.h"
#include "kernels/linear/matmul.h"
#include "kernels/linear/tile_order.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

// kStep is the depth (k) of one mma. kChunk is the number of 16-bit numbers in
// a chunk of 16 bytes.
constexpr int32_t kStep = 16;
constexpr int32_t kChunk = 8;

// A CTA computes a tile of kRows x kColumns with kWarpsDown x kWarpsAcross
// warps. A ring of kStages stages in shared memory holds kDepth numbers
// per row in each stage. It takes at most 48 KiB, the most that a kernel
// has by default.
struct FewRows {
  static constexpr const char* kName = "matmul_few_rows";
  static constexpr int32_t kRows = 16, kColumns = 32, kDepth = 128;
  static constexpr int32_t kWarpsDown = 1, kWarpsAcross = 4, kStages = 4;
};
struct SomeRows {
  static constexpr const char* kName = "matmul_some_rows";
  static constexpr int32_t kRows = 64, kColumns = 32, kDepth = 64;
  static constexpr int32_t kWarpsDown = 2, kWarpsAcross = 2, kStages = 4;
};
struct MoreRows {
  static constexpr const char* kName = "matmul_more_rows";
  static constexpr int32_t kRows = 64, kColumns = 128, kDepth = 32;
  static constexpr int32_t kWarpsDown = 2, kWarpsAcross = 4, kStages = 4;
};
struct ManyRows {
  static constexpr const char* kName = "matmul_many_rows";
  static constexpr int32_t kRows = 128, kColumns = 128, kDepth = 32;
  static constexpr int32_t kWarpsDown = 2, kWarpsAcross = 4, kStages = 3;
};

template <typename Tile>
struct Sizes {
  static constexpr int32_t kThreads =
      int32_t{simt::kWarp} * Tile::kWarpsDown * Tile::kWarpsAcross;
  static constexpr int32_t kXNumbers = Tile::kRows * Tile::kDepth;
  static constexpr int32_t kStageNumbers =
      kXNumbers + Tile::kColumns * Tile::kDepth;
  // The size of one warp's tile, and its number of mma tiles down and across.
  static constexpr int32_t kWarpRows = Tile::kRows / Tile::kWarpsDown;
  static constexpr int32_t kWarpColumns = Tile::kColumns / Tile::kWarpsAcross;
  static constexpr int32_t kDown = kWarpRows / 16;
  static constexpr int32_t kAcross = kWarpColumns / 8;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 8 == 0,
                "a warp computes whole mma tiles");
  static_assert(Tile::kDepth % (2 * kStep) == 0,
                "a stage must have whole pairs of steps");
  static_assert(Tile::kStages * kStageNumbers * 2 <= 48 * 1024,
                "a kernel has only 48 KiB of shared memory by default");
};

// Returns where a chunk begins in a tile whose rows have `depth` numbers. In
// eight consecutive rows, chunks with the same index are in different banks.
template <int32_t depth>
KVASIR_DEVICE int32_t PlaceOf(int32_t row, int32_t chunk) {
  constexpr int32_t kChunks = depth / kChunk;
  constexpr int32_t kTurns = kChunks < 8 ? kChunks : 8;
  return kChunk * (row * kChunks + (chunk ^ (row * kTurns / 8 % kTurns)));
}

// The rows of x or of W that a tile reads, from the tile's first row on.
template <typename T>
struct Source {
  const T* data;
  int64_t stride;
  int64_t rows;  // number of rows that exist; rows after them are not read
  int64_t k;     // K
};

// Copies numbers [k, k + depth) of each of a tile's rows to shared memory.
// Numbers from K on are set to zero.
template <typename T, bool wide, int32_t tile_rows, int32_t depth,
          int32_t threads>
KVASIR_DEVICE void FetchTile(const Source<T>& source, int64_t k, T* to) {
  constexpr int32_t kChunks = depth / kChunk;
  constexpr int32_t kRowsTogether = threads / kChunks;
  static_assert(tile_rows % kRowsTogether == 0,
                "every thread must copy the same number of chunks");
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t chunk = thread % kChunks;
  k += chunk * kChunk;
  KVASIR_UNROLL
  for (int32_t i = 0; i < tile_rows / kRowsTogether; ++i) {
    const int32_t row = thread / kChunks + i * kRowsTogether;
    if (row >= source.rows) break;
    const T* const from = source.data + row * source.stride + k;
    T* const place = to + PlaceOf<depth>(row, chunk);
    if (wide && k < source.k) {  // if wide, K is a multiple of kChunk
      simt::CopyAsync<16>(place, from);
    } else {
      simt::Pack<T, kChunk> pack;
      KVASIR_UNROLL
      for (int32_t j = 0; j < kChunk; ++j) {
        pack.number[j] =
            !wide && k + j < source.k ? simt::LoadGlobal(from + j) : T{0};
      }
      simt::StoreShared(reinterpret_cast<simt::Pack<T, kChunk>*>(place), pack);
    }
  }
}

// The sums of a warp's tile, distributed over its lanes as in mma.h.
template <typename Tile>
using Sums = float[Sizes<Tile>::kDown][Sizes<Tile>::kAcross][4];

// Adds the products of one stage to the warp's sums: all steps of k if `whole`,
// otherwise only the first `steps` steps.
template <typename T, typename Tile, bool whole>
KVASIR_DEVICE void MultiplyTile(const T* x, const T* w, int32_t steps,
                                Sums<Tile>& sums) {
  using S = Sizes<Tile>;
  const auto lane = static_cast<int32_t>(simt::Lane());
  const auto warp = static_cast<int32_t>(simt::Warp());
  const int32_t x_row = warp / Tile::kWarpsAcross * S::kWarpRows + lane % 16;
  const int32_t w_row = warp % Tile::kWarpsAcross * S::kWarpColumns + lane % 8;
  KVASIR_UNROLL
  for (int32_t step = 0; step < Tile::kDepth / kStep; step += 2) {
    if (!whole && step >= steps) break;
    uint32_t b[S::kAcross][4];  // the fragment of W for two steps
    KVASIR_UNROLL
    for (int32_t n = 0; n < S::kAcross; ++n) {
      simt::LoadMatrices<4>(
          b[n], w + PlaceOf<Tile::kDepth>(w_row + 8 * n, 2 * step + lane / 8));
    }
    KVASIR_UNROLL
    for (int32_t half = 0; half < 2; ++half) {
      if (!whole && step + half >= steps) break;
      KVASIR_UNROLL
      for (int32_t m = 0; m < S::kDown; ++m) {
        uint32_t a[4];
        simt::LoadMatrices<4>(
            a, x + PlaceOf<Tile::kDepth>(x_row + 16 * m,
                                         2 * (step + half) + lane / 16));
        KVASIR_UNROLL
        for (int32_t n = 0; n < S::kAcross; ++n) {
          const uint32_t columns[2] = {b[n][2 * half], b[n][2 * half + 1]};
          simt::Mma(T{}, sums[m][n], a, columns);
        }
      }
    }
  }
}

// Writes two neighbouring numbers of y, or only the first if it is the last of
// the row.
template <typename Y>
KVASIR_DEVICE void StorePair(const MatmulArgs& args, int64_t row,
                             int64_t column, float first, float second) {
  if (row >= args.num_rows || column >= args.weight.n) return;
  const bool two = column + 1 < args.weight.n;
  if (args.bias != nullptr) {
    first = first + args.bias[column];
    if (two) second = second + args.bias[column + 1];
  }
  Y* const to = reinterpret_cast<Y*>(args.y) + row * args.y_row_stride + column;
  const simt::Pack<Y, 2> pair = {
      {simt::FromFloat<Y>(first), simt::FromFloat<Y>(second)}};
  if (two && reinterpret_cast<uintptr_t>(to) % sizeof(pair) == 0) {
    simt::StoreGlobal(reinterpret_cast<simt::Pack<Y, 2>*>(to), pair);
    return;
  }
  simt::StoreGlobal(to, pair.number[0]);
  if (two) simt::StoreGlobal(to + 1, pair.number[1]);
}

template <typename Y, typename Tile>
KVASIR_DEVICE void StoreSums(const MatmulArgs& args, int64_t first_row,
                             int64_t first_column, const Sums<Tile>& sums) {
  using S = Sizes<Tile>;
  const auto lane = static_cast<int32_t>(simt::Lane());
  const auto warp = static_cast<int32_t>(simt::Warp());
  const int64_t row =
      first_row + warp / Tile::kWarpsAcross * S::kWarpRows + lane / 4;
  const int64_t column =
      first_column + warp % Tile::kWarpsAcross * S::kWarpColumns + lane % 4 * 2;
  KVASIR_UNROLL
  for (int32_t m = 0; m < S::kDown; ++m) {
    KVASIR_UNROLL
    for (int32_t n = 0; n < S::kAcross; ++n) {
      const float(&d)[4] = sums[m][n];
      StorePair<Y>(args, row + 16 * m, column + 8 * n, d[0], d[1]);
      StorePair<Y>(args, row + 16 * m + 8, column + 8 * n, d[2], d[3]);
    }
  }
}

// Computes the tile of y that begins at this row and column. `stages` is shared
// memory for Tile::kStages stages.
template <typename T, typename Tile, bool wide>
KVASIR_DEVICE void ComputeTile(const MatmulArgs& args, int64_t first_row,
                               int64_t first_column, T* stages) {
  using S = Sizes<Tile>;
  const int64_t depth = args.weight.k;
  const Source<T> x = {
      reinterpret_cast<const T*>(args.x) + first_row * args.x_row_stride,
      args.x_row_stride, args.num_rows - first_row, depth};
  const Source<T> w = {
      static_cast<const T*>(args.weight.data) + first_column * depth, depth,
      args.weight.n - first_column, depth};
  const auto fetch = [&](int64_t k, T* stage) {
    FetchTile<T, wide, Tile::kRows, Tile::kDepth, S::kThreads>(x, k, stage);
    FetchTile<T, wide, Tile::kColumns, Tile::kDepth, S::kThreads>(
        w, k, stage + S::kXNumbers);
  };

  constexpr int32_t kAhead = (Tile::kStages - 1) * Tile::kDepth;
  T* stage = stages;
  for (int32_t k = 0; k < kAhead; k += Tile::kDepth) {
    if (k < depth) fetch(k, stage);
    simt::CommitCopies();
    stage += S::kStageNumbers;
  }
  T* used = stage;  // the stage that is filled next
  stage = stages;
  Sums<Tile> sums = {};
  for (int64_t k = 0; k < depth; k += Tile::kDepth) {
    simt::WaitCopies<Tile::kStages - 2>();
    // After this barrier, all threads' copies have arrived, and all threads
    // have finished with the stage that is overwritten next.
    simt::SyncCta();
    if (k + kAhead < depth) fetch(k + kAhead, used);
    simt::CommitCopies();
    if (k + Tile::kDepth <= depth) {
      MultiplyTile<T, Tile, true>(stage, stage + S::kXNumbers, 0, sums);
    } else {
      const auto steps = static_cast<int32_t>((depth - k + kStep - 1) / kStep);
      MultiplyTile<T, Tile, false>(stage, stage + S::kXNumbers, steps, sums);
    }
    used = stage;
    stage += S::kStageNumbers;
    if (stage == stages + Tile::kStages * S::kStageNumbers) stage = stages;
  }
  if (args.y_dtype == DType::kF32) {
    StoreSums<float, Tile>(args, first_row, first_column, sums);
  } else {
    StoreSums<T, Tile>(args, first_row, first_column, sums);
  }
}

struct OrderedArgs {
  MatmulArgs args;
  TileOrder order;
};

template <typename T, typename Tile, bool wide>
KVASIR_KERNEL(Sizes<Tile>::kThreads)
MatmulKernel(OrderedArgs ordered) {
  const TileOrder::Tile tile = ordered.order.At(simt::CtaX(), simt::CtaY());
  if (tile.column >= ordered.order.column_tiles) return;
  ComputeTile<T, Tile, wide>(ordered.args, int64_t{tile.row} * Tile::kRows,
                             int64_t{tile.column} * Tile::kColumns,
                             reinterpret_cast<T*>(simt::Shared()));
}

// The sizes of the kernel that reads single numbers. In it, each warp computes
// four rows, and each lane one column of them.
constexpr int32_t kChainThreads = 128;
constexpr int32_t kChainRows = 16;
constexpr int32_t kChainColumns = 32;
constexpr int32_t kChainDepth = 32;
constexpr int32_t kChainWarpRows =
    kChainRows / (kChainThreads / int32_t{simt::kWarp});
// The row stride of W's tile in shared memory. With this stride, eight lanes
// that read 16 bytes of neighbouring rows use every bank once.
constexpr int32_t kChainStride = kChainDepth + 4;

template <typename Y>
KVASIR_DEVICE void ComputeChainTile(const MatmulArgs& args, int64_t first_row,
                                    int64_t first_column) {
  auto* const x = reinterpret_cast<float*>(simt::Shared());
  float* const w = x + kChainRows * kChainDepth;
  const int64_t depth = args.weight.k;
  const auto lane = static_cast<int32_t>(simt::Lane());
  const auto warp = static_cast<int32_t>(simt::Warp());
  float sums[kChainWarpRows] = {};
  for (int64_t k = 0; k < depth; k += kChainDepth) {
    simt::SyncCta();  // all threads have finished with the previous tile
    for (auto i = static_cast<int32_t>(simt::Thread());
         i < (kChainRows + kChainColumns) * kChainDepth; i += kChainThreads) {
      // Rows of x come first, then rows of W. Neighbouring lanes load
      // neighbouring numbers of a row.
      const int32_t tile_row = i / kChainDepth;
      const int32_t at = i % kChainDepth;
      if (k + at >= depth) continue;
      if (tile_row < kChainRows) {
        const int64_t row = first_row + tile_row;
        if (row >= args.num_rows) continue;
        simt::StoreShared(x + i,
                          simt::LoadNumber(args.x, args.dtype,
                                           row * args.x_row_stride + k + at));
      } else {
        const int32_t column = tile_row - kChainRows;
        if (first_column + column >= args.weight.n) continue;
        simt::StoreShared(
            w + column * kChainStride + at,
            simt::LoadNumber(args.weight.data, args.weight.dtype,
                             (first_column + column) * depth + k + at));
      }
    }
    simt::SyncCta();
    const auto count =
        static_cast<int32_t>(depth - k < kChainDepth ? depth - k : kChainDepth);
    // Reads four numbers along k at a time. Numbers beyond the depth are read
    // but not used.
    using Four = simt::Pack<float, 4>;
    for (int32_t i = 0; i < count; i += 4) {
      const Four weights = simt::LoadShared(
          reinterpret_cast<const Four*>(w + lane * kChainStride + i));
      KVASIR_UNROLL
      for (int32_t r = 0; r < kChainWarpRows; ++r) {
        const int32_t row = warp * kChainWarpRows + r;
        const Four numbers = simt::LoadShared(
            reinterpret_cast<const Four*>(x + row * kChainDepth + i));
        KVASIR_UNROLL
        for (int32_t j = 0; j < 4; ++j) {
          if (i + j >= count) break;
          sums[r] = simt::Fma(numbers.number[j], weights.number[j], sums[r]);
        }
      }
    }
  }
  const int64_t column = first_column + lane;
  if (column >= args.weight.n) return;
  KVASIR_UNROLL
  for (int32_t r = 0; r < kChainWarpRows; ++r) {
    const int64_t row = first_row + warp * kChainWarpRows + r;
    if (row >= args.num_rows) return;
    float sum = sums[r];
    if (args.bias != nullptr) sum = sum + args.bias[column];
    simt::StoreGlobal(
        reinterpret_cast<Y*>(args.y) + row * args.y_row_stride + column,
        simt::FromFloat<Y>(sum));
  }
}

template <typename Y>
KVASIR_KERNEL(kChainThreads)
ChainKernel(MatmulArgs args) {
  ComputeChainTile<Y>(args, int64_t{simt::CtaX()} * kChainRows,
                      int64_t{simt::CtaY()} * kChainColumns);
}

// The grouped product: CTA [x, y] computes the x-th tile of rows, counted over
// all groups, and the y-th tile of columns. There are at most T / rows + groups
// tiles of rows; the CTAs beyond the last one return.
struct GroupedArgs {
  GroupedMatmulArgs args;
  int64_t weight_bytes;  // bytes of the weight of one group
};

// Finds the group of the CTA. Returns false if the CTA has no tile. Otherwise
// `product` becomes the product of the group, and `first_row` the first row of
// the tile in it.
KVASIR_DEVICE bool FindTile(const GroupedArgs& grouped, int32_t tile_rows,
                            MatmulArgs* product, int64_t* first_row) {
  const GroupedMatmulArgs& args = grouped.args;
  int64_t tile = simt::CtaX();
  int32_t begin = 0;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    const int32_t end = simt::LoadGlobal(args.first_rows + group + 1);
    const int32_t tiles = (end - begin + tile_rows - 1) / tile_rows;
    if (tile >= tiles) {
      tile -= tiles;
      begin = end;
      continue;
    }
    const int64_t number_bytes = args.dtype == DType::kF32 ? 4 : 2;
    product->x = reinterpret_cast<const float*>(
        reinterpret_cast<const char*>(args.x) +
        begin * args.x_row_stride * number_bytes);
    product->x_row_stride = args.x_row_stride;
    product->num_rows = end - begin;
    product->weight = args.weight;
    product->weight.data = static_cast<const char*>(args.weight.data) +
                           group * grouped.weight_bytes;
    product->y =
        reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) +
                                 begin * args.y_row_stride * number_bytes);
    product->y_row_stride = args.y_row_stride;
    product->dtype = args.dtype;
    product->y_dtype = args.dtype;
    *first_row = tile * tile_rows;
    return true;
  }
  return false;
}

template <typename T, typename Tile, bool wide>
KVASIR_KERNEL(Sizes<Tile>::kThreads)
GroupedKernel(GroupedArgs grouped) {
  MatmulArgs product;
  int64_t first_row = 0;
  if (!FindTile(grouped, Tile::kRows, &product, &first_row)) return;
  ComputeTile<T, Tile, wide>(product, first_row,
                             int64_t{simt::CtaY()} * Tile::kColumns,
                             reinterpret_cast<T*>(simt::Shared()));
}

template <typename T>
KVASIR_KERNEL(kChainThreads)
GroupedChainKernel(GroupedArgs grouped) {
  MatmulArgs product;
  int64_t first_row = 0;
  if (!FindTile(grouped, kChainRows, &product, &first_row)) return;
  ComputeChainTile<T>(product, first_row,
                      int64_t{simt::CtaY()} * kChainColumns);
}

constexpr int64_t Tiles(int64_t numbers, int64_t tile_size) {
  return (numbers + tile_size - 1) / tile_size;
}

template <typename T, typename Tile>
void LaunchTiles(const MatmulArgs& args, Launcher& launcher) {
  OrderedArgs ordered;
  ordered.args = args;
  ordered.order.row_tiles =
      static_cast<int32_t>(Tiles(args.num_rows, Tile::kRows));
  ordered.order.column_tiles =
      static_cast<int32_t>(Tiles(args.weight.n, Tile::kColumns));
  KernelLaunch launch;
  launch.name = Tile::kName;
  launch.grid_x = simt::Ctas(ordered.order.grid_x());
  launch.grid_y = static_cast<uint32_t>(ordered.order.grid_y());
  launch.threads = Sizes<Tile>::kThreads;
  launch.shared_bytes = Tile::kStages * Sizes<Tile>::kStageNumbers * sizeof(T);
  const bool wide = simt::WideRows<T>({args.weight.k}, args.weight.data) &&
                    simt::WideRows<T>({args.x_row_stride}, args.x);
  simt::Launch(
      launcher, launch,
      wide ? MatmulKernel<T, Tile, true> : MatmulKernel<T, Tile, false>,
      ordered);
}

template <typename T>
void LaunchMma(const MatmulArgs& args, Launcher& launcher) {
  const auto are_enough = [&](int64_t rows, int64_t columns) {
    return 2 * Tiles(args.num_rows, rows) * Tiles(args.weight.n, columns) >=
           launcher.multiprocessors();
  };
  if (args.num_rows <= FewRows::kRows) {
    LaunchTiles<T, FewRows>(args, launcher);
  } else if (args.num_rows <= SomeRows::kRows) {
    LaunchTiles<T, SomeRows>(args, launcher);
  } else if (are_enough(ManyRows::kRows, ManyRows::kColumns)) {
    LaunchTiles<T, ManyRows>(args, launcher);
  } else if (are_enough(MoreRows::kRows, MoreRows::kColumns)) {
    LaunchTiles<T, MoreRows>(args, launcher);
  } else {
    LaunchTiles<T, SomeRows>(args, launcher);
  }
}

template <typename Y>
void LaunchChain(const MatmulArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "matmul_chain";
  launch.grid_x = simt::Ctas(args.num_rows, kChainRows);
  launch.grid_y = static_cast<uint32_t>(Tiles(args.weight.n, kChainColumns));
  launch.threads = kChainThreads;
  launch.shared_bytes =
      (kChainRows * kChainDepth + kChainColumns * kChainStride) * sizeof(float);
  simt::Launch(launcher, launch, ChainKernel<Y>, args);
}

// Launches a grouped product with tiles of `rows` rows and `columns` columns.
void LaunchGroups(const GroupedArgs& grouped, int64_t rows, int64_t columns,
                  KernelLaunch launch, void (*kernel)(GroupedArgs),
                  Launcher& launcher) {
  const GroupedMatmulArgs& args = grouped.args;
  launch.grid_x = simt::Ctas(args.num_rows / rows +
                             std::min(args.num_groups, args.num_rows));
  launch.grid_y = static_cast<uint32_t>(Tiles(args.weight.n, columns));
  simt::Launch(launcher, launch, kernel, grouped);
}

template <typename T, typename Tile>
void LaunchGroupTiles(const GroupedArgs& grouped, Launcher& launcher) {
  const GroupedMatmulArgs& args = grouped.args;
  KernelLaunch launch;
  launch.name = "grouped_matmul";
  launch.threads = Sizes<Tile>::kThreads;
  launch.shared_bytes = Tile::kStages * Sizes<Tile>::kStageNumbers * sizeof(T);
  const bool wide = simt::WideRows<T>({args.weight.k}, args.weight.data) &&
                    simt::WideRows<T>({args.x_row_stride}, args.x);
  LaunchGroups(
      grouped, Tile::kRows, Tile::kColumns, launch,
      wide ? GroupedKernel<T, Tile, true> : GroupedKernel<T, Tile, false>,
      launcher);
}

template <typename T>
void LaunchGroupMma(const GroupedArgs& grouped, Launcher& launcher) {
  // The choice affects only the speed: all tile shapes give the same bits.
  if (grouped.args.num_rows <= grouped.args.num_groups * FewRows::kRows) {
    LaunchGroupTiles<T, FewRows>(grouped, launcher);
  } else {
    LaunchGroupTiles<T, SomeRows>(grouped, launcher);
  }
}

template <typename T>
void LaunchGroupChain(const GroupedArgs& grouped, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "grouped_matmul_chain";
  launch.threads = kChainThreads;
  launch.shared_bytes =
      (kChainRows * kChainDepth + kChainColumns * kChainStride) * sizeof(float);
  LaunchGroups(grouped, kChainRows, kChainColumns, launch,
               GroupedChainKernel<T>, launcher);
}

// Converts the bias to y's type for the library.
constexpr int32_t kBiasThreads = 256;

template <typename Y>
KVASIR_KERNEL(kBiasThreads)
BiasKernel(MatmulArgs args) {
  const int64_t n =
      int64_t{simt::CtaX()} * kBiasThreads + int64_t{simt::Thread()};
  if (n >= args.weight.n) return;
  simt::StoreGlobal(reinterpret_cast<Y*>(args.y) + n,
                    simt::FromFloat<Y>(simt::LoadGlobal(args.bias + n)));
}

template <typename Y>
void LaunchBias(const MatmulArgs& args, float* rounded, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "matmul_bias";
  launch.grid_x = simt::Ctas(args.weight.n, kBiasThreads);
  launch.threads = kBiasThreads;
  MatmulArgs bias = args;
  bias.y = rounded;
  simt::Launch(launcher, launch, BiasKernel<Y>, bias);
}

void LaunchLibrary(const MatmulArgs& args, float* scratch, Launcher& launcher) {
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(scratch) + kGemmWorkspaceAlignment - 1) /
      kGemmWorkspaceAlignment * kGemmWorkspaceAlignment;
  Gemm gemm;
  gemm.x = args.x;
  gemm.x_row_stride = args.x_row_stride;
  gemm.weight = args.weight.data;
  gemm.bias = args.bias;
  gemm.y = args.y;
  gemm.y_row_stride = args.y_row_stride;
  gemm.rows = args.num_rows;
  gemm.n = args.weight.n;
  gemm.k = args.weight.k;
  gemm.dtype = args.dtype;
  gemm.y_dtype = args.y_dtype;
  if (args.bias != nullptr && args.y_dtype != DType::kF32) {
    auto* const rounded = reinterpret_cast<float*>(begin);
    gemm.bias = rounded;
    if (args.y_dtype == DType::kBf16) {
      LaunchBias<Bf16>(args, rounded, launcher);
    } else {
      LaunchBias<F16>(args, rounded, launcher);
    }
  }
  gemm.workspace =
      reinterpret_cast<void*>(begin + static_cast<uintptr_t>(GemmBiasBytes(
                                          args.weight.n, args.y_dtype)));
  launcher.gemms()->Enqueue(gemm);
}

}  // namespace

void MatmulCuda(const MatmulArgs& args, float* scratch, Launcher& launcher) {
  if (scratch != nullptr) {
    LaunchLibrary(args, scratch, launcher);
    return;
  }
  if (args.dtype == args.weight.dtype && args.dtype == DType::kBf16) {
    LaunchMma<Bf16>(args, launcher);
  } else if (args.dtype == args.weight.dtype && args.dtype == DType::kF16) {
    LaunchMma<F16>(args, launcher);
  } else {
    VisitDType(args.y_dtype,
               [&](auto type) { LaunchChain<decltype(type)>(args, launcher); });
  }
}

void GroupedMatmulCuda(const GroupedMatmulArgs& args, float*, int64_t*,
                       Launcher& launcher) {
  const GroupedArgs grouped = {args, args.weight.bytes()};
  if (args.dtype == args.weight.dtype && args.dtype == DType::kBf16) {
    LaunchGroupMma<Bf16>(grouped, launcher);
  } else if (args.dtype == args.weight.dtype && args.dtype == DType::kF16) {
    LaunchGroupMma<F16>(grouped, launcher);
  } else {
    VisitDType(args.dtype, [&](auto type) {
      LaunchGroupChain<decltype(type)>(grouped, launcher);
    });
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
