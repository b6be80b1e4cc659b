#include "worker/testing/family_plan_cases.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {
namespace plan_cases {

std::string TokenCodes(const std::string& bits, const std::string& rest) {
  return Codes(bits, R"("per_token":{},"param_dtype":"F16")" + rest);
}

std::string BasisCodes(const std::string& bits) {
  return Codes(bits, R"("channel_static":{},"basis_static":{})");
}

std::string OnePair(const std::string& use, const std::string& stored,
                    const std::string& codec) {
  return absl::StrCat(
      R"({"rope_pairs":{"per_head":[{"pair_indices":[0]},)",
      R"({"pair_indices":[1]},{"pair_indices":[1]},{"pair_indices":[0]}]},)",
      R"("uses":[{)", use, R"(}],"stored":")", stored, R"(","codec":)", codec,
      "}");
}

}  // namespace plan_cases

namespace {

std::string ComplexOfTwoPairs(const std::string& use) {
  return absl::StrCat(
      R"({"rope_low_rank":{"groups":[{"heads":[0,3],"pairs":[0,1],)",
      R"("rank_per_pair":[2,1]},{"heads":[2,1],"pairs":[1],)",
      R"("rank_per_pair":[2]}]},"uses":[{)", use,
      R"(}],"stored":"POST_ROPE","codec":{"dtype":"$"}})");
}

std::vector<PlanCase> NeoxPlanCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string online = R"(,"hadamard_online":{})";
  const std::string fused = R"(,"hadamard_fused":{})";
  return {
      {"NeoxPalu", LowRank(kTwo, kReconstruct, "PRE_ROPE"),
       LowRank(kTwo, kFold, "NO_ROPE")},
      {"NeoxPaluCodes",
       LowRank(kAll, kReconstruct, "PRE_ROPE", TokenCodes("4", fused)),
       LowRank(kAll, kAtRuntime, "NO_ROPE", TokenCodes("3", fused)), true},
      {"NeoxPairsFolded",
       absl::StrCat(OnePair(kFold, "POST_ROPE"), ",",
                    LowRank(kStill, kFold, "NO_ROPE")),
       Full("NO_ROPE")},
      {"NeoxPairsCodes",
       absl::StrCat(
           OnePair(kAtRuntime, "POST_ROPE", TokenCodes("4", online)), ",",
           LowRank(kStill, kAtRuntime, "NO_ROPE", TokenCodes("8", online))),
       Full("NO_ROPE", TokenCodes("4", online)), true},
      {"NeoxPairsUnrotated",
       absl::StrCat(OnePair(kAtRuntime, "PRE_ROPE"), ",",
                    LowRank(kStill, kReconstruct, "NO_ROPE")),
       Full("NO_ROPE")},
      {"NeoxCommuting",
       absl::StrCat(ComplexOfTwoPairs(kAtRuntime), ",",
                    LowRank(kStill, kFold, "NO_ROPE")),
       LowRank(kTwo, kAtRuntime, "NO_ROPE")},
      {"NeoxCommutingFolded",
       absl::StrCat(ComplexOfTwoPairs(kFold), ",",
                    LowRank(kStill, kAtRuntime, "NO_ROPE")),
       Full("NO_ROPE")},
      {"NeoxBasisCodes", Full("PRE_ROPE", BasisCodes("8,4,4,3,2,1,0,0"), kMean),
       Full("NO_ROPE", BasisCodes("8,8,4,4,2,2,0,0"), kMean), true},
      {"NeoxRotatedBasis",
       Full("POST_ROPE", R"({"dtype":"$","basis_static":{}})", kMean),
       LowRank(kTwo, kAtRuntime, "NO_ROPE", kTyped, kMean)},
      {"NeoxChannels", Full("POST_ROPE", Codes("4", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("8", R"("channel_static":{})")), true},
      {"NeoxWholeUnrotated", Full("PRE_ROPE"), Full("NO_ROPE")},
      {"NeoxSinks",
       absl::StrCat(
           OnePair(kAtRuntime, "POST_ROPE", TokenCodes("4", online)), ",",
           LowRank(kStill, kAtRuntime, "NO_ROPE", TokenCodes("8", online))),
       LowRank(kTwo, kAtRuntime, "NO_ROPE", TokenCodes("4")), true, 6, 3, 4},
      JointCase("NeoxKeyAndValue", kTwo, "PRE_ROPE", kTyped, 0, kMean),
      JointCase("NeoxKeyAndValueCodes", kAll, "PRE_ROPE",
                TokenCodes("4", fused), 9),
  };
}

std::vector<PlanCase> OptPlanCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string online = R"(,"hadamard_online":{})";
  return {
      {"OptPalu", LowRank(kTwo, kReconstruct, "NO_ROPE"),
       LowRank(kTwo, kFold, "NO_ROPE")},
      {"OptFolded", LowRank(kTwo, kFold, "NO_ROPE"),
       LowRank(kTwo, kAtRuntime, "NO_ROPE")},
      {"OptCodes",
       LowRank(kAll, kAtRuntime, "NO_ROPE", TokenCodes("4", online)),
       Full("NO_ROPE", TokenCodes("4", online)), true},
      {"OptReconstructedCodes",
       LowRank(kAll, kReconstruct, "NO_ROPE", TokenCodes("4", online)),
       LowRank(kAll, kFold, "NO_ROPE", TokenCodes("2")), true},
      {"OptBasis", Full("NO_ROPE", R"({"dtype":"$","basis_static":{}})", kMean),
       Full("NO_ROPE", R"({"dtype":"$","basis_static":{}})", kMean)},
      {"OptBasisCodes", Full("NO_ROPE", BasisCodes("8,4,4,3,2,1,0,0"), kMean),
       Full("NO_ROPE", BasisCodes("8,8,4,4,2,2,0,0"), kMean), true},
      {"OptChannels", Full("NO_ROPE", Codes("4", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("8", R"("channel_static":{})")), true},
      {"OptSinks",
       LowRank(kAll, kReconstruct, "NO_ROPE", TokenCodes("4", online)),
       Full("NO_ROPE", Codes("4", R"("channel_static":{})")), true, 0, 5, 2},
      JointCase("OptKeyAndValue", kTwo, "NO_ROPE", kTyped),
      JointCase("OptKeyAndValueCodes", kAll, "NO_ROPE",
                TokenCodes("4", online)),
      {.name = "OptKeyAndValueAbsorbed",
       .joint = LowRank(kTwo,
                        R"("at_runtime":{},"serves":"SERVES_KEY"},)"
                        R"({"fold":{},"serves":"SERVES_VALUE")",
                        "NO_ROPE")},
  };
}

// For a model with QK-norm, every plan has full-rank keys.
std::vector<PlanCase> QkNormPlanCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string online = R"(,"hadamard_online":{})";
  const std::string basis = R"({"dtype":"$","basis_static":{}})";
  return {
      {"QkNormDense", Full("POST_ROPE"), Full("NO_ROPE")},
      {"QkNormRotated", Full("POST_ROPE", TokenCodes("4", online)),
       Full("NO_ROPE", TokenCodes("4", online)), true},
      {"QkNormRotatedSinks", Full("POST_ROPE", TokenCodes("3", online)),
       Full("NO_ROPE", TokenCodes("8", online)), true, 6, 3, 4},
      {"QkNormBasis", Full("POST_ROPE", basis, kMean),
       LowRank(kTwo, kAtRuntime, "NO_ROPE", kTyped, kMean)},
      {"QkNormBasisCodes",
       Full("PRE_ROPE", BasisCodes("8,4,4,3,2,1,0,0"), kMean),
       Full("NO_ROPE", BasisCodes("8,8,4,4,2,2,0,0"), kMean), true},
      {"QkNormChannels",
       Full("POST_ROPE", Codes("4", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("8", R"("channel_static":{})")), true},
      {"QkNormUnrotated", Full("PRE_ROPE"), LowRank(kTwo, kFold, "NO_ROPE")},
  };
}

// Codes that leave out the bias of keys: with and without exact rows, for keys
// stored before RoPE, with RoPE on half of each head, and without RoPE.
std::vector<FamilyCase> BiasCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string levels =
      Codes("2", R"("per_token_norm":{"levels":[-1.5,-0.45,0.45,1.5]},)"
                 R"("param_dtype":"F16","hadamard_online":{})");
  return {
      {TinyBiasedShape(),
       {"BiasLevels", Full("POST_ROPE", levels), Full("NO_ROPE", levels), true,
        9, 9, 3}},
      {TinyBiasedShape(),
       {"BiasCodes", Full("POST_ROPE", TokenCodes("8")),
        Full("NO_ROPE", TokenCodes("8")), true}},
      {TinyBiasedShape(),
       {"BiasUnrotatedCodes", Full("PRE_ROPE", TokenCodes("4")),
        Full("NO_ROPE", TokenCodes("4")), true, 5, 0, 2}},
      {TinyNeoxShape(),
       {"BiasOfHalfRotatedHeads", Full("POST_ROPE", TokenCodes("4")),
        Full("NO_ROPE", TokenCodes("4")), true}},
      {TinyOptShape(),
       {"BiasWithoutRotation", Full("NO_ROPE", levels),
        Full("NO_ROPE", TokenCodes("4")), true, 4, 4}},
  };
}

}  // namespace

