// Moments and Fisher information of a layer's values and of its keys before
// their rotation, and the transforms that follow from them. The planner and the
// appliers of its plans both call these functions, so they get the same
// transforms.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/calibrate/calibration.h"
#include "compress/planner/fisher_basis.h"
#include "compress/tensors/attention_weights.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Ranges of codes for rotated keys are fitted at positions below this one.
inline constexpr int64_t kRangePositions = 8192;

// Moments of a layer's rows, float64. A row holds a token's key before its
// rotation, followed by its value; each has n = Hkv * D numbers.
struct LayerMoments {
  at::Tensor mean;        // [2n]
  at::Tensor coded_mean;  // [2n], see MeanInLevels
  at::Tensor covariance;  // [2n, 2n]
  // [2n, 2n], with shrinkage; zero between keys and values
  at::Tensor information;
};

// Returns `mean` minus the key bias that the cache leaves out of the codes of
// whole heads (SpaceKind::kRotatedKey). The bias that is left out depends
// slightly on the position; that of position 0 is subtracted.
at::Tensor MeanInLevels(const model::DecoderSpec& spec,
                        const AttentionWeights& weights,
                        const at::Tensor& mean);

// Computes the moments of one layer. FAILED_PRECONDITION for a calibration
// without information; INVALID_ARGUMENT for information that has another shape,
// is not finite or is all zero.
absl::StatusOr<LayerMoments> MomentsOfLayer(const model::DecoderSpec& spec,
                                            const AttentionWeights& weights,
                                            const LayerCalibration& calibration,
                                            int64_t num_tokens);

// Returns which columns of a row belong to these heads: those of their keys if
// `keys` is true, followed by those of their values if `values` is true.
std::vector<int64_t> ColumnsOfHeads(const model::DecoderSpec& spec,
                                    const std::vector<int64_t>& heads,
                                    bool keys, bool values);

// Finds the basis of a low_rank latent over these columns. Throws c10::Error.
FisherBasis LowRankBasis(const LayerMoments& moments,
                         const std::vector<int64_t>& columns, int64_t rank);

// The basis of a rope_low_rank latent with C complex channels. RoPE pairs are
// numbered as in the model. Throws c10::Error.
struct RopeBasis {
  CommutingBasis basis;
  at::Tensor encode;  // [2C, heads * D]
  at::Tensor decode;  // [heads * D, 2C]
};
RopeBasis RopeLowRankBasis(const LayerMoments& moments,
                           const model::DecoderSpec& spec,
                           const std::vector<int64_t>& heads);

// Applies the RoPE rotation of these pairs at `positions` [N] to complex
// channels [N, 2C], whose real parts come first. Leaves out YaRN's factor.
at::Tensor TurnedChannels(const at::Tensor& channels,
                          const model::RopeSpec& rope,
                          const std::vector<int64_t>& pairs,
                          const at::Tensor& positions);

}  // namespace kvasir::compress
