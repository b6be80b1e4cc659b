// lift and complex_lift on a GPU.
//
// lift: if x and the matrices have the same 16-bit type, tensor cores compute
// it. A row of a tile is one query head of one token. The query heads of a KV
// head share its matrix: if there are four of them, a tile of 16 rows has four
// tokens. Rows, KV heads and columns are divided among CTAs. An output is a
// chain of ceil(in / 16) mma.m16n8k16 in the order of k, added in float32;
// beyond k = in, both operands are padded with zeros. There are two tile sizes.
// Both compute the same chain, so a row's result has the same bits with either:
//  - 128 x 64, if there are more than 64 rows and at least as many tiles as
//    multiprocessors;
//  - otherwise 16 x 32, which the few rows of a decode step fill.
// Other types: a CTA computes 16 rows of a query head. It loads 128 columns and
// a depth of 32 numbers at a time into shared memory. A thread computes 4 rows
// of 2 columns. Each output is the chain of lift.h, so float32 activations give
// the same bits as on the CPU for any number of rows.
//
// complex_lift: a CTA computes one head of a row, a thread one channel.
//
// x and y have the type args.dtype, whatever the type of their pointers. Sums
// are float32.
//
// Layout: matrices as rows (WeightLayout::kRows), of any type; rows of heads,
// row strides apart. Heads and matrices that begin at multiples of 16 bytes and
// have a multiple of 8 numbers are copied by cp.async, others number by number.
// Chunks of 16 bytes are permuted within their row, so that ldmatrix has no
// bank conflicts.
//
// Bytes: each tile of columns reads x once, and each tile of rows reads the
// matrix once. Only the first read of a matrix comes from memory, the others
// from the second-level cache. y is written once. Operations: in * out fused
// multiply-adds per head and row.
//
// Lower bound of the time: for few rows, the bytes of the matrices divided by
// the bandwidth of the memory; for many rows, the operations divided by the
// rate of the tensor cores (or of float32 arithmetic). complex_lift is limited
// by the bytes that it reads and writes.
#include "kernels/latents/lift.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr int32_t kRowsOfThread = 4;
constexpr int32_t kColumnsOfThread = 2;
constexpr int32_t kTileRows = 16;
constexpr int32_t kTileColumns = 128;
constexpr int32_t kTileDepth = 32;
// The number of threads that compute neighbouring columns of the same rows. A
// CTA has four such sets of threads, each with other rows.
constexpr int32_t kColumnThreads = kTileColumns / kColumnsOfThread;
static_assert(kTileRows / kRowsOfThread * kColumnThreads == kThreads);
// The stride of rows in shared memory, in floats. With 4 more than the depth,
// eight threads that each read four floats of different rows use different
// banks.
constexpr int32_t kTileStride = kTileDepth + 4;
constexpr uint32_t kSharedBytes =
    (kTileRows + kTileColumns) * kTileStride * sizeof(float);

using Four = simt::Pack<float, 4>;

KVASIR_DEVICE float WeightAt(const void* weights, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF16:
      return simt::ToFloat(
          simt::LoadGlobal(static_cast<const F16*>(weights) + i));
    case DType::kBf16:
      return simt::ToFloat(
          simt::LoadGlobal(static_cast<const Bf16*>(weights) + i));
    case DType::kF32:
      break;
  }
  return simt::LoadGlobal(static_cast<const float*>(weights) + i);
}

// The sums that a thread computes. Add() adds the products for k in [0, depth)
// of the tiles in shared memory; depth is 1 to 32.
struct Sums {
  float of[kRowsOfThread][kColumnsOfThread] = {};

