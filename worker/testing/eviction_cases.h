// Test support: plans that evict slots, with every kind of eviction unit,
// codec, lift and position.
#pragma once

#include <string>
#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

// Returns the eviction field of a plan as JSON. `rest` is JSON of more fields
// and begins with a comma. With the default budget of 21 slots, most test
// requests lose slots, because they have 1 to 75 prompt tokens and about 20
// output tokens.
std::string Eviction(const std::string& rest,
                     const std::string& budget = R"("budget":21)");

std::vector<FamilyCase> EvictionCases();

}  // namespace kvasir::worker
