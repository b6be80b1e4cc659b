// Kernels that use each primitive once, so that what it does can be compared
// with what it should: on the emulated device here, and on a GPU.
#pragma once

#include <cstdint>

#include "kernels/device/launcher.h"
#include "kernels/simt/target.h"

// A test that the host compiles may ask for the kernels that nvcc compiled:
// with gpu here, emulated::LaunchX and PrimitiveArgs mean those of gpu.
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

// One warp; 16 words to a lane from out[16 * lane] on: of in[lane] the xor by
// 5, that of lane 7, up by 3, down by 4, the xor by 1 among the lanes of one
// half; the ballot, any and all of odd numbers; the sum and the maximum of
// floats.
void LaunchWarp(const PrimitiveArgs& args, Launcher& launcher);
// One warp; 2 words to a lane: the larger of floats in[lane] and in[lane ^ 1],
// and the maximum of all.
void LaunchMaxima(const PrimitiveArgs& args, Launcher& launcher);
// Two warps: out[thread] = in[other warp's same lane], by named barriers.
void LaunchBarriers(const PrimitiveArgs& args, Launcher& launcher);
// 32 threads: out = in, 32 times 28 bytes, by copies of 16, 8 and 4.
void LaunchCopies(const PrimitiveArgs& args, Launcher& launcher);
// out = in, `count` tiles of 1024 bytes, by bulk copies through two stages.
void LaunchBulkCopies(const PrimitiveArgs& args, Launcher& launcher);
// One warp: out[D] = A B + 1 of bf16 (or fp16): in is A [16, 16], row by row,
// then B [16, 8] column by column, pairs in a word.
void LaunchMma(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// One warp: out[D] = the sum of `count` such products, one by one from 0; in is
// A, B of each.
void LaunchMmaChain(const PrimitiveArgs& args, bool bf16, Launcher& launcher);
// One warp: in is 4 matrices; out is their words of x1, x2, x4, each for 32
// lanes (1, 2, 4 words to a lane), then the same transposed.
void LaunchMatrices(const PrimitiveArgs& args, Launcher& launcher);
// Many CTAs: out[0] += 1 and out[1] += 0.5f by all threads, out[2] = the
// largest number of a thread in its grid, out[3] += 1 by CAS; out[4..5] +=
// 2^31 + 1 as one number of 64 bits; more[CTA] = the CTA's threads, counted in
// shared memory in its scope.
void LaunchAtomics(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);
// Two CTAs: the first gives in[0..63] by release, the second takes them by
// acquire into out.
void LaunchHandOver(const PrimitiveArgs& args, Launcher& launcher);
// 15 words to each of `count` triples of words a, b, c of `in`: FmaPair,
// AddPair, SubPair, MulPair of bf16 and of fp16; PickBytes(a, b, c); bf16 and
// fp16 of float a and back; Exp2, Sqrt and Fma of floats; MinPair of a and b.
inline constexpr uint32_t kNumberWords = 15;
void LaunchNumbers(const PrimitiveArgs& args, Launcher& launcher);
// `count` numbers a CTA, in tiles through two stages of copies; the last CTA
// to end adds up what all have: out[0]. `more`: a counter, 0, and a number to
// a CTA.
void LaunchGridSum(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET
