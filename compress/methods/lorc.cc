#include "compress/methods/lorc.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/rank_allocation.h"

namespace kvasir::compress {

using kvasir::v1::KvPlan;

namespace {

absl::StatusOr<double> ConditionOf(const at::Tensor& weight, int64_t layer,
                                   absl::string_view side,
                                   FactorProfile* profile) {
  const absl::StatusOr<double> condition = ConditionNumber(weight, profile);
  if (condition.ok()) return condition;
  return absl::Status(condition.status().code(),
                      absl::StrCat("layer ", layer, " ", side, ": ",
                                   condition.status().message()));
}

absl::Status CheckOptions(const PlanRequest& request,
                          const LorcOptions& options) {
  const int64_t layers = request.spec.num_layers();
  const int choices = (options.threshold.has_value() ? 1 : 0) +
                      (options.skip_layers != 0 ? 1 : 0) +
                      (options.only_layers.empty() ? 0 : 1);
  if (choices > 1) {
    return absl::InvalidArgumentError(
        "LoRC: give only one of a threshold, a number of layers to skip and a "
        "list of layers to compress");
  }
  if (options.threshold.has_value() && !std::isfinite(*options.threshold)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LoRC: the threshold must be finite, is ", *options.threshold));
  }
  if (options.skip_layers < 0 || options.skip_layers >= layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("LoRC: the number of layers to skip must be 0..",
                     layers - 1, ", is ", options.skip_layers));
  }
  if (!std::isfinite(options.log_base) || options.log_base <= 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "LoRC: the base of the logarithm must be finite and above 1, is ",
        options.log_base));
  }
  const int64_t most = request.spec.num_kv_heads * request.spec.head_dim;
  if (options.min_rank.has_value() &&
      (*options.min_rank < 1 || *options.min_rank > most)) {
    return absl::InvalidArgumentError(
        absl::StrCat("LoRC: d_min, the least rank, must be 1..", most, ", is ",
                     *options.min_rank));
  }
  for (int64_t layer : options.only_layers) {
    if (layer >= 0 && layer < layers) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("LoRC: layers to compress must be 0..", layers - 1,
                     ", but layer ", layer, " is listed"));
  }
  return absl::OkStatus();
}

// Returns the layers in order of falling sensitivity; among equally sensitive
// layers the earlier one comes first.
std::vector<int64_t> BySensitivity(
    const std::vector<LayerSensitivity>& layers) {
  std::vector<int64_t> order(layers.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return layers[static_cast<size_t>(a)].cumulative_log >
           layers[static_cast<size_t>(b)].cumulative_log;
  });
  return order;
}

std::vector<bool> CompressedLayers(const std::vector<LayerSensitivity>& layers,
                                   const LorcOptions& options) {
  std::vector<bool> compressed(layers.size(), options.only_layers.empty());
  for (int64_t layer : options.only_layers) {
    compressed[static_cast<size_t>(layer)] = true;
  }
  if (options.threshold.has_value()) {
    for (size_t l = 0; l < layers.size(); ++l) {
      compressed[l] = layers[l].cumulative_log <= *options.threshold;
    }
  }
  const std::vector<int64_t> order = BySensitivity(layers);
  for (int64_t i = 0; i < options.skip_layers; ++i) {
    compressed[static_cast<size_t>(order[static_cast<size_t>(i)])] = false;
  }
  return compressed;
}

// Returns for each layer how far its rank lies between d_min (0) and d_max (1),
// by the formula of PlanLorc (lorc.h).
std::vector<double> ShareAboveLeast(
    const std::vector<LayerSensitivity>& layers) {
  double most = layers.front().cumulative_log;
  double least = most;
  for (const LayerSensitivity& layer : layers) {
    most = std::max(most, layer.cumulative_log);
    least = std::min(least, layer.cumulative_log);
  }
  std::vector<double> shares;
  for (const LayerSensitivity& layer : layers) {
    shares.push_back(
        most > least ? (layer.cumulative_log - least) / (most - least) : 0);
  }
  return shares;
}