std::vector<FamilyCase> FamilyCases(int64_t sliding_window) {
  std::vector<FamilyCase> cases;
  for (PlanCase& each : NeoxPlanCases()) {
    cases.push_back({TinyNeoxShape(), std::move(each)});
  }
  for (PlanCase& each : OptPlanCases()) {
    cases.push_back({TinyOptShape(), std::move(each)});
  }
  for (PlanCase& each : QkNormPlanCases()) {
    if (each.name == "QkNormRotated") {
      cases.push_back({TinyQwen3MoeShape(), each});
      cases.back().plan_case.name += "WithExperts";
    }
    cases.push_back({TinyQwen3Shape(), std::move(each)});
  }
  for (FamilyCase& each : BiasCases()) cases.push_back(std::move(each));
  for (PlanCase& each : PlanCases()) {
    for (const char* name :
         {"PaluJointCodes", "PairsCodes", "CommutingUnrotated", "BasisCodes",
          "SinksKeysOfParts", "KeyAndValueCodes"}) {
      if (each.name != name) continue;
      cases.push_back({TinyWindowShape(sliding_window), each});
      cases.back().plan_case.name += "WithAWindow";
    }
    if (each.name == "PaluJointCodes" || each.name == "BasisCodes") {
      cases.push_back({TinyMixtralShape(), each});
      cases.back().plan_case.name += "WithExperts";
    }
  }
  return cases;
}

}  // namespace kvasir::worker
