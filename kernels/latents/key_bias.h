// key_bias: keeps the bias of the key projection out of the cache. C++17.
//
// A key is R(n) (W x + b), where R(n) rotates by position n. The scale of a
// key's codes grows with the whole key. So a large bias b would use up most of
// the codes' levels, although it is the same for all tokens. RoPE rotates the
// numbers of a key in pairs, and the cache handles the bias of a pair in one of
// three ways:
//   tile pairs: the cache has R(n) (W x + b) - R(a) b, where a is the centre of
//     the position's tile. Such pairs hardly turn within a tile of kKeyBiasTile
//     positions, so little of b is left.
//   exact pairs: the cache has R(n) W x.
//   all other pairs: the cache has the key with its bias.
// If the mean M of W x + b was measured, M takes the place of b here, and the
// projection adds b - M to the pairs from which the cache leaves M out.
// Attention adds q . R(a) b (tile pairs) and q . R(n) b (exact pairs) to the
// scores (AttentionKeyBias). The rotated biases depend only on the slot's own
// position, so nothing is stored, and slots may move.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

inline constexpr int64_t kKeyBiasTile = 64;
// The most exact pairs of a head.
inline constexpr int64_t kMostExactPairs = 8;

// Returns the centre of the tile that contains this position.
KVASIR_HOST_DEVICE inline int64_t KeyBiasCentre(int64_t position) {
  return position / kKeyBiasTile * kKeyBiasTile + kKeyBiasTile / 2;
}

// A query's numbers for the key bias. A query with the numbers (q0, q1) for a
// pair whose bias is (b0, b1) has
//   u = q0 b0 + q1 b1, v = q1 b0 - q0 b1,
// so that q . R(n) b = u cos(angle) + v sin(angle). The numbers of a query are
//   u of the S tile pairs, v of the S tile pairs, zeros up to a multiple of 16,
//   then u, v of the first exact pair, u, v of the second, and so on.
KVASIR_HOST_DEVICE inline int64_t KeyBiasTileColumns(int64_t tile_pairs) {
  return (2 * tile_pairs + 15) / 16 * 16;
}
KVASIR_HOST_DEVICE inline int64_t KeyBiasColumns(int64_t tile_pairs,
                                                 int64_t exact_pairs) {
  return KeyBiasTileColumns(tile_pairs) + 2 * exact_pairs;
}

// A pair of a KV head's numbers and its bias. The bias includes RoPE's
// attention factor and is in units of KeyBiasParamsIn::unit.
struct alignas(8) KeyBiasPair {
  int32_t first = 0;  // indices of the two numbers in a head
  int32_t second = 0;
  float bias_first = 0.0f;
  float bias_second = 0.0f;
  uint64_t step = 0;  // the angle per position, as RopeStep returns it
};

// For each token, at position n in the tile with centre a:
//   for each KV head and tile pair (k0, k1) of its key, let c and s be the
//   cosine and sine of step * n minus those of step * a:
//     k0 = fma(unit, fma(b0, c, -(b1 s)), k0)
//     k1 = fma(unit, fma(b1, c, b0 s), k1)
//   for each query head and pair of its KV head:
//     u = fma(q0, b0, q1 b1), v = fma(q1, b0, -(q0 b1))
// On entry, keys and queries must be rotated. The projection of keys must have
// added the bias of all numbers except those in exact pairs and in tile pairs.
template <template <typename> class Ptr>
struct KeyBiasParamsIn {
  // [T, ...], rows row_stride apart. Keys, queries and the queries' numbers do
  // not overlap.
  Ptr<float> rows = nullptr;
  int64_t row_stride = 0;                     // in elements
  int64_t num_tokens = 0;                     // T
  Ptr<const int64_t> positions = nullptr;     // [T]
  int64_t num_heads = 0;                      // Hq
  int64_t num_kv_heads = 0;                   // Hkv, divides Hq
  Ptr<const int64_t> key_column = nullptr;    // [Hkv]
  Ptr<const int64_t> query_column = nullptr;  // [Hq]
  // [Hq]: the column at which KeyBiasColumns numbers of a query begin
  Ptr<const int64_t> out_column = nullptr;
  int64_t tile_pairs = 0;   // S
  int64_t exact_pairs = 0;  // E
  // [Hkv, S + E]: the tile pairs of each head, then its exact pairs
  Ptr<const KeyBiasPair> pairs = nullptr;
  // A power of two. If rows are float16, the caller must choose it so large
  // that u and v do not overflow.
  float unit = 1.0f;
  DType dtype = DType::kF32;  // type of activations

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(rows, positions, key_column, query_column, out_column, pairs);
  }
};
using KeyBiasParams = KeyBiasParamsIn<DevicePtr>;
using KeyBiasArgs = KeyBiasParamsIn<LaunchPtr>;

// The arguments that change with every step.
struct KeyBiasRows {
  DevicePtr<float> rows;
  DevicePtr<const int64_t> positions;
  int64_t num_tokens = 0;
};

class CpuStream;
void KeyBiasReference(const KeyBiasArgs& params, CpuStream& stream);
void KeyBiasSimd(const KeyBiasArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
