#include <cmath>
#include <cstring>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/latents/key_bias.h"
#include "kernels/simd/scalar_math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/latents/key_bias_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// The pairs of a head may be anywhere in it, so this code uses no SIMD vectors.
// It is compiled for each instruction set only for its fused multiply-add.

void AddToKey(const KeyBiasPair* pairs, int64_t num_pairs, float unit,
              int64_t position, float* key) {
  const auto here = static_cast<uint64_t>(position);
  const auto centre = static_cast<uint64_t>(KeyBiasCentre(position));
  for (int64_t i = 0; i < num_pairs; ++i) {
    const KeyBiasPair& pair = pairs[i];
    const UnitVector at = UnitVectorAt(pair.step * here);
    const UnitVector of_tile = UnitVectorAt(pair.step * centre);
    const float c = at.cosine - of_tile.cosine;
    const float s = at.sine - of_tile.sine;
    key[pair.first] =
        std::fma(unit, std::fma(pair.bias_first, c, -(pair.bias_second * s)),
                 key[pair.first]);
    key[pair.second] =
        std::fma(unit, std::fma(pair.bias_second, c, pair.bias_first * s),
                 key[pair.second]);
  }
}

HWY_INLINE float CosineTerm(const KeyBiasPair& pair, const float* q) {
  return std::fma(q[pair.first], pair.bias_first,
                  q[pair.second] * pair.bias_second);
}
HWY_INLINE float SineTerm(const KeyBiasPair& pair, const float* q) {
  return std::fma(q[pair.second], pair.bias_first,
                  -(q[pair.first] * pair.bias_second));
}

void MakeNumbers(const KeyBiasArgs& params, const KeyBiasPair* pairs,
                 const float* q, float* out) {
  const int64_t tile_pairs = params.tile_pairs;
  for (int64_t i = 0; i < tile_pairs; ++i) {
    out[i] = CosineTerm(pairs[i], q);
    out[tile_pairs + i] = SineTerm(pairs[i], q);
  }
  const int64_t tile_columns = KeyBiasTileColumns(tile_pairs);
  for (int64_t i = 2 * tile_pairs; i < tile_columns; ++i) out[i] = 0.0f;
  for (int64_t i = 0; i < params.exact_pairs; ++i) {
    out[tile_columns + 2 * i] = CosineTerm(pairs[tile_pairs + i], q);
    out[tile_columns + 2 * i + 1] = SineTerm(pairs[tile_pairs + i], q);
  }
}

void RunRows(const KeyBiasArgs& params, int64_t begin, int64_t end) {
  const int64_t pairs = params.tile_pairs + params.exact_pairs;
  const int64_t heads_per_kv = params.num_heads / params.num_kv_heads;
  for (int64_t t = begin; t < end; ++t) {
    float* const row = params.rows + t * params.row_stride;
    for (int64_t j = 0; j < params.num_kv_heads; ++j) {
      const KeyBiasPair* const of_head = params.pairs + j * pairs;
      for (int64_t h = j * heads_per_kv; h < (j + 1) * heads_per_kv; ++h) {
        MakeNumbers(params, of_head, row + params.query_column[h],
                    row + params.out_column[h]);
      }
      AddToKey(of_head, params.tile_pairs, params.unit, params.positions[t],
               row + params.key_column[j]);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(RunRows);
}  // namespace

void KeyBiasSimd(const KeyBiasArgs& params, CpuStream& stream) {
  // The cost of a row, counted in numbers of a query. Each tile pair of a key
  // needs two angles, and an angle costs about as much as ten numbers of
  // a query.
  const int64_t numbers =
      params.num_heads * KeyBiasColumns(params.tile_pairs, params.exact_pairs) +
      20 * params.num_kv_heads * params.tile_pairs;
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            HWY_DYNAMIC_DISPATCH(RunRows)(params, begin, end);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