  KVASIR_DEVICE void Add(const float* x, const float* weights, int32_t depth) {
    int32_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      Four a[kColumnsOfThread];
      KVASIR_UNROLL
      for (int32_t j = 0; j < kColumnsOfThread; ++j) {
        a[j] = simt::LoadShared(reinterpret_cast<const Four*>(
            weights + j * kColumnThreads * kTileStride + k));
      }
      KVASIR_UNROLL
      for (int32_t i = 0; i < kRowsOfThread; ++i) {
        const Four row = simt::LoadShared(
            reinterpret_cast<const Four*>(x + i * kTileStride + k));
        KVASIR_UNROLL
        for (int32_t j = 0; j < kColumnsOfThread; ++j) {
          KVASIR_UNROLL
          for (int32_t e = 0; e < 4; ++e) {
            of[i][j] = simt::Fma(row.number[e], a[j].number[e], of[i][j]);
          }
        }
      }
    }
    // The last numbers are added one by one. Numbers beyond the depth must not
    // be added, even if they are 0, because adding 0 can change -0 to 0.
    for (; k < depth; ++k) {
      KVASIR_UNROLL
      for (int32_t i = 0; i < kRowsOfThread; ++i) {
        const float row = simt::LoadShared(x + i * kTileStride + k);
        KVASIR_UNROLL
        for (int32_t j = 0; j < kColumnsOfThread; ++j) {
          of[i][j] = simt::Fma(
              row,
              simt::LoadShared(weights + j * kColumnThreads * kTileStride + k),
              of[i][j]);
        }
      }
    }
  }
};

template <typename T>
KVASIR_KERNEL(kThreads)
LiftKernel(LiftArgs args) {
  const int64_t head = simt::CtaY();
  const PackedMatrixArgs matrix =
      args.matrices[head / (args.num_heads / args.num_kv_heads)];
  // int32_t suffices, because a head has far fewer than 2^31 numbers.
  const auto depth = static_cast<int32_t>(matrix.k);
  const auto columns = static_cast<int32_t>(matrix.n);
  const int64_t done = int64_t{simt::CtaX()} * kTileRows;
  const int64_t left = args.num_rows - done;
  const int32_t rows =
      left < kTileRows ? static_cast<int32_t>(left) : kTileRows;
  const T* const x = reinterpret_cast<const T*>(args.x) +
                     (args.first_row + done) * args.x_row_stride +
                     args.column_in[head];
  T* const y = reinterpret_cast<T*>(args.y) +
               (args.first_row + done) * args.y_row_stride +
               args.column_out[head];

  auto* const x_tile = reinterpret_cast<float*>(simt::Shared());
  float* const weight_tile = x_tile + kTileRows * kTileStride;
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t first_row = thread / kColumnThreads * kRowsOfThread;
  const int32_t first_column = thread % kColumnThreads;
  for (int32_t n = 0; n < columns; n += kTileColumns) {
    Sums sums;
    for (int32_t k = 0; k < depth; k += kTileDepth) {
      const int32_t count = depth - k < kTileDepth ? depth - k : kTileDepth;
      // A warp fills a line of 32 numbers. Rows and columns beyond the end are
      // filled with zeros; their sums are not stored.
      const auto in_line = static_cast<int32_t>(simt::Lane());
      for (auto line = static_cast<int32_t>(simt::Warp());
           line < kTileRows + kTileColumns;
           line += int32_t{kThreads / simt::kWarp}) {
        float number = 0.0f;
        if (in_line < count && line < rows) {
          number = simt::ToFloat(
              simt::LoadGlobal(x + line * args.x_row_stride + k + in_line));
        }
        const int32_t column = n + line - kTileRows;
        if (in_line < count && line >= kTileRows && column < columns) {
          number = WeightAt(matrix.data, matrix.dtype,
                            int64_t{column} * depth + k + in_line);
        }
        simt::StoreShared(x_tile + line * kTileStride + in_line, number);
      }
      simt::SyncCta();
      sums.Add(x_tile + first_row * kTileStride,
               weight_tile + first_column * kTileStride, count);
      simt::SyncCta();  // waits until all threads have read the tiles
    }
    KVASIR_UNROLL
    for (int32_t i = 0; i < kRowsOfThread; ++i) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < kColumnsOfThread; ++j) {
        const int32_t column = n + first_column + j * kColumnThreads;
        if (first_row + i >= rows || column >= columns) continue;
        simt::StoreGlobal(y + (first_row + i) * args.y_row_stride + column,
                          simt::FromFloat<T>(sums.of[i][j]));
      }
    }
  }
}

// ---- lift on tensor cores

// The depth (k) of one mma, and how many 16-bit numbers a chunk of 16 bytes
// has.
constexpr int32_t kStep = 16;
constexpr int32_t kChunk = 8;

