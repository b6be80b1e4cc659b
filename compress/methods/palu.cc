#include "compress/methods/palu.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/rank_allocation.h"

namespace kvasir::compress {

using kvasir::v1::Codec;
using kvasir::v1::KvPlan;
using kvasir::v1::SidePlan;

namespace {

// A low_rank part of the plan. The rank of head group g comes from the unit
// with index unit_of_group[g] in the RankPool.
struct PlannedPart {
  int64_t layer = 0;
  Section section;
  std::vector<size_t> unit_of_group;
};

// The Fisher information of each row of a projection, [Hkv, D] float64 on the
// CPU.
class RowScores {
 public:
  static absl::StatusOr<RowScores> Create(const PlanRequest& request,
                                          const PlannedPart& part,
                                          FisherScore score) {
    RowScores scores;
    KVASIR_ASSIGN_OR_RETURN(
        scores.rows_, FisherRows(request, part.layer, part.section.side,
                                 /*root=*/score == FisherScore::kMeanRoot));
    scores.head_dim_ = request.spec.head_dim;
    return scores;
  }

  double Sum(const HeadGroup& group, const Section& section) const {
    const double* rows = rows_.data_ptr<double>();
    double sum = 0;
    for (uint32_t head : group) {
      const double* first = rows + head * head_dim_ + section.first_dim;
      for (int64_t i = 0; i < section.num_dims; ++i) sum += first[i];
    }
    return sum;
  }

 private:
  at::Tensor rows_;
  int64_t head_dim_ = 0;
};

// Returns a score for each group of the part. With RankSearch::kUniform, the
// score is the group's size.
absl::StatusOr<std::vector<double>> GroupScores(
    const PlanRequest& request, const PaluOptions& options,
    const std::vector<HeadGroup>& groups, const PlannedPart& part) {
  std::vector<double> scores;
  if (options.search == RankSearch::kUniform) {
    for (const HeadGroup& group : groups) {
      scores.push_back(static_cast<double>(GroupRows(group, part.section)));
    }
    return scores;
  }
  KVASIR_ASSIGN_OR_RETURN(const RowScores rows,
                          RowScores::Create(request, part, options.score));
  for (const HeadGroup& group : groups) {
    scores.push_back(rows.Sum(group, part.section));
  }
  return scores;
}

// Adds the part's units to the pool. Groups that must have the same rank form
// one unit: all groups of a part (kModule), or the groups with the same index
// on each tensor-parallel rank.
absl::Status AddUnits(const PlanRequest& request, const PaluOptions& options,
                      const std::vector<HeadGroup>& groups, PlannedPart& part,
                      RankPool& pool) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<double> scores,
                          GroupScores(request, options, groups, part));
  const size_t per_rank =
      groups.size() / static_cast<size_t>(HeadShares(request));
  const size_t units = options.search == RankSearch::kModule ? 1 : per_rank;
  const size_t copies = groups.size() / units;
  const size_t first = pool.units.size();
  for (size_t u = 0; u < units; ++u) {
    pool.units.push_back(
        {.max_rank = MaxRank(request.spec, groups[u], part.section),
         .copies = static_cast<int64_t>(copies)});
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    part.unit_of_group.push_back(first + g % units);
    pool.units[first + g % units].score +=
        scores[g] / static_cast<double>(copies);
  }
  return absl::OkStatus();
}

std::string OptionsText(const PlanRequest& request,
                        const PaluOptions& options) {
  return absl::StrCat("--keep ", NumberText(request.keep), " --tp ", request.tp,
                      " --rank-multiple ", request.rank_multiple,
                      " --group-heads ", options.group_heads, " --search ",
                      RankSearchName(options.search), " --score ",
                      FisherScoreName(options.score), " --decomposition ",
                      DecompositionName(options.decomposition),
                      options.hadamard ? " --hadamard on" : " --hadamard off");
}

Codec WithHadamard(Codec codec, bool hadamard) {
  if (hadamard) codec.mutable_hadamard_fused();
  return codec;
}

}  // namespace

absl::StatusOr<RankSearch> ParseRankSearch(const std::string& name) {
  for (RankSearch search :
       {RankSearch::kFisher, RankSearch::kModule, RankSearch::kUniform}) {
    if (RankSearchName(search) == name) return search;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown rank search \"", name, "\": want fisher, module or uniform"));
}

std::string RankSearchName(RankSearch search) {
  switch (search) {
    case RankSearch::kFisher:
      return "fisher";
    case RankSearch::kModule:
      return "module";
    case RankSearch::kUniform:
      break;
  }
  return "uniform";
}

absl::StatusOr<FisherScore> ParseFisherScore(const std::string& name) {
  for (FisherScore score : {FisherScore::kMeanRoot, FisherScore::kSum}) {
    if (FisherScoreName(score) == name) return score;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown Fisher score \"", name, "\": want mean-root or sum"));
}

std::string FisherScoreName(FisherScore score) {
  return score == FisherScore::kMeanRoot ? "mean-root" : "sum";
}

absl::StatusOr<KvPlan> PlanPalu(const PlanRequest& request,
                                const PaluOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  const bool uniform = options.search == RankSearch::kUniform;
  if (!uniform) {
    KVASIR_RETURN_IF_ERROR(NeedFisher(
        request,
        absl::StrCat("rank search \"", RankSearchName(options.search), "\""),
        RankSearchName(RankSearch::kUniform)));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> groups,
                          HeadGroups(request, options.group_heads));

  std::vector<PlannedPart> parts;
  RankPool pool{.target = KeptNumbers(request.keep, DenseNumbers(request.spec)),
                .multiple = request.rank_multiple};
  for (int64_t layer = 0; layer < request.spec.num_layers(); ++layer) {
    std::vector<Section> sections =
        KeySections(request.spec, layer, PartialRotary::kTwoParts);
    sections.push_back(ValueSection(request.spec));
    for (const Section& section : sections) {
      PlannedPart part{.layer = layer, .section = section};
      KVASIR_RETURN_IF_ERROR(AddUnits(request, options, groups, part, pool));
      parts.push_back(std::move(part));
    }
  }
  const absl::StatusOr<std::vector<int64_t>> ranks = AllocateRanks(pool);
  if (!ranks.ok()) {
    return absl::Status(
        ranks.status().code(),
        absl::StrCat("keep ", request.keep, ": ", ranks.status().message()));
  }

  KvPlan plan;
  for (int64_t layer = 0; layer < request.spec.num_layers(); ++layer) {
    plan.add_layers();
  }
  for (const PlannedPart& part : parts) {
    std::vector<int64_t> part_ranks;
    for (size_t unit : part.unit_of_group) part_ranks.push_back((*ranks)[unit]);
    const bool key = part.section.side == plan::Side::kKey;
    auto* layer = plan.mutable_layers(static_cast<int>(part.layer));
    SidePlan* side = key ? layer->mutable_key() : layer->mutable_value();
    *side->add_parts() =
        LowRankPart(request.spec, part.section, groups, part_ranks,
                    WithHadamard(key ? request.key_codec : request.value_codec,
                                 options.hadamard));
  }
  return FinishPlan(request,
                    {.method = uniform ? "uniform" : "palu",
                     .options = OptionsText(request, options),
                     .decomposition = options.decomposition},
                    std::move(plan));
}

}  // namespace kvasir::compress
