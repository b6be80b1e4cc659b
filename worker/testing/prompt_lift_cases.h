// Test support: plans for the tiny models under which prompts lift latents
// (prompt_lift.h). There is a plan for each kind of lift and each kind of
// stored row.
#pragma once

#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

std::vector<FamilyCase> PromptLiftCases();

}  // namespace kvasir::worker