// A CTA computes a tile of kRows x kColumns outputs with kWarpsDown x
// kWarpsAcross warps. Operands are loaded into a ring of kStages stages in
// shared memory; a stage has kDepth numbers of k.
struct FewRows {
  static constexpr const char* kName = "lift_few_rows";
  static constexpr int32_t kRows = 16, kColumns = 32, kDepth = 128;
  static constexpr int32_t kWarpsDown = 1, kWarpsAcross = 4, kStages = 4;
};
struct ManyRows {
  static constexpr const char* kName = "lift_many_rows";
  static constexpr int32_t kRows = 128, kColumns = 64, kDepth = 32;
  static constexpr int32_t kWarpsDown = 4, kWarpsAcross = 2, kStages = 4;
};
template <typename Tile>
struct Sizes {
  static constexpr int32_t kThreads =
      int32_t{simt::kWarp} * Tile::kWarpsDown * Tile::kWarpsAcross;
  static constexpr int32_t kXNumbers = Tile::kRows * Tile::kDepth;
  static constexpr int32_t kStageNumbers =
      kXNumbers + Tile::kColumns * Tile::kDepth;
  // How many mma tiles a warp has down and across.
  static constexpr int32_t kDown = Tile::kRows / Tile::kWarpsDown / 16;
  static constexpr int32_t kAcross = Tile::kColumns / Tile::kWarpsAcross / 8;
  // The number of 16-byte chunks in a row of a stage, and how many rows all
  // threads fetch together.
  static constexpr int32_t kChunks = Tile::kDepth / kChunk;
  static constexpr int32_t kRowsTogether = kThreads / kChunks;
  static constexpr int32_t kFetchedRows = Tile::kRows / kRowsTogether;
  static_assert(Tile::kRows % kRowsTogether == 0,
                "every thread must fetch the same number of rows");
  static_assert(Tile::kDepth % (2 * kStep) == 0,
                "a load of columns has the operands of two steps");
  static_assert(Tile::kStages * kStageNumbers * 2 <= 48 * 1024,
                "the stages need more shared memory than a kernel has");

  // Where a chunk begins in a stage. Chunks are permuted: in eight consecutive
  // rows, chunks with the same index are in different banks.
  static KVASIR_DEVICE int32_t PlaceOf(int32_t row, int32_t chunk) {
    constexpr int32_t kTurns = kChunks < 8 ? kChunks : 8;
    return kChunk * (row * kChunks + (chunk ^ (row * kTurns / 8 % kTurns)));
  }
};

KVASIR_DEVICE bool Aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Copies numbers [k, k + 8) of a row of `depth` numbers to shared memory, with
// zeros after the end of the row.
template <typename T>
KVASIR_DEVICE void FetchChunk(const T* row, bool wide, int32_t k, int32_t depth,
                              T* to) {
  if (wide && k < depth) {
    simt::CopyAsync<16>(to, row + k);
    return;
  }
  simt::Pack<T, kChunk> pack;
  KVASIR_UNROLL
  for (int32_t i = 0; i < kChunk; ++i) {
    pack.number[i] = k + i < depth ? simt::LoadGlobal(row + k + i) : T{0};
  }
  simt::StoreShared(reinterpret_cast<simt::Pack<T, kChunk>*>(to), pack);
}

KVASIR_DEVICE void Mma(Bf16, float (&d)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2]) {
  simt::MmaBf16(d, a, b);
}
KVASIR_DEVICE void Mma(F16, float (&d)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2]) {
  simt::MmaF16(d, a, b);
}

// Returns where a row of a KV head begins in x or y. Row r is query head r %
// queries of token r / queries, for the `queries` query heads of the KV head.
KVASIR_DEVICE int64_t RowStart(const LiftArgs& args, int32_t kv_head,
                               int64_t row, const int64_t* column,
                               int64_t stride) {
  const auto queries = static_cast<uint32_t>(args.num_heads) /
                       static_cast<uint32_t>(args.num_kv_heads);
  const uint32_t token = static_cast<uint32_t>(row) / queries;
  const uint32_t query = static_cast<uint32_t>(row) - token * queries;
  return (args.first_row + token) * stride +
         column[static_cast<uint32_t>(kv_head) * queries + query];
}

