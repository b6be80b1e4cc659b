// Low-rank factors that commute with RoPE. A RoPE pair of a key is a complex
// number, which RoPE multiplies by another complex number. So every
// complex-linear map across the heads of a group, at the same pair, commutes
// with RoPE. Let Z [s, M] be the group's projection rows at a pair as complex
// numbers, w the weights of its heads, and L LT the Gram matrix of the inputs.
// The factors are those of diag(w) Z L = U S VH, where H marks a conjugate
// transpose. Left singular vectors suffice: the latent S VH L^-1 x is
// UH diag(w) Z x. U comes from the eigenvectors of the pair's key covariance
// [s, s]. No matrix is inverted, so a singular Gram matrix does no harm.
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

// Sums of y = W x + b and of y yT over the calibration tokens, float64.
struct ProjectedMoments {
  at::Tensor gram;  // [n, n], sum of y yT
  at::Tensor sum;   // [n], sum of y
};
// Computes the sums of y = weight x + bias. `bias` may be undefined. Throws
// c10::Error.
ProjectedMoments MomentsOfProjection(const at::Tensor& weight,
                                     const at::Tensor& bias,
                                     const LayerCalibration& calibration,
                                     int64_t num_tokens);

// Weights of each KV head and pair, [Hkv, pairs]: the square root of the energy
// that the queries of this KV head have at the pair. Energies smaller than
// `floor` times the layer's mean are raised to this bound. If all energies of
// the layer are 0, all weights are 1. Energies must be finite
// (MakePairStatistics checks this).
at::Tensor QueryWeights(const model::DecoderSpec& spec,
                        const at::Tensor& query_energy, double floor);

// Returns INVALID_ARGUMENT if query_floor is not finite or not above 0. The
// lift divides by the weights, so no weight may be 0.
absl::Status CheckCommutingWeights(const CommutingWeights& weights);

// The data from which the factors of a layer's keys are found.
struct PairStatistics {
  at::Tensor key_gram;  // [Hkv * D, Hkv * D]: Gram matrix of unrotated keys
  at::Tensor weights;   // [Hkv, pairs]
};
struct PairStatisticsRequest {
  const model::DecoderSpec* spec = nullptr;
  at::Tensor key;       // [Hkv * D, M]
  at::Tensor key_bias;  // undefined if there is no key bias
  const LayerCalibration* calibration = nullptr;  // may be null
  int64_t num_tokens = 0;
  // kSvd uses only the weights, as if inputs had unit energy; with any other
  // value the factors are whitened by the calibration inputs.
  Decomposition decomposition = Decomposition::kWhitened;
  CommutingWeights weights;
};
// Computes the Gram matrix of a layer's keys and the weights of its heads.
// Errors: FAILED_PRECONDITION if a calibration is needed and missing;
// INVALID_ARGUMENT for query energies or weights that are not finite. Throws
// c10::Error.
absl::StatusOr<PairStatistics> MakePairStatistics(
    const PairStatisticsRequest& request);

// The spectrum of one group at one pair: the squared singular values and the
// left singular vectors of diag(w) Z L (see the top of this file).
struct PairSpectrum {
  at::Tensor energies;  // [s], squared singular values, falling
  // [s, s] complex, one vector in each column. Each vector is multiplied by a
  // phase that makes its largest entry real and positive. Otherwise a
  // checkpoint would depend on the linear algebra library in use.
  at::Tensor vectors;
};
PairSpectrum SpectrumOfPair(const model::DecoderSpec& spec,
                            const PairStatistics& statistics,
                            const std::vector<int64_t>& heads, int64_t pair);

// The complex channels of one group, C in all. Entry i is the next
// rank_per_pair[i] vectors of the spectrum at pairs[i]. A pair may recur.
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
