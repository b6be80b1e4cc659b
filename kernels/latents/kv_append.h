// kv_append: writes new tokens' latents into their slots, as numbers or codes.
// C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// Token t goes to page slots[t] / P, slot slots[t] % P; without slots, to page
// t / P, slot t % P. Pages of one slot may begin at every byte (slots that are
// bytes): then slots[t] is where the token's begins. A negative slot is
// skipped. No two tokens of one launch have the same slot.
//
// Numbers are rounded to the part's dtype (nearest, ties to even). Codes, in
// float32 with IEEE division (docs/artifact.md, Codes), b bits, levels = 2^b-1:
//   ranges in slots, per run: minimum = the least number rounded down to
//     param_dtype; scale = max(greatest - minimum, 0) / levels rounded up to
//     it; code = 0 if scale is 0, else round-half-even(clamp((x - minimum) /
//     scale, 0, levels))
//   static ranges: the same code from the channel's own range; of 0 bits none
//   levels: x becomes u = x * (sqrt(R') / sqrt(sum of x^2)), code = the number
//     of edges (levels[i - 1] + levels[i]) / 2 below u; scale = sqrt(sum of
//     x^2) / sqrt(sum of levels[code]^2) rounded to param_dtype. Sums are FMA
//     chains in 16 lanes, number c in lane c % 16, then TreeSum
// A number that is not finite, or a range that param_dtype cannot hold, gives
// some valid code and finite ranges: such a token spoils itself, nobody else.
// What is not finite counts as 0, and `not_finite` tells of it (numbers that
// are no codes stay what they are, a NaN some NaN of the device's); ranges end
// at the greatest finite number. No stored range has a -0.
//
// Where the layer has metadata of slots, a token's score becomes 0 and its
// position is written, for every unit, and for each side with a plane of errors
//   EncodeError(sqrt(sum of (x - x')^2))
// of the numbers x of all its latents that are coded, x' being what the codec
// makes of them: fma(code, scale, minimum), or levels[code] * scale, or the
// minimum of a channel of 0 bits. Of a latent, the sum is an FMA chain in 16
// lanes, number i of a run in lane i % 16, over all runs, then TreeSum; those
// of a unit's latents are added up part by part, group by group. Parts of
// numbers add nothing.
template <template <typename> class Ptr>
struct KvAppendPartIn {
  int64_t column = 0;  // of its latents in a row
  LatentPartIn<Ptr> part;
  // The number of codes that static ranges clamp, (x - minimum) / scale beyond
  // what rounds to an end (below -1/2, or levels + 1/2 and above), is added to
  // it; null: not counted. Parts may share one.
  Ptr<int64_t> clamped = nullptr;
  // The unit of each group [G], where the view's groups are, and the sides that
  // its errors count for (a joint part: both); null: for none.
  const int32_t* unit_of_group = nullptr;
  bool errors_of[kErrorSides] = {false, false};
};
using KvAppendPart = KvAppendPartIn<DevicePtr>;
using KvAppendPartArgs = KvAppendPartIn<LaunchPtr>;

// A latent of codes that counts for a unit's errors: its place among the groups
// of all parts, and the sides, a bit for each.
struct alignas(8) UnitLatent {
  int32_t index;
  uint32_t sides;
};

template <template <typename> class Ptr>
struct KvAppendParamsIn {
  Ptr<const KvAppendPartIn<Ptr>> parts = nullptr;  // of both sides
  int64_t num_parts = 0;
  // Of the parts, for a GPU's grid and scratch: groups of all, the most groups
  // of one, the channels of the widest latent of codes.
  int64_t num_groups = 0;
  int64_t most_groups = 0;
  int64_t most_codes = 0;
  // For a GPU, where there is metadata: each unit's latents, unit by unit, in
  // the order in which their errors are added; where each unit's end, [U].
  Ptr<const UnitLatent> unit_latents = nullptr;
  Ptr<const int32_t> unit_ends = nullptr;
  int64_t row_stride = 0;           // in elements
  int64_t page_tokens = 0;          // P
  SlotMetadataIn<Ptr> metadata;     // of the layer, if it may evict
  Ptr<const float> rows = nullptr;  // [T, ...], rows row_stride apart
  // [T]: page * P + slot in the page; or null
  Ptr<const int64_t> slots = nullptr;
  int64_t num_tokens = 0;  // T
  // [T]; 1 is written for a token with a number to be coded that is not finite,
  // nothing for others. Null: not told. Float32, which ranks add up.
  Ptr<float> not_finite = nullptr;
  // [T]: of the tokens; null without metadata. Stored in 32 bits.
  Ptr<const int64_t> positions = nullptr;
  DType dtype = DType::kF32;  // of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(parts, unit_latents, unit_ends, metadata.arena, rows, slots,
          not_finite, positions);
  }
};
using KvAppendParams = KvAppendParamsIn<DevicePtr>;
using KvAppendArgs = KvAppendParamsIn<LaunchPtr>;

// Channels of a latent of codes that a GPU's kernel takes, a byte of shared
// memory for each.
inline constexpr int64_t kCudaAppendCodes = int64_t{48} << 10;

// What a step gives.
struct KvAppendRows {
  DevicePtr<const float> rows;
  DevicePtr<const int64_t> slots;
  int64_t num_tokens = 0;
  DevicePtr<float> not_finite;
  DevicePtr<const int64_t> positions;  // for layers with metadata of slots
};

KVASIR_HOST_DEVICE inline int64_t SlotOfToken(const KvAppendArgs& params,
                                              int64_t token) {
  return params.slots != nullptr ? params.slots[token] : token;
}

// Sums of squared errors in the CPU's scratch: [T, U, 2], where there is
// metadata.
inline float* SquaredErrorsOf(const KvAppendArgs& params, int64_t token,
                              int64_t unit, float* scratch) {
  return scratch + (token * params.metadata.num_units + unit) * kErrorSides;
}
// Starts what a token's slots have of metadata, and ends it when all parts are
// in.
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
