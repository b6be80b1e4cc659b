// add_rows, sum_rows and gather_rows on a GPU: one thread for each pack (16
// bytes or one number) of the output (simt::LaunchOnRows).
//
// Activations (x, y, out) have the type args.dtype, whatever their pointers'
// type. Only the one row that add_rows may add to all rows is float32.
//
// Layout: rows of N neighbouring numbers, strides apart. They are read 16 bytes
// at a time if the size of a row, strides and pointers are multiples of 16
// bytes, otherwise one number at a time.
//
// Bytes of a row with B bytes per number: add_rows reads 2 N B and writes N B
// (a row that is added to all comes from the caches); sum_rows reads T N B and
// writes N B; gather_rows reads and writes N B.
//
// Operations: conversions, and N additions in add_rows, T N in sum_rows.
// Shortest possible time: the bytes divided by the memory's bandwidth.
#include "kernels/rowwise/rows.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

// Adds rows of x to rows of y. If kBias is set, x is a single float32 row that
// is added to all rows of y.
template <typename T, int n, bool kBias>
KVASIR_KERNEL(simt::kRowThreads)
AddRowsKernel(simt::OnRows<AddRowsArgs> on) {
  using Pack = simt::Pack<T, n>;
  const AddRowsArgs& args = on.args;
  auto* const y = reinterpret_cast<T*>(args.y);
  const auto* const x = reinterpret_cast<const T*>(args.x);
  simt::ForPacksOfRows<n>(
      on, args.num_rows, args.columns, [&](int64_t row, int64_t column) {
        float more[n];
        if constexpr (kBias) {
          simt::LoadFloats(args.x + column, more);
        } else {
          const auto pack = simt::LoadGlobal(reinterpret_cast<const Pack*>(
              x + row * args.x_row_stride + column));
          KVASIR_UNROLL
          for (int k = 0; k < n; ++k) more[k] = simt::ToFloat(pack.number[k]);
        }
        auto* const at =
            reinterpret_cast<Pack*>(y + row * args.y_row_stride + column);
        Pack sum = simt::LoadGlobal(at);
        KVASIR_UNROLL
        for (int k = 0; k < n; ++k) {
          sum.number[k] =
              simt::FromFloat<T>(simt::ToFloat(sum.number[k]) + more[k]);
        }
        simt::StoreGlobal(at, sum);
      });
}

template <typename T, int n>
void LaunchAddRows(const AddRowsArgs& args, Launcher& launcher) {
  simt::LaunchOnRows(launcher, "add_rows", args.num_rows, args.columns / n,
                     args.x_row_stride == 0 ? AddRowsKernel<T, n, true>
                                            : AddRowsKernel<T, n, false>,
                     args);
}

template <typename T, int n>
KVASIR_KERNEL(simt::kRowThreads)
SumRowsKernel(simt::OnRows<SumRowsArgs> on) {
  using Pack = simt::Pack<T, n>;
  const SumRowsArgs& args = on.args;
  const auto* const x = reinterpret_cast<const T*>(args.x);
  // The output has only one row.
  simt::ForPacksOfRows<n>(on, 1, args.columns, [&](int64_t, int64_t column) {
    float sum[n];
    KVASIR_UNROLL
    // A sum that started from 0 would turn -0 into 0.
    for (int k = 0; k < n; ++k) sum[k] = -0.0f;
    KVASIR_NO_UNROLL
    for (int64_t row = 0; row < args.num_rows; ++row) {
      const auto more = simt::LoadOnce(
          reinterpret_cast<const Pack*>(x + row * args.x_row_stride + column));
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) sum[k] += simt::ToFloat(more.number[k]);
    }
    Pack rounded;
    KVASIR_UNROLL
    for (int k = 0; k < n; ++k) rounded.number[k] = simt::FromFloat<T>(sum[k]);
    simt::StoreGlobal(
        reinterpret_cast<Pack*>(reinterpret_cast<T*>(args.out) + column),
        rounded);
  });
}

template <typename T, int n>
void LaunchSumRows(const SumRowsArgs& args, Launcher& launcher) {
  simt::LaunchOnRows(launcher, "sum_rows", 1, args.columns / n,
                     SumRowsKernel<T, n>, args);
}

// Copies rows bit by bit. Word is an integer as wide as one number.
template <typename Word, int n>
KVASIR_KERNEL(simt::kRowThreads)
GatherRowsKernel(simt::OnRows<GatherRowsArgs> on) {
  using Pack = simt::Pack<Word, n>;
  const GatherRowsArgs& args = on.args;
  const auto* const x = reinterpret_cast<const Word*>(args.x);
  auto* const out = reinterpret_cast<Word*>(args.out);
  simt::ForPacksOfRows<n>(
      on, args.num_rows, args.columns, [&](int64_t row, int64_t column) {
        const int64_t from =
            args.rows != nullptr ? simt::LoadGlobal(args.rows + row) : row;
        const auto pack = simt::LoadOnce(reinterpret_cast<const Pack*>(
            x + from * args.x_row_stride + column));
        simt::StoreGlobal(
            reinterpret_cast<Pack*>(out + row * args.out_row_stride + column),
            pack);
      });
}

template <typename Word>
void LaunchGatherRows(const GatherRowsArgs& args, Launcher& launcher) {
  constexpr int n = simt::kWidePack<Word>;
  if (simt::WideRows<Word>(args.columns, args.x, args.out) &&
      simt::WideRows<Word>(args.x_row_stride) &&
      simt::WideRows<Word>(args.out_row_stride)) {
    simt::LaunchOnRows(launcher, "gather_rows", args.num_rows, args.columns / n,
                       GatherRowsKernel<Word, n>, args);
  } else {
    simt::LaunchOnRows(launcher, "gather_rows", args.num_rows, args.columns,
                       GatherRowsKernel<Word, 1>, args);
  }
}

}  // namespace

void AddRowsCuda(const AddRowsArgs& args, Launcher& launcher) {
  VisitDType(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (simt::WideRows<T>(args.columns, args.x, args.y) &&
        simt::WideRows<T>(args.x_row_stride) &&
        simt::WideRows<T>(args.y_row_stride)) {
      LaunchAddRows<T, simt::kWidePack<T>>(args, launcher);
    } else {
      LaunchAddRows<T, 1>(args, launcher);
    }
  });
}

void SumRowsCuda(const SumRowsArgs& args, Launcher& launcher) {
  VisitDType(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (simt::WideRows<T>(args.columns, args.x, args.out) &&
        simt::WideRows<T>(args.x_row_stride)) {
      LaunchSumRows<T, simt::kWidePack<T>>(args, launcher);
    } else {
      LaunchSumRows<T, 1>(args, launcher);
    }
  });
}

void GatherRowsCuda(const GatherRowsArgs& args, Launcher& launcher) {
  if (args.dtype == DType::kF32) {
    LaunchGatherRows<uint32_t>(args, launcher);
  } else {
    LaunchGatherRows<uint16_t>(args, launcher);
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