// Finds the ranks of the compressed layers. Each of these layers is one unit of
// `pool`.
class RankSolver {
 public:
  // `shares` has the results of ShareAboveLeast for the compressed layers.
  RankSolver(RankPool pool, std::vector<double> shares)
      : pool_(std::move(pool)), shares_(std::move(shares)) {}

  std::vector<double> Ranks(double least_rank) const {
    std::vector<double> ranks;
    for (size_t i = 0; i < shares_.size(); ++i) {
      const RankUnit& unit = pool_.units[i];
      const auto most = static_cast<double>(unit.max_rank);
      const double rank = least_rank + shares_[i] * (most - least_rank);
      ranks.push_back(
          std::clamp(rank, static_cast<double>(LeastRank(pool_, unit)), most));
    }
    return ranks;
  }

  double Total(double least_rank) const {
    const std::vector<double> ranks = Ranks(least_rank);
    double total = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      total += ranks[i] * static_cast<double>(pool_.units[i].copies);
    }
    return total;
  }

  // Returns the greatest d_min (the rank of the least sensitive layer) with
  // which the ranks stay within the target.
  absl::StatusOr<double> LeastRankForTarget() const {
    const auto target = static_cast<double>(pool_.target);
    double low = 0;
    if (Total(low) > target) {
      return absl::InvalidArgumentError(absl::StrCat(
          "LoRC: even with a least rank of 0, the compressed layers "
          "keep ",
          Total(low), " numbers per token, but the budget has only ",
          pool_.target, " left for them: skip fewer layers or raise --keep"));
    }
    double high = static_cast<double>(pool_.units.front().max_rank);
    if (Total(high) <= target) return high;
    // Bisects until there is no number of type double between the bounds.
    for (double middle = high / 2; low < middle && middle < high;
         middle = low + (high - low) / 2) {
      (Total(middle) <= target ? low : high) = middle;
    }
    return low;
  }

  absl::StatusOr<std::vector<int64_t>> Round(double least_rank) const {
    return RoundRanks(pool_, Ranks(least_rank));
  }

 private:
  RankPool pool_;
  std::vector<double> shares_;
};

// Returns the rank that one head group gets in each compressed layer, in order.
absl::StatusOr<std::vector<int64_t>> CompressedRanks(
    const PlanRequest& request, const LorcOptions& options,
    const std::vector<LayerSensitivity>& layers,
    const std::vector<bool>& compressed) {
  const model::DecoderSpec& spec = request.spec;
  // Keys and values have the same size, so the section of values also serves
  // for keys.
  const Section section = ValueSection(spec);
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> groups,
                          HeadGroups(request, 0));
  const bool progressive = options.progressive && options.only_layers.empty();
  const std::vector<double> all_shares = ShareAboveLeast(layers);
  RankPool pool{.multiple = request.rank_multiple};
  std::vector<double> shares;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!compressed[l]) continue;
    shares.push_back(progressive ? all_shares[l] : 0);
    // Each group has a latent for keys and one for values, hence two copies.
    pool.units.push_back({.max_rank = MaxRank(spec, groups.front(), section),
                          .copies = 2 * static_cast<int64_t>(groups.size())});
  }
  if (shares.empty()) {  // can happen only with a threshold
    return absl::InvalidArgumentError(
        absl::StrCat("LoRC: the sensitivity of every layer is above the "
                     "threshold, ",
                     options.threshold.value_or(0),
                     ", so no layer would be compressed; the least is ",
                     layers.back().cumulative_log));
  }
  if (options.min_rank.has_value()) {
    const double min_rank = static_cast<double>(*options.min_rank) /
                            static_cast<double>(groups.size());
    pool.target = static_cast<int64_t>(
        std::llround(RankSolver(pool, shares).Total(min_rank)));
    return RankSolver(pool, shares).Round(min_rank);
  }
  const int64_t layer_numbers = DenseNumbers(spec) / spec.num_layers();
  const auto num_compressed = static_cast<int64_t>(shares.size());
  const int64_t counted =
      options.only_layers.empty() ? spec.num_layers() : num_compressed;
  pool.target = KeptNumbers(request.keep, counted * layer_numbers) -
                (counted - num_compressed) * layer_numbers;
  const RankSolver solver(std::move(pool), std::move(shares));
  KVASIR_ASSIGN_OR_RETURN(const double min_rank, solver.LeastRankForTarget());
  return solver.Round(min_rank);
}

