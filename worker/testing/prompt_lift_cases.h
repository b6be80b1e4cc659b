// Test support: plans under which prompts of the tiny models lift latents
// (prompt_lift.h). There is a plan for each kind of lift and each kind of
// stored row.
#pragma once

#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

std::vector<FamilyCase> PromptLiftCases();

}  // namespace kvasir::worker
