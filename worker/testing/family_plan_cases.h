// Test support: compression plans for tiny models (tiny_rank.h) of families
// other than Llama, and for models with a sliding window or with experts.
#pragma once

#include <string>
#include <vector>

#include "worker/testing/plan_cases.h"

namespace kvasir::worker {

// A plan and the model that it is for.
struct FamilyCase {
  model::ModelShape shape;
  PlanCase plan_case;
};

namespace plan_cases {

// Head groups of low_rank parts, as JSON. kTwo and kAll are for parts with all
// 8 dims of a head. kStill is for parts with the 4 dims that RoPE does not
// rotate in GPT-NeoX.
inline constexpr char kTwo[] =
    R"({"heads":[0,2],"rank":9},{"heads":[3,1],"rank":6})";
inline constexpr char kAll[] = R"({"heads":[0,1,2,3],"rank":16})";
inline constexpr char kStill[] =
    R"({"heads":[0,2],"rank":5},{"heads":[3,1],"rank":4})";
inline constexpr char kReconstruct[] = R"("reconstruct":{})";
inline constexpr char kAtRuntime[] = R"("at_runtime":{})";
inline constexpr char kFold[] = R"("fold":{})";
inline constexpr char kMean[] = R"(,"mean":true)";

std::string TokenCodes(const std::string& bits, const std::string& rest = "");
std::string BasisCodes(const std::string& bits);

// A rope_pairs part that stores one of the two rotation pairs of each head.
std::string OnePair(const std::string& use, const std::string& stored,
                    const std::string& codec = kTyped);

}  // namespace plan_cases

// Returns plans for each family, and plans of each kind for a model with this
// sliding window.
std::vector<FamilyCase> FamilyCases(int64_t sliding_window);

}  // namespace kvasir::worker
