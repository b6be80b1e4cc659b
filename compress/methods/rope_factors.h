// RoPE-commuting factors. A pair of a key is one complex number, and RoPE
// multiplies it by another. So every complex-linear map across the heads of a
// group at the same pair commutes with RoPE.
// With Z [s, M] the group's rows at a pair as complex numbers, w its heads'
// weights and the input Gram L LT, the factors are those of diag(w) Z L = U S
// VH. Left singular vectors suffice: the latent S VH L^-1 x is UH diag(w) Z x.
// U comes from the eigenvectors of the pair's key covariance [s, s]; nothing is
// inverted, so a singular Gram does no harm.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/calibrate/calibration.h"
#include "compress/methods/method.h"
#include "compress/tensors/attention_weights.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Sums over the calibration tokens of y = W x + b, float64.
struct ProjectedMoments {
  at::Tensor gram;  // [n, n], sum of y yT
  at::Tensor sum;   // [n], sum of y
};
// `bias` may be undefined. Throws c10::Error.
ProjectedMoments MomentsOfProjection(const at::Tensor& weight,
                                     const at::Tensor& bias,
                                     const LayerCalibration& calibration,
                                     int64_t num_tokens);

// Weights of queries at each KV head and pair, [Hkv, pairs]: the root of the
// energy that the head's query heads have there. Smaller energies than `floor`
// times the layer's mean are raised to that. A layer without any energy has
// weights of one. Energies must be finite (MakePairStatistics checks them).
at::Tensor QueryWeights(const model::DecoderSpec& spec,
                        const at::Tensor& query_energy, double floor);

// INVALID_ARGUMENT for weights whose floor is not finite and above 0, because
// the lift divides by them.
absl::Status CheckCommutingWeights(const CommutingWeights& weights);

// Input of the factors of a layer's keys.
struct PairStatistics {
  at::Tensor key_gram;  // [Hkv * D, Hkv * D] of keys before their rotation
  at::Tensor weights;   // [Hkv, pairs]
};
struct PairStatisticsRequest {
  const model::DecoderSpec* spec = nullptr;
  at::Tensor key;                                 // [Hkv * D, M]
  at::Tensor key_bias;                            // undefined: none
  const LayerCalibration* calibration = nullptr;  // may be null
  int64_t num_tokens = 0;
  // kSvd uses only the weights, as if inputs had unit energy; other values
  // whiten.
  Decomposition decomposition = Decomposition::kWhitened;
  CommutingWeights weights;
};
// FAILED_PRECONDITION if a calibration is needed and missing; INVALID_ARGUMENT
// for query energies or weights that are not finite. Throws c10::Error.
absl::StatusOr<PairStatistics> MakePairStatistics(
    const PairStatisticsRequest& request);

// The spectrum of one group at one pair: the falling squares of the singular
// values of diag(w) Z L.
struct PairSpectrum {
  at::Tensor energies;  // [s], squared singular values
  // [s, s] complex, one vector a column. The largest entry of each is real and
  // positive, so that a checkpoint does not depend on the library that found
  // it.
  at::Tensor vectors;
};
PairSpectrum SpectrumOfPair(const model::DecoderSpec& spec,
                            const PairStatistics& statistics,
                            const std::vector<int64_t>& heads, int64_t pair);

// The terms of one group, ordered by rising pairs and by terms inside a pair: C
// in all.
struct CommutingGroup {
  std::vector<int64_t> heads;
  std::vector<int64_t> pairs;
  std::vector<int64_t> rank_per_pair;
};
struct CommutingFactors {
  at::Tensor down;       // [C, M] complex
  at::Tensor down_bias;  // [C] complex; undefined without a key bias
  at::Tensor up;         // [s, C] complex
};
CommutingFactors FactorsOfGroup(const model::DecoderSpec& spec,
                                const AttentionWeights& weights,
                                const PairStatistics& statistics,
                                const CommutingGroup& group);

}  // namespace kvasir::compress
