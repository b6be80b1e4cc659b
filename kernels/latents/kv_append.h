// kv_append: writes the latents of new tokens into their slots, as unquantized
// numbers or as codes. C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// Token t is written to slot slots[t] % P of page slots[t] / P, or to slot t %
// P of page t / P if `slots` is null. A token with a negative slots[t] is
// skipped. No two tokens of a launch may have the same slot.
//
// If slots_are_bytes (KvAppendShape) is set, a page has one slot, and slots[t]
// is the byte offset of the token's page. Any offset is allowed.
//
// Parts without codes store the numbers themselves, rounded to the part's dtype
// (to nearest, ties to even). Codes of b bits are computed in float32 with IEEE
// division (docs/artifact.md, Codes), in one of three ways. The greatest code
// is most = 2^b - 1.
//
//   ranges in slots, per run: minimum = the least number rounded down to
//     param_dtype; scale = max(greatest - minimum, 0) / most rounded up to
//     param_dtype; code = 0 if scale is 0, else round-half-even(clamp((x -
//     minimum) / scale, 0, most))
//   static ranges: code as above, from the scale and minimum of the channel; a
//     channel of 0 bits has no code
//   levels: x becomes u = x * (sqrt(width) / sqrt(sum of x^2)), code = the
//     number of edges (levels[i - 1] + levels[i]) / 2 below u; scale = sqrt(sum
//     of x^2) / sqrt(sum of levels[code]^2) rounded to param_dtype. Sums are
//     FMA chains in 16 lanes, number c in lane c % 16, then TreeSum
//
// Codes are always valid and ranges always finite, so a bad number affects only
// its own token. A number that is not finite is coded like 0 and reported in
// `not_finite`. Ranges are limited to the greatest finite number. Numbers that
// are stored without codes may be infinite or NaN (the bits of a NaN may
// change). Scales and minima are never -0.
//
// If the layer has slot metadata, the op sets the token's score to 0 and writes
// its position, for every unit. For each side (keys, values) that has a plane
// of errors, it also writes
//   EncodeError(sqrt(sum of (x - x')^2))
// over all numbers x of the unit's latents that are stored as codes. x' is the
// decoded number: fma(code, scale, minimum), or levels[code] * scale, or the
// minimum of a channel of 0 bits.
//
// The sum of squared errors of a latent is an FMA chain in 16 lanes over all
// runs, with number i of a run in lane i % 16, then TreeSum. The sums of a
// unit's latents are added in the order of parts, and of groups in a part.
template <template <typename> class Ptr>
struct KvAppendPartIn {
  int64_t column = 0;  // the column of a row at which the part's latents begin
  LatentPartIn<Ptr> part;
  // The op adds the number of codes that were clamped to their static range. A
  // code of b bits is clamped if (x - minimum) / scale is below -1/2 or at
  // least 2^b - 1/2. Null: nothing is counted. Parts may share a counter.
  Ptr<int64_t> clamped = nullptr;
  // The unit (slot_metadata.h) of each group [G]. Null: the part's quantization
  // errors are not stored.
  //
  // errors_of[0] is true if the errors are added to those of keys, and
  // errors_of[1] if they are added to those of values. For a joint part both
  // are true.
  const int32_t* unit_of_group = nullptr;
  bool errors_of[kErrorSides] = {false, false};
};
using KvAppendPart = KvAppendPartIn<DevicePtr>;
using KvAppendPartArgs = KvAppendPartIn<LaunchPtr>;

// A coded latent whose errors are added to a unit. `index` is the index of its
// group among the groups of all parts. Bit s of `sides` is set if the latent
// belongs to side s.
struct alignas(8) UnitLatent {
  int32_t index;
  uint32_t sides;
};

template <template <typename> class Ptr>
struct KvAppendParamsIn {
  // the parts of the keys and those of the values
  Ptr<const KvAppendPartIn<Ptr>> parts = nullptr;
  int64_t num_parts = 0;
  // Sizes of the parts, which determine a GPU's grid and scratch. num_groups is
  // the number of groups in all parts, most_groups the largest number of groups
  // in one part. most_codes is the number of channels of the widest latent that
  // is stored as codes.
  int64_t num_groups = 0;
  int64_t most_groups = 0;
  int64_t most_codes = 0;
  // Only for a GPU, and only if there is metadata. unit_latents has the latents
  // of all units, one unit after another, in the order in which their errors
  // are added. unit_ends[u] is the end of the latents of unit u.
  Ptr<const UnitLatent> unit_latents = nullptr;
  Ptr<const int32_t> unit_ends = nullptr;
  int64_t row_stride = 0;   // in elements
  int64_t page_tokens = 0;  // P
  // metadata of the layer, if the layer may evict
  SlotMetadataIn<Ptr> metadata;
  Ptr<const float> rows = nullptr;  // [T, ...], rows row_stride apart
  // [T]: page * P + slot in the page. Null: token t goes to page t / P, slot t
  // % P.
  Ptr<const int64_t> slots = nullptr;
  int64_t num_tokens = 0;  // T
  // [T]: a token's element is set to 1 if a number that must be coded is not
  // finite, and otherwise not changed. Null: such numbers are not reported. The
  // type is float32 because an all-reduce adds the values of all ranks.
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

// The most channels of a coded latent that the GPU kernel supports. The kernel
// needs a byte of shared memory for each of them.
inline constexpr int64_t kCudaAppendCodes = int64_t{48} << 10;

// The arguments that change with every step.
struct KvAppendRows {
  DevicePtr<const float> rows;
  DevicePtr<const int64_t> slots;
  int64_t num_tokens = 0;
  DevicePtr<float> not_finite;
  DevicePtr<const int64_t> positions;  // used only by layers with slot metadata
};

KVASIR_HOST_DEVICE inline int64_t SlotOfToken(const KvAppendArgs& params,
                                              int64_t token) {
  return params.slots != nullptr ? params.slots[token] : token;
}

// Returns the two sums of squared errors (keys and values) of one token and
// unit. Only the CPU uses these sums, and only if there is metadata.
inline float* SquaredErrorsOf(const KvAppendArgs& params, int64_t token,
                              int64_t unit, float* scratch) {
  return scratch + (token * params.metadata.num_units + unit) * kErrorSides;
}
// StartSlotMetadata sets a token's sums of errors to 0, before any part is
// appended. WriteSlotMetadata writes the token's score, position and errors,
// after all parts are appended.
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
