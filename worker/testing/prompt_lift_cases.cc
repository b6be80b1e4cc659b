#include "worker/testing/prompt_lift_cases.h"

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

std::vector<FamilyCase> PromptLiftCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string commuting =
      R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],"pairs":[0,1,2,3],)"
      R"("rank_per_pair":[3,1,2,1]}]},"uses":[{"at_runtime":{}}],)"
      R"("stored":"POST_ROPE","codec":{"dtype":"$"}})";
  const std::string basis = R"({"dtype":"$","basis_static":{}})";
  const std::string full = Full("POST_ROPE");
  const std::string joint = LowRank(kAll, kAtRuntime, "NO_ROPE");
  // Value parts with head groups of different ranks. The heads in the groups
  // are not in ascending order.
  const std::string unlike =
      LowRank(R"({"heads":[3,1],"rank":16},{"heads":[0,2],"rank":12})",
              kAtRuntime, "NO_ROPE", kTyped, kMean);
  std::vector<FamilyCase> cases = {
      {TinyShape(), {"JointValues", full, joint}},
      {TinyShape(),
       {"UnlikeValues", LowRank(kTwo, kReconstruct, "PRE_ROPE"), unlike}},
      {TinyShape(),
       {"ValueCodes", full,
        LowRank(kAll, kAtRuntime, "NO_ROPE", TokenCodes("4,3,2,8,4,4,0,1")),
        true}},
      {TinyShape(),
       {"ExactValues", full,
        LowRank(kAll, kAtRuntime, "NO_ROPE", TokenCodes("8")), true, 0, 11}},
      {TinyShape(),
       {"SinksValues", full,
        LowRank(kAll, kAtRuntime, "NO_ROPE", TokenCodes("8")), true, 0, 4, 5}},
      {TinyShape(), {"BasisValues", full, Full("NO_ROPE", basis, kMean)}},
      {TinyShape(),
       {"BasisKeys", Full("POST_ROPE", basis, kMean), Full("NO_ROPE")}},
      {TinyShape(),
       {"BasisCodes", Full("POST_ROPE", BasisCodes("8,8,8,4,4,4,3,0")),
        Full("NO_ROPE", BasisCodes("8,8,4,4,2,2,0,0")), true}},
      {TinyShape(), {"CommutingKeys", commuting, Full("NO_ROPE")}},
      {TinyShape(), {"CommutingKeysAndJointValues", commuting, joint}},
      {TinyOptShape(), {"KeysThatDoNotTurn", joint, joint}},
      {TinyNeoxShape(),
       {"KeysOfParts",
        absl::StrCat(
            OnePair(kAtRuntime, "POST_ROPE"), ",",
            LowRank(R"({"heads":[0,1,2,3],"rank":14})", kAtRuntime, "NO_ROPE")),
        joint}},
      {TinyWindowShape(24), {"JointValuesWithAWindow", full, joint}},
  };
  return cases;
}

}  // namespace kvasir::worker
