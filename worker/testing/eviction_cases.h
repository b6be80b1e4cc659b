// Plans that evict slots: every kind of unit, codec, lift and position.
#pragma once

#include <string>
#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

// An eviction of a plan as JSON; `rest` (",...") is added to its fields. With a
// budget of 21 slots, most prompts of 1 to 75 tokens with about 20 tokens of
// output are evicted.
std::string Eviction(const std::string& rest,
                     const std::string& budget = R"("budget":21)");

std::vector<FamilyCase> EvictionCases();

}  // namespace kvasir::worker