// Stores two neighbouring numbers of a row, or only the first if it is the
// row's last.
template <typename T>
KVASIR_DEVICE void StorePair(T* row, int32_t column, int32_t columns,
                             float first, float second) {
  if (column >= columns) return;
  T* const to = row + column;
  const simt::Pack<T, 2> pair = {
      {simt::FromFloat<T>(first), simt::FromFloat<T>(second)}};
  const bool two = column + 1 < columns;
  if (two && reinterpret_cast<uintptr_t>(to) % sizeof(pair) == 0) {
    simt::StoreGlobal(reinterpret_cast<simt::Pack<T, 2>*>(to), pair);
    return;
  }
  simt::StoreGlobal(to, pair.number[0]);
  if (two) simt::StoreGlobal(to + 1, pair.number[1]);
}

template <typename T, typename Tile>
class LiftTile {
 public:
  // `row` and `column` are the first row and the first column of the tile.
  KVASIR_DEVICE LiftTile(const LiftArgs& args, int32_t kv_head, int64_t row,
                         int32_t column)
      : args_(args),
        kv_head_(kv_head),
        first_row_(row),
        first_column_(column),
        stages_(reinterpret_cast<T*>(simt::Shared())) {
    const PackedMatrixArgs& matrix = args.matrices[kv_head];
    depth_ = static_cast<int32_t>(matrix.k);
    columns_ = static_cast<int32_t>(matrix.n);
    weights_ = static_cast<const T*>(matrix.data) + int64_t{column} * depth_;
    rows_ = args.num_rows * (args.num_heads / args.num_kv_heads) - first_row_;
    const auto thread = static_cast<int32_t>(simt::Thread());
    chunk_ = thread % S::kChunks;
    fetched_row_ = thread / S::kChunks;
    const bool whole = depth_ % kChunk == 0;
    wide_weights_ = whole && Aligned(weights_);
    KVASIR_UNROLL
    for (int32_t i = 0; i < S::kFetchedRows; ++i) {
      const int32_t at = fetched_row_ + i * S::kRowsTogether;
      x_[i] = nullptr;
      if (at < rows_) {
        x_[i] = reinterpret_cast<const T*>(args.x) +
                RowStart(args, kv_head, row + at, args.column_in,
                         args.x_row_stride);
      }
      wide_[i] = whole && Aligned(x_[i]);
    }
  }

  KVASIR_DEVICE void Compute() {
    constexpr int32_t kAhead = (Tile::kStages - 1) * Tile::kDepth;
    T* stage = stages_;
    for (int32_t k = 0; k < kAhead; k += Tile::kDepth) {
      if (k < depth_) Fetch(k, stage);
      simt::CommitCopies();
      stage += S::kStageNumbers;
    }
    T* used = stage;  // the next stage to be filled
    stage = stages_;
    for (int32_t k = 0; k < depth_; k += Tile::kDepth) {
      simt::WaitCopies<Tile::kStages - 2>();
      // After this barrier, the copies of all threads to `stage` have arrived,
      // and no thread reads `used` any more.
      simt::SyncCta();
      if (k + kAhead < depth_) Fetch(k + kAhead, used);
      simt::CommitCopies();
      Multiply(stage, stage + S::kXNumbers, (depth_ - k + kStep - 1) / kStep);
      used = stage;
      stage += S::kStageNumbers;
      if (stage == stages_ + Tile::kStages * S::kStageNumbers) stage = stages_;
    }
    Store();
  }

 private:
  using S = Sizes<Tile>;

  // Starts the copies that fill a stage. Rows and columns beyond the end keep
  // old contents; their sums are not stored.
  KVASIR_DEVICE void Fetch(int32_t k, T* stage) const {
    k += chunk_ * kChunk;
    KVASIR_UNROLL
    for (int32_t i = 0; i < S::kFetchedRows; ++i) {
      if (x_[i] == nullptr) continue;
      const int32_t row = fetched_row_ + i * S::kRowsTogether;
      FetchChunk(x_[i], wide_[i], k, depth_, stage + S::PlaceOf(row, chunk_));
    }
    for (int32_t row = fetched_row_; row < Tile::kColumns;
         row += S::kRowsTogether) {
      if (first_column_ + row >= columns_) break;
      FetchChunk(weights_ + int64_t{row} * depth_, wide_weights_, k, depth_,
                 stage + S::kXNumbers + S::PlaceOf(row, chunk_));
    }
  }

