// lift and complex_lift on a GPU.
//
// lift: a CTA to 16 rows of a query head, which takes 128 columns at a time and
// 32 numbers of the depth through shared memory; a thread has 4 rows of 2
// columns. Each output is lift.h's chain in the order of k, so that activations
// of float32 give the CPU's bits, for any number of rows.
// complex_lift: a CTA to a head of a row, a thread to a channel.
//
// x and y are of args.dtype whatever their pointers say; sums are float32.
// Layout: matrices as rows (WeightLayout::kRows), of any type; rows of heads,
// row strides apart.
// Bytes of a lift: x and y once, each matrix once for 16 rows of each of its
// query heads (mostly from the second-level cache). Operations: a fused one for
// each number of a head's input and output. Floor: the matrices' bytes over the
// memory's bandwidth for few rows, operations over that of float32 for many.
// complex_lift: its numbers' bytes.
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr int32_t kRowsOfThread = 4;
constexpr int32_t kColumnsOfThread = 2;
constexpr int32_t kTileRows = 16;
constexpr int32_t kTileColumns = 128;
constexpr int32_t kTileDepth = 32;
// Threads with neighbouring columns; four such sets share the rows.
constexpr int32_t kColumnThreads = kTileColumns / kColumnsOfThread;
static_assert(kTileRows / kRowsOfThread * kColumnThreads == kThreads);
// Four floats more than the depth, so that eight threads' packs of four lie in
// all banks.
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

// Sums of a thread, over numbers [0, depth) of the tiles; depth is 1 to 32.
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
    // No number that is not there may count, not even as 0.
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
  // Of a head: far below 2^31.
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
      // A warp fills a line of 32 numbers. Rows and columns that are not there
      // are zeros, whose sums nobody writes.
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
      simt::SyncCta();  // the tiles are read
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

}  // namespace

void LiftCuda(const LiftArgs& args, float*, Launcher& launcher) {
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
  // Heads have a few dozen channels.
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
