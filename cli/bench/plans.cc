#include "cli/bench/plans.h"

#include "absl/strings/match.h"
#include "base/status_macros.h"
#include "bench/plan_presets.h"
#include "cli/model_source.h"
#include "plan/plan.h"

namespace kvasir::cli {

absl::StatusOr<kvasir::v1::KvPlan> PlanNamed(const std::string& name,
                                             const model::DecoderSpec& spec) {
  if (!absl::EndsWith(name, ".json")) return bench::MakePresetPlan(name, spec);
  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadTextFile(name, cache::kMaxPlanJsonBytes));
  return cache::ParsePlanJson(text, name);
}

}  // namespace kvasir::cli