  // Adds the products of a stage, for at most `steps` steps of 16 numbers of k
  // each.
  KVASIR_DEVICE void Multiply(const T* x, const T* weights, int32_t steps) {
    const auto lane = static_cast<int32_t>(simt::Lane());
    const int32_t x_row = FirstRow() + lane % 16;
    const int32_t column = FirstColumn() + lane % 8;
    KVASIR_UNROLL
    for (int32_t step = 0; step < Tile::kDepth / kStep; step += 2) {
      if (step >= steps) break;
      uint32_t b[S::kAcross][4];  // operands from the matrix for two steps of k
      KVASIR_UNROLL
      for (int32_t n = 0; n < S::kAcross; ++n) {
        simt::LoadMatrices<4>(
            b[n], weights + S::PlaceOf(column + 8 * n, 2 * step + lane / 8));
      }
      KVASIR_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        if (step + half >= steps) break;
        KVASIR_UNROLL
        for (int32_t m = 0; m < S::kDown; ++m) {
          uint32_t a[4];
          simt::LoadMatrices<4>(
              a, x + S::PlaceOf(x_row + 16 * m, 2 * (step + half) + lane / 16));
          KVASIR_UNROLL
          for (int32_t n = 0; n < S::kAcross; ++n) {
            const uint32_t both[2] = {b[n][2 * half], b[n][2 * half + 1]};
            Mma(T{}, sums_[m][n], a, both);
          }
        }
      }
    }
  }

  KVASIR_DEVICE void Store() const {
    const auto lane = static_cast<int32_t>(simt::Lane());
    KVASIR_UNROLL
    for (int32_t m = 0; m < S::kDown; ++m) {
      KVASIR_UNROLL
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = FirstRow() + 16 * m + 8 * half + lane / 4;
        if (row >= rows_) continue;
        T* const y = reinterpret_cast<T*>(args_.y) +
                     RowStart(args_, kv_head_, first_row_ + row,
                              args_.column_out, args_.y_row_stride);
        KVASIR_UNROLL
        for (int32_t n = 0; n < S::kAcross; ++n) {
          const float(&d)[4] = sums_[m][n];
          StorePair(y, first_column_ + FirstColumn() + 8 * n + lane % 4 * 2,
                    columns_, d[2 * half], d[2 * half + 1]);
        }
      }
    }
  }

  // FirstRow and FirstColumn return the warp's first row and first column in
  // the tile.
  static KVASIR_DEVICE int32_t FirstRow() {
    return static_cast<int32_t>(simt::Warp()) / Tile::kWarpsAcross * 16 *
           S::kDown;
  }
  static KVASIR_DEVICE int32_t FirstColumn() {
    return static_cast<int32_t>(simt::Warp()) % Tile::kWarpsAcross * 8 *
           S::kAcross;
  }

  const LiftArgs& args_;
  const int32_t kv_head_;
  const int64_t first_row_;
  const int32_t first_column_;
  T* const stages_;
  int32_t depth_, columns_;
  // number of rows of the KV head from the tile's first row on
  int64_t rows_;
  const T* weights_;
  bool wide_weights_;
  // The chunk, and the first of the rows, that this thread fetches.
  int32_t chunk_, fetched_row_;
  const T* x_[S::kFetchedRows];
  bool wide_[S::kFetchedRows];
  float sums_[S::kDown][S::kAcross][4] = {};
};

constexpr int64_t Tiles(int64_t numbers, int64_t of) {
  return (numbers + of - 1) / of;
}

template <typename T, typename Tile>
KVASIR_KERNEL(Sizes<Tile>::kThreads)
TensorCoreLiftKernel(LiftArgs args) {
  constexpr auto kColumns = uint32_t{Tile::kColumns};
  const uint32_t tiles =
      (static_cast<uint32_t>(args.most_columns) + kColumns - 1) / kColumns;
  const uint32_t kv_head = simt::CtaY() / tiles;
  const uint32_t column = simt::CtaY() % tiles * kColumns;
  if (column >= args.matrices[kv_head].n) return;
  LiftTile<T, Tile>(args, static_cast<int32_t>(kv_head),
                    int64_t{simt::CtaX()} * Tile::kRows,
                    static_cast<int32_t>(column))
      .Compute();
}

// ---- complex_lift

