// What a planned layer is made by: moments and Fisher information of its keys
// before their rotation and its values, and the transforms that follow from
// them. The planner and those who apply its plans find the same ones.
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

// Positions over which codes of rotated keys are to hold, at most: keys of slow
// pairs stay near their mean on the way, those of fast pairs go round it.
inline constexpr int64_t kRangePositions = 8192;

// n = Hkv * D; a row is a key before its rotation, then a value. float64.
struct LayerMoments {
  at::Tensor mean;         // [2n]
  at::Tensor covariance;   // [2n, 2n]
  at::Tensor information;  // [2n, 2n], shrunk; nothing between key and value
};

// FAILED_PRECONDITION for a calibration without information; INVALID_ARGUMENT
// for information of another shape, not finite or all zero.
absl::StatusOr<LayerMoments> MomentsOfLayer(const model::DecoderSpec& spec,
                                            const AttentionWeights& weights,
                                            const LayerCalibration& calibration,
                                            int64_t num_tokens);

// Numbers of a row that a latent of these heads stands for; keys first.
std::vector<int64_t> ColumnsOfHeads(const model::DecoderSpec& spec,
                                    const std::vector<int64_t>& heads,
                                    bool keys, bool values);

// Of a low_rank latent over such columns. Throws c10::Error.
FisherBasis LowRankBasis(const LayerMoments& moments,
                         const std::vector<int64_t>& columns, int64_t rank);

// Of a rope_low_rank latent; its pairs are the model's, columns those of the
// heads' keys. Throws c10::Error.
struct RopeBasis {
  CommutingBasis basis;
  at::Tensor encode;  // RealEncoder, [2C, heads * D]
  at::Tensor decode;  // RealDecoder, [heads * D, 2C]
};
RopeBasis RopeLowRankBasis(const LayerMoments& moments,
                           const model::DecoderSpec& spec,
                           const std::vector<int64_t>& heads);

// Complex channels [N, 2C] (real parts, then imaginary ones) turned as keys of
// such pairs are at `positions` [N], without the factor of YaRN.
at::Tensor TurnedChannels(const at::Tensor& channels,
                          const model::RopeSpec& rope,
                          const std::vector<int64_t>& pairs,
                          const at::Tensor& positions);

}  // namespace kvasir::compress
