#include "compress/methods/rope_factors.h"

#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/methods/rope_pairs.h"

namespace kvasir::compress {
namespace {

// The indices of a RoPE pair's two rows in a [Hkv * D, ...] tensor, for each of
// the s heads in a group.
struct PairRows {
  at::Tensor first;   // [s]
  at::Tensor second;  // [s]
};

PairRows RowsOfPair(const model::DecoderSpec& spec,
                    const std::vector<int64_t>& heads, int64_t pair) {
  const PairDims dims = DimsOfPair(spec.rope, pair);
  const at::Tensor starts = at::tensor(heads, at::kLong) * spec.head_dim;
  return {starts + dims.first, starts + dims.second};
}

// Returns the rows of a pair as complex numbers.
at::Tensor ComplexRows(const at::Tensor& matrix, const PairRows& rows) {
  return at::complex(matrix.index_select(0, rows.first).to(at::kDouble),
                     matrix.index_select(0, rows.second).to(at::kDouble));
}

at::Tensor WeightsOfGroup(const PairStatistics& statistics,
                          const std::vector<int64_t>& heads, int64_t pair) {
  return statistics.weights.select(1, pair).index_select(
      0, at::tensor(heads, at::kLong));
}

absl::Status CheckQueryEnergy(const model::DecoderSpec& spec,
                              const at::Tensor& energy) {
  const int64_t heads = spec.num_heads;
  if (!energy.defined() ||
      energy.sizes() != at::IntArrayRef({heads, spec.head_dim})) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the calibration's query_energy must have the shape [", heads, ", ",
        spec.head_dim, "], has ",
        energy.defined()
            ? absl::StrCat("[", absl::StrJoin(energy.sizes(), ", "), "]")
            : "none"));
  }
  if (at::isfinite(energy).all().item<bool>() &&
      energy.min().item<double>() >= 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "the calibration's query_energy holds a number that is negative or not "
      "finite");
}

// Returns the columns multiplied by phases that make the largest entry of each
// column real and positive.
at::Tensor FixPhases(const at::Tensor& columns) {
  const at::Tensor sizes = columns.abs();
  const at::Tensor index = sizes.argmax(0, /*keepdim=*/true);
  return columns * (columns.gather(0, index).conj() / sizes.gather(0, index));
}

}  // namespace

ProjectedMoments MomentsOfProjection(const at::Tensor& weight,
                                     const at::Tensor& bias,
                                     const LayerCalibration& calibration,
                                     int64_t num_tokens) {
  const at::Tensor matrix = weight.to(at::kDouble);
  const at::Tensor linear_sum = matrix.mv(calibration.input_sum);
  ProjectedMoments moments;
  moments.gram = matrix.mm(calibration.input_gram).mm(matrix.t());
  moments.sum = linear_sum;
  if (!bias.defined()) return moments;
  const at::Tensor shift = bias.to(at::kDouble);
  const auto tokens = static_cast<double>(num_tokens);
  moments.gram = moments.gram + at::outer(linear_sum, shift) +
                 at::outer(shift, linear_sum) +
                 tokens * at::outer(shift, shift);
  moments.sum = linear_sum + tokens * shift;
  return moments;
}

at::Tensor QueryWeights(const model::DecoderSpec& spec,
                        const at::Tensor& query_energy, double floor) {
  const int64_t pairs = spec.rope.rotary_dim / 2;
  const at::Tensor per_kv_head =
      query_energy.to(at::kDouble)
          .view({spec.num_kv_heads, spec.num_heads / spec.num_kv_heads,
                 spec.head_dim})
          .sum(1);
  std::vector<int64_t> first;
  std::vector<int64_t> second;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    first.push_back(DimsOfPair(spec.rope, pair).first);
    second.push_back(DimsOfPair(spec.rope, pair).second);
  }
  const at::Tensor energy =
      per_kv_head.index_select(1, at::tensor(first, at::kLong)) +
      per_kv_head.index_select(1, at::tensor(second, at::kLong));
  const double mean = energy.mean().item<double>();
  if (mean == 0.0) return at::ones_like(energy);
  return energy.clamp_min(floor * mean).sqrt();
}

absl::Status CheckCommutingWeights(const CommutingWeights& weights) {
  const double floor = weights.query_floor;
  if (!weights.query_weights || (std::isfinite(floor) && floor > 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the query floor (--query-floor) must be finite and above 0, is ",
      floor));
}

