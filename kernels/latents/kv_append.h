// kv_append: writes the latents of new tokens into their slots, as numbers or
// codes. C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// Token t goes to page slots[t] / P, slot slots[t] % P; without slots, to page
// t / P, slot t % P. Pages of one slot may begin at any byte (slots_are_bytes):
// then slots[t] is the offset of the token's page. A negative slot is skipped.
// No two tokens of a launch may have the same slot.
//
// Numbers are rounded to the part's dtype (nearest, ties to even). Codes of b
// bits are computed in float32 with IEEE division (docs/artifact.md, Codes);
// levels = 2^b - 1:
//   ranges in slots, per run: minimum = the least number rounded down to
//     param_dtype; scale = max(greatest - minimum, 0) / levels rounded up to
//     it; code = 0 if scale is 0, else round-half-even(clamp((x - minimum) /
//     scale, 0, levels))
//   static ranges: the same code from the channel's own range; a channel of
//     0 bits has no code
//   levels: x becomes u = x * (sqrt(R') / sqrt(sum of x^2)), code = the number
//     of edges (levels[i - 1] + levels[i]) / 2 below u; scale = sqrt(sum of
//     x^2) / sqrt(sum of levels[code]^2) rounded to param_dtype. Sums are FMA
//     chains in 16 lanes, number c in lane c % 16, then TreeSum
// If a number is not finite or param_dtype cannot hold a range, the code is
// valid and the range finite anyway: only that token's own output is affected.
// A number that is not finite counts as 0 when it is coded, and `not_finite`
// reports it. Numbers that are stored as numbers stay what they are (a NaN
// becomes some NaN of the device). Ranges end at the greatest finite number. No
// stored range is -0.
//
// If the layer has slot metadata, then for every unit a token's score becomes 0
// and its position is written. Each side with a plane of errors also gets
//   EncodeError(sqrt(sum of (x - x')^2))
// over the coded numbers x of all its latents. x' is the decoded number:
// fma(code, scale, minimum), or levels[code] * scale, or the minimum of a
// channel of 0 bits. The sum of a latent is an FMA chain in 16 lanes over all
// runs, with number i of a run in lane i % 16, then TreeSum. The sums of a
// unit's latents are added part by part, group by group. Parts of numbers add
// nothing.
template <template <typename> class Ptr>
struct KvAppendPartIn {
  int64_t column = 0;  // first column of its latents in a row
  LatentPartIn<Ptr> part;
  // A counter, to which the number of codes that static ranges clamped is
  // added. A code is clamped if (x - minimum) / scale is beyond what rounds to
  // the first or last code (below -1/2, or at least levels + 1/2). Null: not
  // counted. Parts may share a counter.
  Ptr<int64_t> clamped = nullptr;
  // The unit of each group [G], in the memory space of the view's groups, and
  // the sides to which its errors are added (both, for a joint part). Null:
  // they are added to no unit.
  const int32_t* unit_of_group = nullptr;
  bool errors_of[kErrorSides] = {false, false};
};
using KvAppendPart = KvAppendPartIn<DevicePtr>;
using KvAppendPartArgs = KvAppendPartIn<LaunchPtr>;

// A latent stored as codes whose errors are added to a unit: its index among
// the groups of all parts, and the sides, one bit for each.
struct alignas(8) UnitLatent {
  int32_t index;
  uint32_t sides;
};

template <template <typename> class Ptr>
struct KvAppendParamsIn {
  Ptr<const KvAppendPartIn<Ptr>> parts = nullptr;  // of both sides
  int64_t num_parts = 0;
  // Sizes of the parts, for a GPU's grid and scratch: the number of groups in
  // all parts, the largest number of groups in one part, and the number of
  // channels of the widest latent that is stored as codes.
  int64_t num_groups = 0;
  int64_t most_groups = 0;
  int64_t most_codes = 0;
  // Only for a GPU, if there is metadata: the latents of each unit, unit by
  // unit, in the order in which their errors are added; and the end of each
  // unit's latents [U].
  Ptr<const UnitLatent> unit_latents = nullptr;
  Ptr<const int32_t> unit_ends = nullptr;
  int64_t row_stride = 0;           // in elements
  int64_t page_tokens = 0;          // P
  SlotMetadataIn<Ptr> metadata;     // of the layer, if it may evict
  Ptr<const float> rows = nullptr;  // [T, ...], rows row_stride apart
  // [T]: page * P + slot in the page. Null: token t goes to page t / P, slot t
  // % P.
  Ptr<const int64_t> slots = nullptr;
  int64_t num_tokens = 0;  // T
  // [T]: 1 is written for a token with a number to be coded that is not finite;
  // nothing is written for others. Null: not reported. It is float32 because
  // ranks add it up.
  Ptr<float> not_finite = nullptr;
  // [T]: positions of the tokens, stored in 32 bits; null without metadata.
  Ptr<const int64_t> positions = nullptr;
  DType dtype = DType::kF32;  // type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(parts, unit_latents, unit_ends, metadata.arena, rows, slots,
          not_finite, positions);
  }
};
using KvAppendParams = KvAppendParamsIn<DevicePtr>;
using KvAppendArgs = KvAppendParamsIn<LaunchPtr>;

// The most channels that the GPU kernel accepts in a latent that is stored as
// codes. Each takes a byte of shared memory.
inline constexpr int64_t kCudaAppendCodes = int64_t{48} << 10;

// The arguments that change with every step.
struct KvAppendRows {
  DevicePtr<const float> rows;
  DevicePtr<const int64_t> slots;
  int64_t num_tokens = 0;
  DevicePtr<float> not_finite;
  DevicePtr<const int64_t> positions;  // for layers with slot metadata
};

KVASIR_HOST_DEVICE inline int64_t SlotOfToken(const KvAppendArgs& params,
                                              int64_t token) {
  return params.slots != nullptr ? params.slots[token] : token;
}

// Sums of squared errors in the CPU's scratch [T, U, 2], if there is metadata.
inline float* SquaredErrorsOf(const KvAppendArgs& params, int64_t token,
                              int64_t unit, float* scratch) {
  return scratch + (token * params.metadata.num_units + unit) * kErrorSides;
}
// StartSlotMetadata clears a token's sums of errors. WriteSlotMetadata writes
// the score, position and errors of its slots after all parts are appended.
void StartSlotMetadata(const KvAppendArgs& params, int64_t token,
                       float* scratch);
void WriteSlotMetadata(const KvAppendArgs& params, int64_t token,
                       float* scratch);

class CpuStream;
void KvAppendReference(const KvAppendArgs& params, float* scratch,
                       CpuStream& stream);
void KvAppendSimd(const KvAppendArgs& params, float* scratch,
                  CpuStream& stream);

}  // namespace kvasir::kernels
