#include "compress/planner/layer_moments.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/calibrate/shrunk_information.h"
#include "compress/methods/rope_factors.h"
#include "compress/methods/rope_pairs.h"
#include "compress/oracle/key_bias.h"

namespace kvasir::compress {
namespace {

absl::Status CheckInformation(const at::Tensor& information, int64_t width,
                              const char* side) {
  if (!information.defined()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the calibration has no Fisher information of ", side));
  }
  if (information.sizes() != at::IntArrayRef({width, width})) {
    return absl::InvalidArgumentError(
        absl::StrCat("the Fisher information of ", side,
                     " must have the shape [", width, ", ", width, "], has [",
                     absl::StrJoin(information.sizes(), ", "), "]"));
  }
  if (!at::isfinite(information).all().item<bool>() ||
      information.diagonal().sum().item<double>() <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the Fisher information of ", side, " is not finite or is all zero"));
  }
  return absl::OkStatus();
}

at::Tensor Block(const at::Tensor& matrix,
                 const std::vector<int64_t>& columns) {
  const at::Tensor index = at::tensor(columns, at::kLong);
  return matrix.index_select(0, index).index_select(1, index);
}

// Rotation by RoPE shrinks the mean of keys, because it turns them differently
// at each position. Returns for each RoPE pair which share of the mean's energy
// remains. This is the squared magnitude of the average of e^(i angle n) over
// the positions n that ranges must cover.
std::vector<double> SteadyShares(const model::DecoderSpec& spec) {
  const int64_t positions =
      std::min<int64_t>(kRangePositions, spec.max_position_embeddings);
  const auto doubles = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor angles =
      at::outer(at::arange(positions, doubles),
                at::tensor(spec.rope.frequencies, doubles));
  const at::Tensor shares =
      (angles.cos().mean(0).square() + angles.sin().mean(0).square())
          .contiguous();
  return {shares.data_ptr<double>(),
          shares.data_ptr<double>() + shares.numel()};
}

}  // namespace

at::Tensor MeanInLevels(const model::DecoderSpec& spec,
                        const AttentionWeights& weights,
                        const at::Tensor& mean) {
  if (!weights.key_bias.defined() || spec.qk_norm != model::QkNorm::kNone) {
    return mean;
  }
  const at::Tensor left_out =
      BiasOutsideOfCodes(spec.rope, weights.key_bias.to(at::kDouble),
                         spec.num_kv_heads, /*num_positions=*/1)
          .flatten();
  return at::cat({mean.narrow(0, 0, left_out.numel()) - left_out,
                  mean.narrow(0, left_out.numel(), left_out.numel())});
}

absl::StatusOr<LayerMoments> MomentsOfLayer(const model::DecoderSpec& spec,
                                            const AttentionWeights& weights,
                                            const LayerCalibration& calibration,
                                            int64_t num_tokens) {
  const int64_t width = spec.num_kv_heads * spec.head_dim;
  KVASIR_RETURN_IF_ERROR(
      CheckInformation(calibration.key_information, width, "keys"));
  KVASIR_RETURN_IF_ERROR(
      CheckInformation(calibration.value_information, width, "values"));
  at::Tensor bias;
  if (weights.key_bias.defined()) {
    bias = at::cat({weights.key_bias, weights.value_bias});
  }
  const ProjectedMoments sums = MomentsOfProjection(
      at::cat({weights.key, weights.value}), bias, calibration, num_tokens);
  const auto tokens = static_cast<double>(num_tokens);
  LayerMoments moments;
  moments.mean = sums.sum / tokens;
  moments.coded_mean = MeanInLevels(spec, weights, moments.mean);
  moments.covariance =
      sums.gram / tokens - at::outer(moments.mean, moments.mean);
  moments.information = at::zeros({2 * width, 2 * width}, at::kDouble);
  moments.information.narrow(0, 0, width)
      .narrow(1, 0, width)
      .copy_(Shrunk(calibration.key_information));
  moments.information.narrow(0, width, width)
      .narrow(1, width, width)
      .copy_(Shrunk(calibration.value_information));
  return moments;
}

std::vector<int64_t> ColumnsOfHeads(const model::DecoderSpec& spec,
                                    const std::vector<int64_t>& heads,
                                    bool keys, bool values) {
  std::vector<int64_t> columns;
  for (const int64_t side : {0, 1}) {
    if (!(side == 0 ? keys : values)) continue;
    for (const int64_t head : heads) {
      const int64_t begin = (side * spec.num_kv_heads + head) * spec.head_dim;
      for (int64_t d = 0; d < spec.head_dim; ++d) columns.push_back(begin + d);
    }
  }
  return columns;
}

FisherBasis LowRankBasis(const LayerMoments& moments,
                         const std::vector<int64_t>& columns, int64_t rank) {
  return FindFisherBasis(Block(moments.covariance, columns),
                         Block(moments.information, columns), rank);
}

RopeBasis RopeLowRankBasis(const LayerMoments& moments,
                           const model::DecoderSpec& spec,
                           const std::vector<int64_t>& heads) {
  const std::vector<double> steady = SteadyShares(spec);
  const int64_t dim = spec.head_dim;
  const auto width = static_cast<int64_t>(heads.size()) * dim;
  // The share of a mean that rotation averages away acts like variance, so it
  // is added to the second moment.
  std::vector<double> turning(static_cast<size_t>(width), 0.0);
  std::vector<PairOfGroup> pairs(steady.size());
  for (size_t p = 0; p < steady.size(); ++p) {
    const PairDims dims = DimsOfPair(spec.rope, static_cast<int64_t>(p));
    for (size_t j = 0; j < heads.size(); ++j) {
      const auto begin = static_cast<int64_t>(j) * dim;
      pairs[p].first.push_back(begin + dims.first);
      pairs[p].second.push_back(begin + dims.second);
      for (const int64_t d : {dims.first, dims.second}) {
        turning[static_cast<size_t>(begin + d)] =
            std::sqrt(std::max(0.0, 1.0 - steady[p]));
      }
    }
  }
  const std::vector<int64_t> columns =
      ColumnsOfHeads(spec, heads, /*keys=*/true, /*values=*/false);
  const at::Tensor spread =
      moments.mean.index_select(0, at::tensor(columns, at::kLong)) *
      at::tensor(turning, at::kDouble);
  RopeBasis found;
  found.basis = FindCommutingBasis(
      Block(moments.covariance, columns) + at::outer(spread, spread),
      Block(moments.information, columns), pairs);
  found.encode = RealEncoder(found.basis, pairs, width);
  found.decode = RealDecoder(found.basis, pairs, width);
  return found;
}

at::Tensor TurnedChannels(const at::Tensor& channels,
                          const model::RopeSpec& rope,
                          const std::vector<int64_t>& pairs,
                          const at::Tensor& positions) {
  const auto half = static_cast<int64_t>(pairs.size());
  const at::Tensor angles =
      at::outer(positions.to(at::kDouble),
                at::tensor(rope.frequencies, at::kDouble)
                    .index_select(0, at::tensor(pairs, at::kLong)));
  const at::Tensor cos = angles.cos().to(channels.scalar_type());
  const at::Tensor sin = angles.sin().to(channels.scalar_type());
  const at::Tensor real = channels.narrow(1, 0, half);
  const at::Tensor imaginary = channels.narrow(1, half, half);
  return at::cat({real * cos - imaginary * sin, real * sin + imaginary * cos},
                 1);
}

}  // namespace kvasir::compress
