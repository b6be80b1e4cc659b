// Kernels that use each primitive, so that tests can compare its results with
// plain code, on the emulated device and on a GPU.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"
#include "kernels/simt/target.h"

// A test that the host compiles may use the kernels that nvcc compiled: it
// defines this macro as gpu. Then emulated::LaunchX and emulated::PrimitiveArgs
// mean those of gpu.
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

// out[CTA in the grid * threads + thread] =
//   thread | CTA's x << 10 | CTA's y << 20 | CTAs in x << 26.
void LaunchIndices(const PrimitiveArgs& args, uint32_t ctas_x, uint32_t ctas_y,
                   uint32_t threads, Launcher& launcher);

// Launches one warp. Each lane writes 16 words from out[16 * lane] on: in[lane]
// shuffled by xor 5, from lane 7, up by 3, down by 4, and by xor 1 within half
// a warp; ballot, any and all of odd numbers; sum and maximum of floats.
void LaunchWarp(const PrimitiveArgs& args, Launcher& launcher);
// Launches one warp. Each lane writes 2 words: the larger of the floats
// in[lane] and in[lane ^ 1], and the maximum of all lanes.
void LaunchMaxima(const PrimitiveArgs& args, Launcher& launcher);
// Two warps: out[thread] = in[the same lane of the other warp], by named
// barriers.
void LaunchBarriers(const PrimitiveArgs& args, Launcher& launcher);
// 32 threads copy `in` to `out`, each 28 bytes by copies of 16, 8 and 4 bytes.
void LaunchCopies(const PrimitiveArgs& args, Launcher& launcher);
// Copies `count` tiles of 1024 bytes from `in` to `out`, by bulk copies through
// two stages.
void LaunchBulkCopies(const PrimitiveArgs& args, Launcher& launcher);
// One warp: out[D] = A B + 1 in bf16 or fp16. `in` is A [16, 16] in rows, then
// B [16, 8] in columns, with two numbers in a word.
void LaunchMma(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// One warp: out[D] = the sum of `count` such products, added one by one from 0.
// `in` has A and B of each.
void LaunchMmaChain(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// One warp: `in` has 4 matrices. `out` gets the words that LoadMatrices gives
// each of 32 lanes for 1, 2 and 4 matrices, and then the words for transposed
// matrices.
void LaunchMatrices(const PrimitiveArgs& args, Launcher& launcher);
// Any number of CTAs. All threads do out[0] += 1 and out[1] += 0.5f; out[2] =
// the largest thread number in the grid; out[3] += 1 by CAS; out[4..5] += 2^31
// + 1 as one 64-bit number. more[CTA] = the CTA's threads, counted in shared
// memory in the CTA's scope.
void LaunchAtomics(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);
// Two CTAs: the first publishes in[0..63] by a release, the second acquires it
// and copies it to `out`.
void LaunchHandOver(const PrimitiveArgs& args, Launcher& launcher);
// For each of `count` triples (a, b, c) of words in `in`, writes kNumberWords
// words: FmaPair, AddPair, SubPair, MulPair of bf16, then of fp16; PickBytes(a,
// b, c); the float a converted to bf16 and fp16 and back; Exp2, Sqrt and Fma of
// floats; MinPair of a and b.
inline constexpr uint32_t kNumberWords = 15;
void LaunchNumbers(const PrimitiveArgs& args, Launcher& launcher);
// Each CTA adds up `count` numbers in tiles, copied through two stages; the
// last CTA to end adds up all sums: out[0]. `more` has a counter that starts as
// 0, and room for a number of each CTA.
void LaunchGridSum(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET
