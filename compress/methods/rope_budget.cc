#include "compress/methods/rope_budget.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/methods/rank_allocation.h"
#include "compress/methods/rope_pairs.h"

namespace kvasir::compress {
namespace {

bool ByFisher(BudgetScore score) {
  return score == BudgetScore::kFisher || score == BudgetScore::kFisherRoot;
}

// The numbers per token that keys and values may keep in all layers together.
struct SideBudgets {
  int64_t keys = 0;
  int64_t values = 0;
};

absl::StatusOr<SideBudgets> SplitBudget(const PlanRequest& request,
                                        const BudgetOptions& options) {
  if (options.keep_values && options.key_keep.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--key-keep ", *options.key_keep,
        " cannot be used with --keep-values: with whole values, the kept share "
        "of keys and values together, ",
        request.keep, ", determines how much of the keys is kept"));
  }
  const int64_t dense = DenseNumbers(request.spec);
  const int64_t side = dense / 2;
  const int64_t kept = KeptNumbers(request.keep, dense);
  SideBudgets budgets;
  budgets.keys =
      options.keep_values ? kept - side : KeptNumbers(request.keep, side);
  if (options.key_keep.has_value()) {
    if (!(*options.key_keep > 0 && *options.key_keep <= 1)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the kept share of keys must be above 0 and at most 1, is ",
          *options.key_keep));
    }
    budgets.keys = KeptNumbers(*options.key_keep, side);
  }
  if (options.keep_values && budgets.keys <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a kept share of ", request.keep,
                     " with whole values leaves nothing for the keys: want "
                     "more than 0.5"));
  }
  budgets.values = std::min(kept - budgets.keys, side);
  if (!options.keep_values && budgets.values <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a share of ", options.key_keep.value_or(request.keep),
        " of the keys uses up the share of ", request.keep,
        " of keys and values together and leaves nothing for the values: "
        "lower the keys' share or raise the total"));
  }
  return budgets;
}

// The units of one rank pool. ranks_[u] points to the variable that receives
// the rank of unit u.
class Pool {
 public:
  explicit Pool(int64_t multiple) { pool_.multiple = multiple; }

  void Add(const RankUnit& unit, int64_t* rank) {
    if (unit.max_rank == 0) return;
    pool_.units.push_back(unit);
    ranks_.push_back(rank);
  }

  absl::Status Allocate(const char* name, int64_t budget) {
    pool_.target = budget;
    const absl::StatusOr<std::vector<int64_t>> ranks = AllocateRanks(pool_);
    if (!ranks.ok()) {
      return absl::Status(ranks.status().code(),
                          absl::StrCat(name, ": ", ranks.status().message()));
    }
    for (size_t u = 0; u < ranks->size(); ++u) *ranks_[u] = (*ranks)[u];
    return absl::OkStatus();
  }

 private:
  RankPool pool_;
  std::vector<int64_t*> ranks_;
};

// The units that one layer adds to the pools.
struct LayerUnits {
  RankUnit pairs;
  RankUnit rest;
  RankUnit values;
};

LayerUnits UnitsOfLayer(const PlanRequest& request,
                        const std::vector<HeadGroup>& groups, int64_t layer) {
  const model::DecoderSpec& spec = request.spec;
  const auto copies = static_cast<int64_t>(groups.size());
  LayerUnits units;
  units.pairs.copies = units.rest.copies = copies;
  for (const Section& section :
       KeySections(spec, layer, PartialRotary::kTwoParts)) {
    if (section.rotates) {
      units.pairs.max_rank = GroupRows(groups[0], section);
    } else {
      units.rest.max_rank = MaxRank(spec, groups[0], section);
    }
  }
  units.values.copies = spec.num_kv_heads;
  units.values.max_rank = std::min(spec.head_dim, spec.hidden_size);
  return units;
}

// Scores every unit by its size; scores of key units are multiplied by the
// layer's `key_energy`.
void ScoreUniformly(double key_energy, LayerUnits& units) {
  units.pairs.score = key_energy * static_cast<double>(units.pairs.max_rank);
  units.rest.score = key_energy * static_cast<double>(units.rest.max_rank);
  units.values.score = static_cast<double>(units.values.max_rank);
}

