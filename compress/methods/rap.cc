#include "compress/methods/rap.h"

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

// The scores of RoPE pairs: scores[KV head][pair].
using HeadScores = std::vector<std::vector<double>>;

// Returns the score of each row of the key projection, [Hkv * D] float64.
absl::StatusOr<at::Tensor> RowScores(const PlanRequest& request,
                                     PairScore score, int64_t layer) {
  if (score == PairScore::kFisher) {
    return FisherRows(request, layer, plan::Side::kKey, /*root=*/false);
  }
  KVASIR_ASSIGN_OR_RETURN(const AttentionWeights weights,
                          request.weights(layer));
  const LayerCalibration& calibration =
      request.calibration->layers[static_cast<size_t>(layer)];
  const ProjectedMoments moments =
      MomentsOfProjection(weights.key, weights.key_bias, calibration,
                          request.calibration->num_tokens);
  const auto tokens = static_cast<double>(request.calibration->num_tokens);
  return (moments.gram.diagonal() / tokens).contiguous();
}

absl::StatusOr<HeadScores> ScorePairs(const PlanRequest& request,
                                      PairScore score, int64_t layer) {
  const model::DecoderSpec& spec = request.spec;
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor rows,
                          RowScores(request, score, layer));
  const double* by_row = rows.data_ptr<double>();
  HeadScores scores(static_cast<size_t>(spec.num_kv_heads));
  for (int64_t head = 0; head < spec.num_kv_heads; ++head) {
    const double* head_scores = by_row + head * spec.head_dim;
    for (int64_t pair = 0; pair < NumRopePairs(spec, layer); ++pair) {
      const PairDims dims = DimsOfPair(spec.rope, pair);
      const double sum = head_scores[dims.first] + head_scores[dims.second];
      if (!std::isfinite(sum) || sum < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("layer ", layer, " key head ", head, " pair ", pair,
                         ": the ", PairScoreName(score), " score is ", sum,
                         ": weights or calibration are not finite"));
      }
      scores[static_cast<size_t>(head)].push_back(sum);
    }
  }
  return scores;
}

Part PairsPart(const PlanRequest& request, const HeadScores& scores,
               int64_t count) {
  Part part;
  for (const std::vector<double>& head_scores : scores) {
    auto* head = part.mutable_rope_pairs()->add_per_head();
    for (const int64_t pair : BestIndices(head_scores, count)) {
      head->add_pair_indices(static_cast<uint32_t>(pair));
    }
  }
  part.set_stored(kvasir::v1::POST_ROPE);
  part.add_uses()->mutable_fold();
  *part.mutable_codec() = request.key_codec;
  return part;
}

absl::Status PlanLayer(const PlanRequest& request, const RapOptions& options,
                       const std::vector<HeadGroup>& heads,
                       const LayerBudget& budget, int64_t layer,
                       LayerPlan& plan) {
  for (const Section& section :
       KeySections(request.spec, layer, PartialRotary::kTwoParts)) {
    if (section.rotates) {
      KVASIR_ASSIGN_OR_RETURN(const HeadScores scores,
                              ScorePairs(request, options.pair_score, layer));
      *plan.mutable_key()->add_parts() =
          PairsPart(request, scores, budget.pair_dims / 2);
    } else {
      *plan.mutable_key()->add_parts() =
          LowRankPart(request.spec, section, heads,
                      std::vector<int64_t>(heads.size(), budget.rest_rank),
                      request.key_codec);
    }
  }
  *plan.mutable_value()->add_parts() =
      ValuePart(request, layer, budget.value_rank);
  return absl::OkStatus();
}

absl::StatusOr<KvPlan> Plan(const PlanRequest& request,
                            const RapOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  const std::string what = absl::StrCat(
      "the pair score \"", PairScoreName(options.pair_score), "\"");
  KVASIR_RETURN_IF_ERROR(
      options.pair_score == PairScore::kFisher
          ? NeedFisher(request, what, PairScoreName(PairScore::kMagnitude))
          : NeedCalibration(request, what));
  if (options.pair_score == PairScore::kMagnitude) {
    KVASIR_RETURN_IF_ERROR(NeedWeights(request, what));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> heads,
                          HeadGroups(request, /*group_heads=*/1));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<LayerBudget> budgets,
                          ShareBudget(request, options.budget, heads));
  KvPlan plan;
  for (int64_t layer = 0; layer < request.spec.num_layers(); ++layer) {
    KVASIR_RETURN_IF_ERROR(PlanLayer(request, options, heads,
                                     budgets[static_cast<size_t>(layer)], layer,
                                     *plan.add_layers()));
  }
  return FinishPlan(
      request,
      {.method = "rap",
       .options = absl::StrCat(
           "--keep ", NumberText(request.keep), " --tp ", request.tp,
           " --rank-multiple ", request.rank_multiple, " --pair-score ",
           PairScoreName(options.pair_score), " ",
           BudgetOptionsText(options.budget), " --decomposition ",
           DecompositionName(options.decomposition)),
       .decomposition = options.decomposition},
      std::move(plan));
}

}  // namespace

absl::StatusOr<PairScore> ParsePairScore(const std::string& name) {
  for (const PairScore score : {PairScore::kFisher, PairScore::kMagnitude}) {
    if (PairScoreName(score) == name) return score;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown pair score \"", name, "\": want fisher or magnitude"));
}

std::string PairScoreName(PairScore score) {
  return score == PairScore::kFisher ? "fisher" : "magnitude";
}

absl::StatusOr<KvPlan> PlanRap(const PlanRequest& request,
                               const RapOptions& options) {
  return CatchTorch([&] { return Plan(request, options); });
}

}  // namespace kvasir::compress
