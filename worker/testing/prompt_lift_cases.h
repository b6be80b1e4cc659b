// Test support: plans with prompts that lift latents of the tiny models. There
// is one for each kind of lift and of lifted rows.
#pragma once

#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

std::vector<FamilyCase> PromptLiftCases();

}  // namespace kvasir::worker