absl::Status ScoreByFisher(const PlanRequest& request, bool root, int64_t layer,
                           LayerUnits& units) {
  const model::DecoderSpec& spec = request.spec;
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor keys,
                          FisherRows(request, layer, plan::Side::kKey, root));
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor values,
                          FisherRows(request, layer, plan::Side::kValue, root));
  const int64_t rotary = 2 * NumRopePairs(spec, layer);
  const at::Tensor by_head = keys.view({spec.num_kv_heads, spec.head_dim});
  const auto per_copy = [](const at::Tensor& part, const RankUnit& unit) {
    return part.sum().item<double>() / static_cast<double>(unit.copies);
  };
  units.pairs.score = per_copy(by_head.narrow(1, 0, rotary), units.pairs);
  units.rest.score =
      per_copy(by_head.narrow(1, rotary, spec.head_dim - rotary), units.rest);
  units.values.score = per_copy(values, units.values);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BudgetScore> ParseBudgetScore(const std::string& name) {
  for (const BudgetScore score :
       {BudgetScore::kUniform, BudgetScore::kFisher, BudgetScore::kFisherRoot,
        BudgetScore::kEnergy}) {
    if (BudgetScoreName(score) == name) return score;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown budget \"", name,
                   "\": want uniform, fisher, fisher-root or energy"));
}

std::string BudgetScoreName(BudgetScore score) {
  switch (score) {
    case BudgetScore::kUniform:
      return "uniform";
    case BudgetScore::kFisher:
      return "fisher";
    case BudgetScore::kFisherRoot:
      return "fisher-root";
    case BudgetScore::kEnergy:
      break;
  }
  return "energy";
}

std::string BudgetOptionsText(const BudgetOptions& options) {
  std::string text = absl::StrCat("--search ", BudgetScoreName(options.score));
  if (options.keep_values) absl::StrAppend(&text, " --keep-values");
  if (options.key_keep.has_value()) {
    absl::StrAppend(&text, " --key-keep ", NumberText(*options.key_keep));
  }
  return text;
}

int64_t EvenMultiple(const PlanRequest& request) {
  return request.rank_multiple % 2 == 0 ? request.rank_multiple
                                        : 2 * request.rank_multiple;
}

absl::StatusOr<std::vector<LayerBudget>> ShareBudget(
    const PlanRequest& request, const BudgetOptions& options,
    const std::vector<HeadGroup>& groups,
    const std::vector<double>& key_energy) {
  const bool fisher = ByFisher(options.score);
  if (fisher) {
    KVASIR_RETURN_IF_ERROR(NeedFisher(
        request,
        absl::StrCat("the budget \"", BudgetScoreName(options.score), "\""),
        BudgetScoreName(BudgetScore::kUniform)));
  }
  if (options.score == BudgetScore::kEnergy &&
      static_cast<int64_t>(key_energy.size()) != request.spec.num_layers()) {
    return absl::InvalidArgumentError(
        "the budget \"energy\" needs energies, which only the commuting method "
        "measures: want uniform, fisher or fisher-root");
  }
  KVASIR_ASSIGN_OR_RETURN(const SideBudgets budgets,
                          SplitBudget(request, options));
  const bool together =
      fisher && !options.keep_values && !options.key_keep.has_value();
  Pool keys(EvenMultiple(request));
  Pool values(request.rank_multiple);
  std::vector<LayerBudget> layers(
      static_cast<size_t>(request.spec.num_layers()));
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto layer = static_cast<int64_t>(l);
    LayerUnits units = UnitsOfLayer(request, groups, layer);
    if (fisher) {
      KVASIR_RETURN_IF_ERROR(ScoreByFisher(
          request, options.score == BudgetScore::kFisherRoot, layer, units));
    } else {
      ScoreUniformly(
          options.score == BudgetScore::kEnergy ? key_energy[l] : 1.0, units);
    }
    keys.Add(units.pairs, &layers[l].pair_dims);
    keys.Add(units.rest, &layers[l].rest_rank);
    layers[l].value_rank = request.spec.head_dim;
    if (!options.keep_values) {
      (together ? keys : values).Add(units.values, &layers[l].value_rank);
    }
  }
  if (together) {
    KVASIR_RETURN_IF_ERROR(
        keys.Allocate("keys and values", budgets.keys + budgets.values));
    return layers;
  }
  KVASIR_RETURN_IF_ERROR(keys.Allocate("keys", budgets.keys));
  if (!options.keep_values) {
    KVASIR_RETURN_IF_ERROR(values.Allocate("values", budgets.values));
  }
  return layers;
}

kvasir::v1::Part ValuePart(const PlanRequest& request, int64_t layer,
                           int64_t rank) {
  const model::DecoderSpec& spec = request.spec;
  const kvasir::v1::Codec& codec = request.value_codec;
  // Whole values are stored in a full part, unless the codec has a fused
  // Hadamard matrix or a schedule, which need a low_rank part.
  const bool wants_latent =
      codec.has_hadamard_fused() || codec.bits().schedule_size() > 1;
  if (rank == spec.head_dim && !wants_latent) {
    return FullPart(spec, layer, plan::Side::kValue, codec);
  }
  std::vector<HeadGroup> heads;
  for (uint32_t head = 0; head < spec.num_kv_heads; ++head) {
    heads.push_back({head});
  }
  return LowRankPart(spec, ValueSection(spec), heads,
                     std::vector<int64_t>(heads.size(), rank), codec);
}

}  // namespace kvasir::compress
