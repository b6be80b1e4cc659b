// rope: rotary position embedding in place, with angles in 64-bit fixed point.
// C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

enum class RopePairing : uint8_t {
  kHalfSplit,    // pair f is (f, f + rotary_dim / 2): Llama, NeoX
  kInterleaved,  // pair f is (2f, 2f + 1)
};

// Converts the angle per position to a fixed-point fraction of a full turn:
// round(radians / (2 pi) * 2^64), modulo 2^64. The product of this fraction and
// a position is exact. A product in float32 would be wrong by up to 0.008 rad
// at position 131072.
uint64_t RopeStep(double radians_per_position);

// A head with its own list of angles, one for each pair. Examples: a head from
// which a compression method (RAP) has pruned some pairs, and a head of complex
// channels, of which several may use the same angle. The head's 2n numbers are
// laid out like those of a head that has only n pairs.
struct RopeHead {
  int64_t begin = 0;      // offset of the head's numbers in a row
  int64_t num_pairs = 0;  // n
  // [n]: the index of each pair's angle, below rotary_dim / 2; null: 0 .. n - 1
  const int32_t* pairs = nullptr;
};

// One tensor to rotate: [T, heads, head_dim], or rows of heads with different
// sizes. Numbers that belong to no pair are not changed.
template <template <typename> class Ptr>
struct RopeTensorIn {
  Ptr<float> data = nullptr;  // null: nothing to rotate
  int64_t row_stride = 0;     // number of elements from one token to the next
  int64_t num_heads = 0;
  int64_t head_dim = 0;  // >= rotary_dim; later numbers are not changed
  // [num_heads]; null: head h begins at h * head_dim and pair f uses angle f.
  // If neighbouring heads have the same `pairs`, a CPU looks up their cosines
  // and sines only once.
  Ptr<const RopeHead> heads = nullptr;
};

// For each token t and angle f:
//   angle = steps[f] * positions[t] (mod 2^64)
//   c = attention_factor * cos(angle), s = attention_factor * sin(angle)
// Then pair i = (a, b) of each head becomes (a c - b s, b c + a s), with the
// angle f = pairs[i], or f = i if `pairs` is null. The second product of each
// sum is rounded; a fused multiply-add then adds the first product.
template <template <typename> class Ptr>
struct RopeParamsIn {
  RopeTensorIn<Ptr> q;
  RopeTensorIn<Ptr> k;
  int64_t num_tokens = 0;                  // T
  Ptr<const int64_t> positions = nullptr;  // [T]
  Ptr<const uint64_t> steps = nullptr;     // [rotary_dim / 2], from RopeStep
  int64_t rotary_dim = 0;                  // even
  RopePairing pairing = RopePairing::kHalfSplit;
  float attention_factor = 1.0f;
  DType dtype = DType::kF32;  // the type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(q.data, q.heads, k.data, k.heads, positions, steps);
  }
};
using RopeTensor = RopeTensorIn<DevicePtr>;
using RopeTensorArgs = RopeTensorIn<LaunchPtr>;
using RopeParams = RopeParamsIn<DevicePtr>;
using RopeArgs = RopeParamsIn<LaunchPtr>;

// The arguments of Rope that change with every step; all others are prepared.
struct RopeRows {
  DevicePtr<float> q;
  DevicePtr<float> k;
  DevicePtr<const int64_t> positions;  // [T]
  int64_t num_tokens = 0;
};

class CpuStream;
void RopeReference(const RopeArgs& params, float* scratch, CpuStream& stream);
void RopeSimd(const RopeArgs& params, float* scratch, CpuStream& stream);
// Returns the number of floats of scratch per thread. They hold, for each angle
// of a position, its cosine, its sine and its number of quarter turns.
inline int64_t RopeScratch(int64_t rotary_dim) { return rotary_dim / 2 * 3; }

}  // namespace kvasir::kernels
