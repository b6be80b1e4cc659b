// Moments and Fisher information of a layer's values and of its keys before
// their rotation, and the transforms that follow from them. The planner and the
// appliers of its plans compute the same ones.
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

// Codes of rotated keys are fitted to positions up to this one. Keys of slow
// pairs stay near their mean over this distance; keys of fast pairs rotate many
// times.
inline constexpr int64_t kRangePositions = 8192;

// n = Hkv * D. A row is a key before its rotation, then a value. float64.
struct LayerMoments {
  at::Tensor mean;         // [2n]
  at::Tensor covariance;   // [2n, 2n]
  at::Tensor information;  // [2n, 2n], shrunk; zero between key and value
};

// FAILED_PRECONDITION for a calibration without information; INVALID_ARGUMENT
// for information that is of another shape, not finite or all zero.
absl::StatusOr<LayerMoments> MomentsOfLayer(const model::DecoderSpec& spec,
                                            const AttentionWeights& weights,
                                            const LayerCalibration& calibration,
                                            int64_t num_tokens);

// Columns of a row that a latent of these heads stands for; keys first.
std::vector<int64_t> ColumnsOfHeads(const model::DecoderSpec& spec,
                                    const std::vector<int64_t>& heads,
                                    bool keys, bool values);

// The basis of a low_rank latent over these columns. Throws c10::Error.
FisherBasis LowRankBasis(const LayerMoments& moments,
                         const std::vector<int64_t>& columns, int64_t rank);

// The basis of a rope_low_rank latent. Its pairs are the model's; its columns
// are those of the heads' keys. Throws c10::Error.
struct RopeBasis {
  CommutingBasis basis;
  at::Tensor encode;  // RealEncoder, [2C, heads * D]
  at::Tensor decode;  // RealDecoder, [heads * D, 2C]
};
RopeBasis RopeLowRankBasis(const LayerMoments& moments,
                           const model::DecoderSpec& spec,
                           const std::vector<int64_t>& heads);

// Complex channels [N, 2C] (real parts, then imaginary ones), rotated as keys
// of these pairs are at `positions` [N], without YaRN's factor.
at::Tensor TurnedChannels(const at::Tensor& channels,
                          const model::RopeSpec& rope,
                          const std::vector<int64_t>& pairs,
                          const at::Tensor& positions);

}  // namespace kvasir::compress