std::string OptionsText(const PlanRequest& request,
                        const LorcOptions& options) {
  std::string text = absl::StrCat(
      options.min_rank.has_value()
          ? absl::StrCat("--min-rank ", *options.min_rank)
          : absl::StrCat("--keep ", NumberText(request.keep)),
      " --tp ", request.tp, " --rank-multiple ", request.rank_multiple,
      options.progressive ? "" : " --uniform");
  if (options.threshold.has_value()) {
    absl::StrAppend(&text, " --threshold ", NumberText(*options.threshold),
                    " --log-base ", NumberText(options.log_base));
  }
  if (options.skip_layers > 0) {
    absl::StrAppend(&text, " --skip-layers ", options.skip_layers);
  }
  if (!options.only_layers.empty()) {
    absl::StrAppend(&text, " --only-layers ",
                    absl::StrJoin(options.only_layers, ","));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::vector<LayerSensitivity>> MeasureSensitivity(
    const PlanRequest& request, double log_base, FactorProfile* profile) {
  if (request.weights == nullptr) {
    return absl::FailedPreconditionError(
        "condition numbers cannot be computed without the model's weights");
  }
  std::vector<LayerSensitivity> layers;
  for (int64_t l = 0; l < request.spec.num_layers(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(const AttentionWeights weights, request.weights(l));
    LayerSensitivity layer;
    KVASIR_ASSIGN_OR_RETURN(layer.key_condition,
                            ConditionOf(weights.key, l, "key", profile));
    KVASIR_ASSIGN_OR_RETURN(layer.value_condition,
                            ConditionOf(weights.value, l, "value", profile));
    layers.push_back(layer);
  }
  double sum = 0;
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    sum += std::log(layer->key_condition) + std::log(layer->value_condition);
    layer->cumulative_log = sum / std::log(log_base);
  }
  return layers;
}

absl::StatusOr<KvPlan> PlanLorc(const PlanRequest& request,
                                const LorcOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  KVASIR_RETURN_IF_ERROR(CheckOptions(request, options));
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<LayerSensitivity> layers,
      MeasureSensitivity(request, options.log_base, options.profile));
  const std::vector<bool> compressed = CompressedLayers(layers, options);
  const absl::StatusOr<std::vector<int64_t>> ranks =
      CompressedRanks(request, options, layers, compressed);
  if (!ranks.ok()) {
    return absl::Status(ranks.status().code(),
                        absl::StrCat("LoRC, keep ", request.keep, ": ",
                                     ranks.status().message()));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> groups,
                          HeadGroups(request, 0));
  const model::DecoderSpec& spec = request.spec;
  KvPlan plan;
  auto rank = ranks->begin();
  for (int64_t l = 0; l < spec.num_layers(); ++l) {
    auto* layer = plan.add_layers();
    if (!compressed[static_cast<size_t>(l)]) {
      *layer->mutable_key()->add_parts() =
          FullPart(spec, l, plan::Side::kKey, request.key_codec);
      *layer->mutable_value()->add_parts() =
          FullPart(spec, l, plan::Side::kValue, request.value_codec);
      continue;
    }
    const std::vector<int64_t> group_ranks(groups.size(), *rank++);
    *layer->mutable_key()->add_parts() =
        LowRankPart(spec, KeySections(spec, l, PartialRotary::kOnePart).front(),
                    groups, group_ranks, request.key_codec);
    *layer->mutable_value()->add_parts() = LowRankPart(
        spec, ValueSection(spec), groups, group_ranks, request.value_codec);
  }
  return FinishPlan(request,
                    {.method = "lorc",
                     .options = OptionsText(request, options),
                     .decomposition = Decomposition::kSvd},
                    std::move(plan));
}

}  // namespace kvasir::compress
