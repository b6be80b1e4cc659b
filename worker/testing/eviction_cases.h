// Test support: plans that evict slots, with every kind of eviction unit,
// codec, lift and position.
#pragma once

#include <string>
#include <vector>

#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {

// Returns a plan's eviction as JSON. `rest` (",...") is appended to its fields.
// A budget of 21 slots evicts from most of the test requests, which have 1 to
// 75 prompt tokens and about 20 output tokens.
std::string Eviction(const std::string& rest,
                     const std::string& budget = R"("budget":21)");

std::vector<FamilyCase> EvictionCases();

}  // namespace kvasir::worker
