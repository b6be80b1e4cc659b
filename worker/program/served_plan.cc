#include "worker/program/served_plan.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "worker/program/attention_limits.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {
namespace {

using plan::ResolvedPart;

std::string UnlikeWidths(const ResolvedPart& part) {
  std::vector<int64_t> widths;
  for (const plan::ResolvedLatent& latent : part.latents) {
    widths.push_back(latent.width);
  }
  if (std::adjacent_find(widths.begin(), widths.end(), std::not_equal_to<>()) ==
      widths.end()) {
    return "";
  }
  return absl::StrCat(
      "a rope_low_rank space stored PRE_ROPE with groups of different widths (",
      absl::StrJoin(widths, ", "), " channels)");
}

// Returns the feature of the part that this build cannot serve, or "" if it can
// serve the part.
std::string BeyondThisBuild(const ResolvedPart& part) {
  if (part.has_lift(plan::Lift::kAnchored)) return "ANCHORED keys";
  if (part.transform == plan::Transform::kBasisSequence) {
    return "a basis made for each sequence";
  }
  if (part.range == plan::RangeKind::kSequence)
    return "ranges made for each sequence";
  if (part.space == plan::Space::kLowRank &&
      part.stored == plan::RopeSide::kAfter) {
    return "a low_rank space of keys stored POST_ROPE";
  }
  if (part.space == plan::Space::kRopeLowRank &&
      part.stored == plan::RopeSide::kBefore) {
    return UnlikeWidths(part);
  }
  return "";
}

absl::Status CheckParts(const std::vector<ResolvedPart>& parts,
                        const std::string& where) {
  for (const ResolvedPart& part : parts) {
    const std::string what = BeyondThisBuild(part);
    if (what.empty()) continue;
    return absl::UnimplementedError(
        absl::StrCat(where, ": the plan asks for ", what, " in part ",
                     part.index, ", which this build does not serve"));
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(const plan::ResolvedAttention& attention,
                            int64_t layer) {
  const std::string name = absl::StrCat("layer ", layer);
  KVASIR_RETURN_IF_ERROR(CheckParts(attention.key.parts, name + " key"));
  KVASIR_RETURN_IF_ERROR(CheckParts(attention.value.parts, name + " value"));
  return absl::OkStatus();
}

absl::Status CheckTokens(const plan::ResolvedLayer& resolved,
                         const plan::ResolvedPlan& plan, int64_t layer) {
  if (resolved.selection.has_value()) {
    return absl::UnimplementedError(absl::StrCat(
        "layer ", layer,
        ": the plan asks for selection of tokens, which this "
        "build does not serve: attention reads every token in the cache"));
  }
  if (!resolved.eviction.has_value() || plan.shard.size == 1) {
    return absl::OkStatus();
  }
  // An eviction unit must lie on one rank, because a rank sees only the
  // attention of its own query heads.
  const int64_t each = plan.shape.num_kv_heads / plan.shard.size;
  for (const std::vector<int64_t>& unit : resolved.eviction->units) {
    const bool is_split =
        each == 0 || std::any_of(unit.begin(), unit.end(), [&](int64_t head) {
          return head / each != unit.front() / each;
        });
    if (!is_split) continue;
    return absl::UnimplementedError(absl::StrCat(
        "layer ", layer, ": an eviction unit of ", unit.size(),
        " KV heads spans several of the ", plan.shard.size,
        " tensor-parallel ranks, which this build does not serve"));
  }
  return absl::OkStatus();
}

}  // namespace

bool ServedPlan::leaves_key_bias_out() const {
  return resolved->shape.qkv_bias && can_leave_key_means_out();
}

bool ServedPlan::can_leave_key_means_out() const {
  return std::any_of(programs.begin(), programs.end(),
                     [](const AttentionProgram& program) {
                       return program.key_bias != KeyBias::kCached;
                     });
}

absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    std::shared_ptr<const plan::ResolvedPlan> plan,
    const ServeOptions& options) {
  for (int64_t layer = 0; layer < plan->num_layers(); ++layer) {
    KVASIR_RETURN_IF_ERROR(CheckAttention(plan->attention_of(layer), layer));
    KVASIR_RETURN_IF_ERROR(CheckTokens(plan->layer(layer), *plan, layer));
  }
  auto served = std::make_shared<ServedPlan>();
  for (int64_t layer = 0; layer < plan->num_layers(); ++layer) {
    // Layers with equal attention share the program of the first of them.
    const auto index = static_cast<size_t>(plan->layer(layer).attention);
    if (index < served->programs.size()) continue;
    const plan::ResolvedAttention& attention = plan->attention_of(layer);
    KVASIR_ASSIGN_OR_RETURN(
        AttentionProgram program,
        MakeAttentionProgram(attention, plan->shape, layer,
                             {plan->query_heads, plan->kv_heads}));
    KVASIR_RETURN_IF_ERROR(CheckAttentionLimits(program, layer, attention));
    if (options.lift_prompts) {
      PlanPromptLifts(&program);
      DropPromptLiftsBeyondLimits(attention, &program);
    }
    served->programs.push_back(std::move(program));
  }
  served->resolved = std::move(plan);
  return served;
}

absl::StatusOr<std::shared_ptr<const ServedPlan>> ServePlan(
    const kvasir::v1::KvPlan& plan, const plan::AttentionShape& shape,
    const ServeOptions& options, plan::TpShard shard) {
  KVASIR_ASSIGN_OR_RETURN(plan::ResolvedPlan resolved,
                          plan::ResolvePlan(plan, shape, shard));
  return ServePlan(
      std::make_shared<const plan::ResolvedPlan>(std::move(resolved)), options);
}

}  // namespace kvasir::worker