template <typename T>
KVASIR_KERNEL(kThreads)
ComplexLiftKernel(ComplexLiftArgs args) {
  const int64_t head = simt::CtaY();
  const ComplexChannelsArgs channels =
      args.channels[head / (args.num_heads / args.num_kv_heads)];
  const int64_t row = args.first_row + simt::CtaX();
  const T* const x = reinterpret_cast<const T*>(args.x) +
                     row * args.x_row_stride + args.column_in[head];
  T* const y = reinterpret_cast<T*>(args.y) + row * args.y_row_stride +
               args.column_out[head];
  const int64_t count = channels.num_channels;
  const bool halves_in = args.pairing == RopePairing::kHalfSplit;
  const bool halves_out = args.out_pairing == RopePairing::kHalfSplit;
  for (int64_t c = simt::Thread(); c < count; c += simt::Threads()) {
    const int64_t f = channels.pairs[c];
    const T* const first = x + (halves_in ? f : 2 * f);
    const float a = simt::ToFloat(simt::LoadGlobal(first));
    const float b = simt::ToFloat(
        simt::LoadGlobal(first + (halves_in ? args.num_pairs : 1)));
    float re = a, im = b;
    if (channels.up != nullptr) {
      const float real = simt::LoadGlobal(channels.up + c);
      const float imaginary = simt::LoadGlobal(channels.up + count + c);
      re = simt::Fma(a, real, b * imaginary);
      im = simt::Fma(b, real, -(a * imaginary));
    }
    T* const to = y + (halves_out ? c : 2 * c);
    simt::StoreGlobal(to, simt::FromFloat<T>(re));
    simt::StoreGlobal(to + (halves_out ? count : 1), simt::FromFloat<T>(im));
  }
}

template <typename Tile>
KernelLaunch GridOf(const LiftArgs& args) {
  KernelLaunch launch;
  launch.name = Tile::kName;
  launch.grid_x = simt::Ctas(
      args.num_rows * (args.num_heads / args.num_kv_heads), Tile::kRows);
  launch.grid_y =
      simt::Ctas(args.num_kv_heads * Tiles(args.most_columns, Tile::kColumns));
  launch.threads = Sizes<Tile>::kThreads;
  launch.shared_bytes = Tile::kStages * Sizes<Tile>::kStageNumbers * 2;
  return launch;
}

// Up to this number of rows, tiles of 16 x 32 are used. More rows fill at least
// half of a tile of 128 x 64.
constexpr int64_t kMostOfFewRows = 64;

template <typename T>
void LaunchTensorCores(const LiftArgs& args, Launcher& launcher) {
  const KernelLaunch many = GridOf<ManyRows>(args);
  const int64_t rows = args.num_rows * (args.num_heads / args.num_kv_heads);
  if (rows > kMostOfFewRows &&
      int64_t{many.grid_x} * many.grid_y >= launcher.multiprocessors()) {
    simt::Launch(launcher, many, TensorCoreLiftKernel<T, ManyRows>, args);
  } else {
    simt::Launch(launcher, GridOf<FewRows>(args),
                 TensorCoreLiftKernel<T, FewRows>, args);
  }
}

}  // namespace

void LiftCuda(const LiftArgs& args, float*, Launcher& launcher) {
  if (args.one_type && args.dtype == DType::kBf16) {
    return LaunchTensorCores<Bf16>(args, launcher);
  }
  if (args.one_type && args.dtype == DType::kF16) {
    return LaunchTensorCores<F16>(args, launcher);
  }
  KernelLaunch launch;
  launch.name = "lift";
  launch.grid_x =
      static_cast<uint32_t>((args.num_rows + kTileRows - 1) / kTileRows);
  launch.grid_y = static_cast<uint32_t>(args.num_heads);
  launch.threads = kThreads;
  launch.shared_bytes = kSharedBytes;
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, LiftKernel<decltype(type)>, args);
  });
}

void ComplexLiftCuda(const ComplexLiftArgs& args, Launcher& launcher) {
  // Threads per CTA. A head has only a few dozen channels.
  constexpr uint32_t kChannelThreads = 64;
  static_assert(kChannelThreads <= kThreads);
  KernelLaunch launch;
  launch.name = "complex_lift";
  launch.grid_x = static_cast<uint32_t>(args.num_rows);
  launch.grid_y = static_cast<uint32_t>(args.num_heads);
  launch.threads = kChannelThreads;
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, ComplexLiftKernel<decltype(type)>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
