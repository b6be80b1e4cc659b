#include "worker/program/served_plan.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plan/plan.h"
#include "worker/program/attention_limits.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {

absl::StatusOr<std::vector<AttentionProgram>> ServedAttention(
    const model::DecoderSpec& spec, const kvasir::v1::KvPlan& plan,
    const ServeOptions& options) {
  if (plan.layers_size() != spec.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", plan.layers_size(),
                     " layers, the model has ", spec.num_layers()));
  }
  KVASIR_RETURN_IF_ERROR(cache::ServedByThisBuild(plan));
  std::vector<AttentionProgram> programs;
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    const kvasir::v1::LayerPlan& own = plan.layers(static_cast<int>(layer));
    KVASIR_ASSIGN_OR_RETURN(
        AttentionProgram program,
        MakeAttentionProgram(spec, layer, own, options.heads));
    KVASIR_RETURN_IF_ERROR(CheckAttentionLimits(program, layer, own));
    if (options.lift_prompts) {
      PlanPromptLifts(&program);
      DropPromptLiftsBeyondLimits(own, &program);
    }
    programs.push_back(std::move(program));
  }
  return programs;
}

RankHeads AllHeads(const model::DecoderSpec& spec) {
  return {{0, spec.num_heads}, {0, spec.num_kv_heads}};
}

}  // namespace kvasir::worker
