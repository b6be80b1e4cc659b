#include "compress/methods/commuting.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/methods/rope_choice.h"
#include "compress/methods/rope_factors.h"
#include "compress/methods/rope_pairs.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {

using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;

namespace {

// The energies of a layer's complex-valued latent channels, one PairEnergies
// per group of heads.
using LayerEnergies = std::vector<PairEnergies>;

absl::StatusOr<LayerEnergies> MeasureLayer(const PlanRequest& request,
                                           const CommutingOptions& options,
                                           const std::vector<HeadGroup>& groups,
                                           int64_t layer) {
  const model::DecoderSpec& spec = request.spec;
  const int64_t num_pairs = NumRopePairs(spec, layer);
  LayerEnergies energies(groups.size());
  if (num_pairs == 0) return energies;
  KVASIR_ASSIGN_OR_RETURN(const AttentionWeights weights,
                          request.weights(layer));
  const Calibration* calibration = request.calibration;
  KVASIR_ASSIGN_OR_RETURN(
      const PairStatistics statistics,
      MakePairStatistics(
          {.spec = &spec,
           .key = weights.key,
           .key_bias = weights.key_bias,
           .calibration =
               calibration == nullptr
                   ? nullptr
                   : &calibration->layers[static_cast<size_t>(layer)],
           .num_tokens = calibration == nullptr ? 0 : calibration->num_tokens,
           .decomposition = options.decomposition,
           .weights = options.weights}));
  for (const at::Tensor* input : {&statistics.key_gram, &statistics.weights}) {
    if (at::isfinite(*input).all().item<bool>()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer,
                     ": k_proj or its calibration holds a number that is not "
                     "finite"));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<int64_t> heads(groups[g].begin(), groups[g].end());
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      const at::Tensor values =
          SpectrumOfPair(spec, statistics, heads, pair).energies.contiguous();
      const double* data = values.data_ptr<double>();
      energies[g].emplace_back(data, data + values.numel());
    }
  }
  return energies;
}

double Sum(const LayerEnergies& energies) {
  double sum = 0;
  for (const PairEnergies& group : energies) {
    for (const std::vector<double>& pair : group) {
      for (const double energy : pair) sum += energy;
    }
  }
  return sum;
}

// Makes the key part for the dims that RoPE rotates. Groups of heads get
// `channels` complex-valued channels on average.
Part CommutingPart(const PlanRequest& request,
                   const std::vector<HeadGroup>& groups,
                   const LayerEnergies& energies, int64_t channels) {
  const auto num_groups = static_cast<int64_t>(groups.size());
  const std::vector<int64_t> counts =
      request.tp > 1 ? std::vector<int64_t>(groups.size(), channels)
                     : ShareChannels(energies, EvenMultiple(request) / 2,
                                     num_groups * channels);
  Part part;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto* group = part.mutable_rope_low_rank()->add_groups();
    group->mutable_heads()->Add(groups[g].begin(), groups[g].end());
    const std::vector<int64_t> terms = BestTerms(energies[g], counts[g]);
    for (size_t pair = 0; pair < terms.size(); ++pair) {
      if (terms[pair] == 0) continue;
      group->add_pairs(static_cast<uint32_t>(pair));
      group->add_rank_per_pair(static_cast<uint32_t>(terms[pair]));
    }
  }
  part.set_stored(kvasir::v1::POST_ROPE);
  part.add_uses()->mutable_at_runtime();
  part.set_latent_bias(request.spec.qkv_bias);
  *part.mutable_codec() = request.key_codec;
  return part;
}

void PlanLayer(const PlanRequest& request, const std::vector<HeadGroup>& groups,
               const LayerEnergies& energies, const LayerBudget& budget,
               int64_t layer, LayerPlan& plan) {
  for (const Section& section :
       KeySections(request.spec, layer, PartialRotary::kTwoParts)) {
    *plan.mutable_key()->add_parts() =
        section.rotates
            ? CommutingPart(request, groups, energies, budget.pair_dims / 2)
            : LowRankPart(request.spec, section, groups,
                          std::vector<int64_t>(groups.size(), budget.rest_rank),
                          request.key_codec);
  }
  *plan.mutable_value()->add_parts() =
      ValuePart(request, layer, budget.value_rank);
}

// Returns the energy of each layer's keys. A layer without RoPE gets the mean
// energy of the layers with RoPE.
std::vector<double> KeyEnergies(const std::vector<LayerEnergies>& layers) {
  std::vector<double> sums;
  double total = 0;
  int64_t rotating = 0;
  for (const LayerEnergies& layer : layers) {
    sums.push_back(Sum(layer));
    total += sums.back();
    rotating += layer[0].empty() ? 0 : 1;
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l][0].empty()) continue;
    sums[l] = rotating > 0 ? total / static_cast<double>(rotating) : 1.0;
  }
  return sums;
}

std::string OptionsText(const PlanRequest& request,
                        const CommutingOptions& options) {
  return absl::StrCat(
      "--keep ", NumberText(request.keep), " --tp ", request.tp,
      " --rank-multiple ", request.rank_multiple, " --group-heads ",
      options.group_heads, " ", BudgetOptionsText(options.budget),
      " --query-weights ", options.weights.query_weights ? "on" : "off",
      " --query-floor ", NumberText(options.weights.query_floor),
      " --decomposition ", DecompositionName(options.decomposition));
}

absl::StatusOr<KvPlan> Plan(const PlanRequest& request,
                            const CommutingOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  KVASIR_RETURN_IF_ERROR(CheckCommutingWeights(options.weights));
  KVASIR_RETURN_IF_ERROR(NeedWeights(request, "the commuting method"));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> groups,
                          HeadGroups(request, options.group_heads));
  std::vector<LayerEnergies> energies;
  for (int64_t layer = 0; layer < request.spec.num_layers(); ++layer) {
    KVASIR_ASSIGN_OR_RETURN(LayerEnergies layer_energies,
                            MeasureLayer(request, options, groups, layer));
    energies.push_back(std::move(layer_energies));
  }
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<LayerBudget> budgets,
      ShareBudget(request, options.budget, groups, KeyEnergies(energies)));
  KvPlan plan;
  for (int64_t layer = 0; layer < request.spec.num_layers(); ++layer) {
    const auto l = static_cast<size_t>(layer);
    PlanLayer(request, groups, energies[l], budgets[l], layer,
              *plan.add_layers());
  }
  auto* commuting = plan.mutable_provenance()->mutable_commuting();
  commuting->set_query_energy(options.weights.query_weights);
  commuting->set_query_floor(options.weights.query_floor);
  return FinishPlan(request,
                    {.method = "commuting",
                     .options = OptionsText(request, options),
                     .decomposition = options.decomposition},
                    std::move(plan));
}

}  // namespace

absl::StatusOr<KvPlan> PlanCommuting(const PlanRequest& request,
                                     const CommutingOptions& options) {
  return CatchTorch([&] { return Plan(request, options); });
}

}  // namespace kvasir::compress