absl::StatusOr<PairStatistics> MakePairStatistics(
    const PairStatisticsRequest& request) {
  const model::DecoderSpec& spec = *request.spec;
  const bool whitened = request.decomposition != Decomposition::kSvd;
  if (request.calibration == nullptr &&
      (whitened || request.weights.query_weights)) {
    return absl::FailedPreconditionError(absl::StrCat(
        whitened ? "whitened factors of RoPE pairs need"
                 : "weighting heads by the energy of their queries needs",
        " a calibration, but none was given"));
  }
  KVASIR_RETURN_IF_ERROR(CheckCommutingWeights(request.weights));
  if (request.weights.query_weights) {
    KVASIR_RETURN_IF_ERROR(
        CheckQueryEnergy(spec, request.calibration->query_energy));
  }
  PairStatistics statistics;
  statistics.weights =
      request.weights.query_weights
          ? QueryWeights(spec, request.calibration->query_energy,
                         request.weights.query_floor)
          : at::ones({spec.num_kv_heads, spec.rope.rotary_dim / 2},
                     at::kDouble);
  if (whitened) {
    statistics.key_gram =
        MomentsOfProjection(request.key, request.key_bias, *request.calibration,
                            request.num_tokens)
            .gram;
    return statistics;
  }
  at::Tensor matrix = request.key.to(at::kDouble);
  if (request.key_bias.defined()) {
    matrix =
        at::cat({matrix, request.key_bias.to(at::kDouble).unsqueeze(1)}, 1);
  }
  statistics.key_gram = matrix.mm(matrix.t());
  return statistics;
}

PairSpectrum SpectrumOfPair(const model::DecoderSpec& spec,
                            const PairStatistics& statistics,
                            const std::vector<int64_t>& heads, int64_t pair) {
  const PairRows rows = RowsOfPair(spec, heads, pair);
  const at::Tensor from_first = statistics.key_gram.index_select(0, rows.first);
  const at::Tensor from_second =
      statistics.key_gram.index_select(0, rows.second);
  // Computes the sum of z zH, with z = a + i b, from the sums of key_gram.
  const at::Tensor real = from_first.index_select(1, rows.first) +
                          from_second.index_select(1, rows.second);
  const at::Tensor imaginary = from_second.index_select(1, rows.first) -
                               from_first.index_select(1, rows.second);
  const at::Tensor weights = WeightsOfGroup(statistics, heads, pair);
  const at::Tensor covariance =
      at::complex(real, imaginary) * at::outer(weights, weights);
  const auto [values, vectors] = at::linalg_eigh(covariance);
  return {values.flip(0).clamp_min(0.0), FixPhases(vectors.flip(1))};
}

CommutingFactors FactorsOfGroup(const model::DecoderSpec& spec,
                                const AttentionWeights& weights,
                                const PairStatistics& statistics,
                                const CommutingGroup& group) {
  std::vector<at::Tensor> down;
  std::vector<at::Tensor> down_bias;
  std::vector<at::Tensor> up;
  // Number of channels that each pair has taken so far.
  std::map<int64_t, int64_t> taken;
  for (size_t i = 0; i < group.pairs.size(); ++i) {
    const int64_t pair = group.pairs[i];
    const at::Tensor vectors =
        SpectrumOfPair(spec, statistics, group.heads, pair)
            .vectors.narrow(1, taken[pair], group.rank_per_pair[i]);
    taken[pair] += group.rank_per_pair[i];
    const at::Tensor scale =
        WeightsOfGroup(statistics, group.heads, pair).unsqueeze(1);
    const at::Tensor project = (vectors * scale).t().conj();  // [r, s]
    const PairRows rows = RowsOfPair(spec, group.heads, pair);
    down.push_back(project.mm(ComplexRows(weights.key, rows)));
    up.push_back(vectors / scale);
    if (weights.key_bias.defined()) {
      down_bias.push_back(project.mv(ComplexRows(weights.key_bias, rows)));
    }
  }
  CommutingFactors factors;
  factors.down = at::cat(down, 0);
  factors.up = at::cat(up, 1);
  if (!down_bias.empty()) factors.down_bias = at::cat(down_bias, 0);
  return factors;
}

}  // namespace kvasir::compress
