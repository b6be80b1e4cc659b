#include <algorithm>
#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/latents/key_bias.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

void AddToKey(const KeyBiasPair& pair, float unit, int64_t position,
              float* key) {
  const UnitVector here =
      UnitVectorAt(pair.step * static_cast<uint64_t>(position));
  const UnitVector centre =
      UnitVectorAt(pair.step * static_cast<uint64_t>(KeyBiasCentre(position)));
  const float c = here.cosine - centre.cosine;
  const float s = here.sine - centre.sine;
  key[pair.first] =
      std::fma(unit, std::fma(pair.bias_first, c, -(pair.bias_second * s)),
               key[pair.first]);
  key[pair.second] =
      std::fma(unit, std::fma(pair.bias_second, c, pair.bias_first * s),
               key[pair.second]);
}

}  // namespace

void KeyBiasReference(const KeyBiasArgs& params, CpuStream&) {
  const int64_t pairs = params.tile_pairs + params.exact_pairs;
  const int64_t tile_columns = KeyBiasTileColumns(params.tile_pairs);
  const int64_t heads_per_kv = params.num_heads / params.num_kv_heads;
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    float* const row = params.rows + t * params.row_stride;
    for (int64_t h = 0; h < params.num_heads; ++h) {
      const KeyBiasPair* const of_head =
          params.pairs + h / heads_per_kv * pairs;
      const float* const q = row + params.query_column[h];
      float* const out = row + params.out_column[h];
      std::fill_n(out, tile_columns, 0.0f);
      for (int64_t i = 0; i < pairs; ++i) {
        const KeyBiasPair& pair = of_head[i];
        const float q0 = q[pair.first];
        const float q1 = q[pair.second];
        const bool tile = i < params.tile_pairs;
        const int64_t at =
            tile ? i : tile_columns + 2 * (i - params.tile_pairs);
        out[at] = std::fma(q0, pair.bias_first, q1 * pair.bias_second);
        out[at + (tile ? params.tile_pairs : 1)] =
            std::fma(q1, pair.bias_first, -(q0 * pair.bias_second));
      }
    }
    for (int64_t j = 0; j < params.num_kv_heads; ++j) {
      for (int64_t i = 0; i < params.tile_pairs; ++i) {
        AddToKey(params.pairs[j * pairs + i], params.unit, params.positions[t],
                 row + params.key_column[j]);
      }
    }
  }
}

}  // namespace kvasir::kernels
