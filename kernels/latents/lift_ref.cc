#include <cmath>

#include "kernels/device/stream.h"
#include "kernels/latents/lift.h"

namespace kvasir::kernels {
namespace {

float WeightAt(const PackedMatrixArgs& matrix, int64_t k, int64_t n) {
  const int64_t index =
      (n / kPanelColumns * matrix.k + k) * kPanelColumns + n % kPanelColumns;
  return VisitDType(matrix.dtype, [&](auto type) {
    return ToFloat(static_cast<const decltype(type)*>(matrix.data)[index]);
  });
}

struct Pair {
  float a;
  float b;
};

Pair LiftedPair(const ComplexChannelsArgs& channels, int64_t c, Pair pair) {
  if (channels.up == nullptr) return pair;
  const float real = channels.up[c];
  const float imaginary = channels.up[channels.num_channels + c];
  return {std::fma(pair.a, real, pair.b * imaginary),
          std::fma(pair.b, real, -(pair.a * imaginary))};
}

void LiftHead(const ComplexLiftArgs& params,
              const ComplexChannelsArgs& channels, const float* from,
              float* to) {
  const int64_t count = channels.num_channels;
  const bool halves_in = params.pairing == RopePairing::kHalfSplit;
  const bool halves_out = params.out_pairing == RopePairing::kHalfSplit;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t f = channels.pairs[c];
    const Pair pair = halves_in ? Pair{from[f], from[params.num_pairs + f]}
                                : Pair{from[2 * f], from[2 * f + 1]};
    const Pair lifted = LiftedPair(channels, c, pair);
    to[halves_out ? c : 2 * c] = lifted.a;
    to[halves_out ? count + c : 2 * c + 1] = lifted.b;
  }
}

}  // namespace

void LiftReference(const LiftArgs& params, float* /*scratch*/, CpuStream&) {
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t i = 0; i < params.num_rows; ++i) {
    const int64_t t = params.first_row + i;
    for (int64_t h = 0; h < params.num_heads; ++h) {
      const PackedMatrixArgs& matrix = params.matrices[h / queries];
      const float* from =
          params.x + t * params.x_row_stride + params.column_in[h];
      float* to = params.y + t * params.y_row_stride + params.column_out[h];
      for (int64_t n = 0; n < matrix.n; ++n) {
        float acc = 0.0f;
        for (int64_t k = 0; k < matrix.k; ++k) {
          acc = std::fma(from[k], WeightAt(matrix, k, n), acc);
        }
        to[n] = acc;
      }
    }
  }
}

void ComplexLiftReference(const ComplexLiftArgs& params, CpuStream&) {
  const int64_t queries = params.num_heads / params.num_kv_heads;
  for (int64_t i = 0; i < params.num_rows; ++i) {
    const int64_t t = params.first_row + i;
    for (int64_t h = 0; h < params.num_heads; ++h) {
      LiftHead(params, params.channels[h / queries],
               params.x + t * params.x_row_stride + params.column_in[h],
               params.y + t * params.y_row_stride + params.column_out[h]);
    }
  }
}

}  // namespace kvasir::kernels
