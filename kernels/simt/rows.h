// Rows of activations in kernels: packs of neighbouring numbers, the division
// of rows among a grid, and sums over a CTA. C++17.
#pragma once

#include <algorithm>

#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// The numbers that are loaded or stored by one access: n numbers that fill 16
// bytes, or a single one.
template <typename T, int n>
struct alignas(sizeof(T) * n) Pack {
  T number[n];
};
template <typename T>
inline constexpr int kWidePack = 16 / static_cast<int>(sizeof(T));

// Returns whether rows can be accessed in packs of 16 bytes. This requires that
// all pointers are null or aligned to 16 bytes, and that `columns` numbers fill
// whole packs.
template <typename T, typename... Pointers>
bool WideRows(int64_t columns, const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ... &&
          (columns % kWidePack<T> == 0));
}

// Returns numbers[i], for numbers of any type.
KVASIR_DEVICE float LoadNumber(const void* numbers, DType dtype, int64_t i,
                               Site site = Site::Here()) {
  switch (dtype) {
    case DType::kF16:
      return simt::ToFloat(
          LoadGlobal(static_cast<const F16*>(numbers) + i, site));
    case DType::kBf16:
      return simt::ToFloat(
          LoadGlobal(static_cast<const Bf16*>(numbers) + i, site));
    case DType::kF32:
      break;
  }
  return LoadGlobal(static_cast<const float*>(numbers) + i, site);
}

// Loads n float32 numbers (1, 4 or 8). If n > 1, their address must be aligned
// to 16 bytes.
template <int n>
KVASIR_DEVICE void LoadFloats(const float* from, float (&numbers)[n],
                              Site site = Site::Here()) {
  constexpr int kPart = n == 1 ? 1 : 4;
  static_assert(n % kPart == 0, "n must be 1 or a multiple of 4");
  KVASIR_UNROLL
  for (int i = 0; i < n; i += kPart) {
    const auto part =
        LoadGlobal(reinterpret_cast<const Pack<float, kPart>*>(from + i), site);
    KVASIR_UNROLL
    for (int k = 0; k < kPart; ++k) numbers[i + k] = part.number[k];
  }
}

// How the threads of a grid divide rows in elementwise ops. A CTA has several
// groups of 2^row_threads_log2 threads. Each group processes neighbouring packs
// of one row at a time, and different groups process different rows. CTAs with
// the same y index process different columns of the same rows; CTAs with
// different y indices process different rows.
inline constexpr uint32_t kRowThreads = 256;
template <typename Args>
struct OnRows {
  Args args;
  uint32_t row_threads_log2;
};

// Calls visit(row, first column) for this thread's packs of n numbers, in rows
// of `columns` numbers.
template <int n, typename Args, typename Visit>
KVASIR_DEVICE void ForPacksOfRows(const OnRows<Args>& on, int64_t num_rows,
                                  int64_t columns, const Visit& visit) {
  const uint32_t row_threads = 1u << on.row_threads_log2;
  const int64_t column =
      n * (int64_t{CtaX()} * row_threads + (Thread() & (row_threads - 1)));
  if (column >= columns) return;
  // The number of rows that a CTA processes at a time.
  const uint32_t rows = kRowThreads >> on.row_threads_log2;
  const int64_t step = int64_t{CtasY()} * rows;
  KVASIR_NO_UNROLL
  for (int64_t row = int64_t{CtaY()} * rows + (Thread() >> on.row_threads_log2);
       row < num_rows; row += step) {
    visit(row, column);
  }
}

// Enqueues a kernel that calls ForPacksOfRows, for rows of `packs` packs. The
// grid has at most as many CTAs in y as can be resident at the same time; they
// loop until all rows are done.
template <typename Args>
void LaunchOnRows(Launcher& launcher, const char* name, int64_t num_rows,
                  int64_t packs, void (*kernel)(OnRows<Args>),
                  const Args& args) {
  OnRows<Args> on = {args, 0};
  while (1u << on.row_threads_log2 < kRowThreads &&
         int64_t{1} << on.row_threads_log2 < packs) {
    ++on.row_threads_log2;
  }
  KernelLaunch launch;
  launch.name = name;
  launch.threads = kRowThreads;
  launch.grid_x = Ctas(packs, int64_t{1} << on.row_threads_log2);
  launch.grid_y = Ctas(num_rows, kRowThreads >> on.row_threads_log2);
  const int64_t resident =
      launcher.multiprocessors() * int64_t{2048 / kRowThreads};
  const auto most = static_cast<uint32_t>(
      launch.grid_x < resident ? resident / std::max(launch.grid_x, 1u) : 1);
  launch.grid_y = std::min({launch.grid_y, most, kMostCtasY});
  Launch(launcher, launch, kernel, on);
}

// Returns the sum of `value` over all threads of the CTA, with the same bits in
// each thread. WarpSum adds the lanes of each warp, and then the sums of the
// warps are added in order. `partial` is shared memory for one number per warp.
// Each call in a kernel must use different shared memory.
KVASIR_DEVICE float CtaSum(float value, float* partial,
                           Site site = Site::Here()) {
  value = WarpSum(value, site);
  if (Lane() == 0) StoreShared(partial + Warp(), value, site);
  // simt:: is needed, because the emulator also has a function of this name.
  simt::SyncCta(site);
  float sum = 0.0f;
  for (uint32_t warp = 0; warp < Threads() / kWarp; ++warp) {
    sum += LoadShared(partial + warp, site);
  }
  return sum;
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
