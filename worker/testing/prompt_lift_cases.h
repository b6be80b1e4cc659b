// Test support: plans of which prompts of the tiny models lift something, one
// for each kind of lift and of rows that are lifted.
#pragma once

#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

std::vector<FamilyCase> PromptLiftCases();

}  // namespace kvasir::worker
