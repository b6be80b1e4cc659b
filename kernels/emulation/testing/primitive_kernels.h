// Kernels that use each primitive, so that tests can compare its results with
// plain code, on the emulated device and on a GPU.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"
#include "kernels/simt/target.h"

// A test that the host's compiler compiles may define this macro as `gpu` to
// use the kernels that nvcc compiled. Then names such as emulated::LaunchWarp
// mean those of namespace gpu.
#ifndef KVASIR_PRIMITIVES_TARGET
#define KVASIR_PRIMITIVES_TARGET KVASIR_SIMT_TARGET
#else
namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET {}
namespace kvasir::kernels::emulated {
using namespace KVASIR_PRIMITIVES_TARGET;  // NOLINT: see above
}
#endif

namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET {

struct PrimitiveArgs {
  const uint32_t* in = nullptr;
  uint32_t* out = nullptr;
  uint32_t* more = nullptr;
  uint32_t count = 0;
};

// Each thread writes one word of `out`: thread | x << 10 | y << 20 | ctas_x <<
// 26. Here x and y are the indices of the thread's CTA.
void LaunchIndices(const PrimitiveArgs& args, uint32_t ctas_x, uint32_t ctas_y,
                   uint32_t threads, Launcher& launcher);

// Launches one warp. Each lane writes the results of shuffles, votes, sums and
// maxima to 16 words from out[16 * lane] on.
void LaunchWarp(const PrimitiveArgs& args, Launcher& launcher);
// Launches one warp. Each lane writes 2 words: the larger of the floats
// in[lane] and in[lane ^ 1], and the maximum of all lanes.
void LaunchMaxima(const PrimitiveArgs& args, Launcher& launcher);
// Launches one CTA of two warps, which exchange numbers by named barriers:
// out[thread] = in[the same lane of the other warp].
void LaunchBarriers(const PrimitiveArgs& args, Launcher& launcher);
// Launches 32 threads that copy `in` to `out`; each copies 28 bytes, by
// asynchronous copies of 16, 8 and 4 bytes.
void LaunchCopies(const PrimitiveArgs& args, Launcher& launcher);
// Copies `count` tiles of 1024 bytes from `in` to `out`, by bulk copies to two
// buffers in turn.
void LaunchBulkCopies(const PrimitiveArgs& args, Launcher& launcher);
// Launches one warp that computes out = A B + 1 for matrices of bf16 or fp16.
// `in` has A [16, 16] row by row, then B [16, 8] column by column, with two
// numbers in a word.
void LaunchMma(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// Launches one warp that computes a product of bytes. `in` has A [16, 32] row
// by row, then B [32, 8] column by column, with four bytes in a word. Element
// (m, n) of `out` becomes (A B)[m][n] + 1 + n % 2 + 2 * (m / 8).
void LaunchMmaBytes(const PrimitiveArgs& args, bool signed_a,
                    Launcher& launcher);
// Launches one warp that starts from 0 and adds `count` products A B, one after
// another; `out` receives the sum. `in` has A and B of each product, as for
// LaunchMma.
void LaunchMmaChain(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// Launches one warp. `in` has 4 matrices. `out` receives the words that
// LoadMatrices returns to each of the 32 lanes for 1, 2 and 4 matrices, then
// those for 1, 2 and 4 transposed matrices.
void LaunchMatrices(const PrimitiveArgs& args, Launcher& launcher);
// Launches CTAs in which each thread adds 1 to out[0], 0.5f to out[1] and 2^31
// + 1 to the 64-bit number at out[4]. It adds 1 to out[3] by compare-and-swap.
// out[2] becomes the largest thread number in the grid, and more[i] the number
// of threads of CTA i.
void LaunchAtomics(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);
// Launches two CTAs. The first publishes in[0..63] by a release; the second
// reads it after an acquire and copies it to `out`.
void LaunchHandOver(const PrimitiveArgs& args, Launcher& launcher);
// For each of `count` triples (a, b, c) of words in `in`, writes kNumberWords
// words: the results of the primitives that compute with numbers.
inline constexpr uint32_t kNumberWords = 15;
void LaunchNumbers(const PrimitiveArgs& args, Launcher& launcher);
// Launches CTAs that each add up `count` numbers. The CTA that ends last adds
// up the sums of all CTAs and stores the total in out[0]. `more` has a counter,
// which must be 0 at the start, and space for one number per CTA.
void LaunchGridSum(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET
