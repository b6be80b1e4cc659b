// kv_append: writes new tokens' latents into their slots, as numbers or codes.
// C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// Token t goes to page slots[t] / P, slot slots[t] % P; without slots, to page
// t / P, slot t % P. A negative slot is skipped. No two tokens of one launch
// have the same slot.
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
// are no codes stay what they are); ranges end at the greatest finite number.
// No stored range has a -0.
template <template <typename> class Ptr>
struct KvAppendPartIn {
  int64_t column = 0;  // of its latents in a row
  LatentPartIn<Ptr> part;
  // The number of codes that static ranges clamp, (x - minimum) / scale beyond
  // what rounds to an end (below -1/2, or levels + 1/2 and above), is added to
  // it; null: not counted. Parts may share one.
  Ptr<int64_t> clamped = nullptr;
};
using KvAppendPart = KvAppendPartIn<DevicePtr>;
using KvAppendPartArgs = KvAppendPartIn<LaunchPtr>;

template <template <typename> class Ptr>
struct KvAppendParamsIn {
  Ptr<const KvAppendPartIn<Ptr>> parts = nullptr;  // of both sides
  int64_t num_parts = 0;
  int64_t row_stride = 0;           // in elements
  int64_t page_tokens = 0;          // P
  Ptr<const float> rows = nullptr;  // [T, ...], rows row_stride apart
  // [T]: page * P + slot in the page; or null
  Ptr<const int64_t> slots = nullptr;
  int64_t num_tokens = 0;  // T
  // [T]; 1 is written for a token with a number to be coded that is not finite,
  // nothing for others. Null: not told. Float32, which ranks add up.
  Ptr<float> not_finite = nullptr;
  DType dtype = DType::kF32;  // of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(parts, rows, slots, not_finite);
  }
};
using KvAppendParams = KvAppendParamsIn<DevicePtr>;
using KvAppendArgs = KvAppendParamsIn<LaunchPtr>;

// What a step gives.
struct KvAppendRows {
  DevicePtr<const float> rows;
  DevicePtr<const int64_t> slots;
  int64_t num_tokens = 0;
  DevicePtr<float> not_finite;
};

inline int64_t SlotOfToken(const KvAppendArgs& params, int64_t token) {
  return params.slots != nullptr ? params.slots[token] : token;
}

class CpuStream;
void KvAppendReference(const KvAppendArgs& params, CpuStream& stream);
void KvAppendSimd(const KvAppendArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
