#include "bench/tool/plans.h"

#include "absl/strings/match.h"
#include "base/status_macros.h"
#include "bench/tool/spread_plan.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"
#include "plan/presets.h"
#include "worker/load/model_source.h"

namespace kvasir::cli {

absl::StatusOr<kvasir::v1::KvPlan> PlanNamed(const std::string& name,
                                             const model::DecoderSpec& spec) {
  if (!absl::EndsWith(name, ".json"))
    return plan::MakePresetPlan(name, model::AttentionShapeOf(spec));
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadTextFile(name, plan::kMaxPlanJsonBytes));
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::KvPlan plan,
                          plan::ParsePlanJson(text, name));
  return SpreadPlan(plan, model::AttentionShapeOf(spec));
}

}  // namespace kvasir::cli
