#include "worker/testing/eviction_cases.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::worker {

using namespace plan_cases;  // NOLINT: for the helpers that make plans

std::string Eviction(const std::string& rest, const std::string& budget) {
  return absl::StrCat("{", budget,
                      R"(,"sinks":3,"recent":9,"every_tokens":6,"lambda":0.5,)"
                      R"("positions":"ORIGINAL")",
                      rest, "}");
}

std::vector<FamilyCase> EvictionCases() {
  const std::string four = TokenCodes("4");
  std::vector<FamilyCase> cases;
  const auto add = [&](PlanCase plan_case, const std::string& eviction,
                       const model::ModelShape& shape = TinyShape()) {
    plan_case.eviction = eviction;
    cases.push_back({shape, std::move(plan_case)});
  };
  const std::string q_hitter = Eviction("");
  add({"Dense", Full("POST_ROPE"), Full("NO_ROPE")}, q_hitter);
  add({"OwnUnits", Full("POST_ROPE", four), Full("NO_ROPE", four)},
      Eviction(R"(,"units":[{"heads":[0]},{"heads":[1,3]},{"heads":[2]}])"));
  add({"Codes", Full("POST_ROPE", four), Full("NO_ROPE", TokenCodes("2"))},
      Eviction(R"(,"decay":0.5,"half_friendliness":true)"));
  add({.name = "ExactRows",
       .key = Full("POST_ROPE", four),
       .value = Full("NO_ROPE", four),
       .key_exact = 9,
       .value_exact = 5,
       .sinks = 2},
      q_hitter);
  add({.name = "FirstLayerWhole",
       .key = Full("POST_ROPE", four),
       .value = Full("NO_ROPE", four),
       .key_exact = 7,
       .value_exact = 7,
       .sinks = 3,
       .first_whole = true},
      q_hitter);
  add({"Share", Full("POST_ROPE", four), Full("NO_ROPE", four)},
      Eviction("", R"("budget_ratio":0.3)"));
  add({"ObservationWindow", Full("POST_ROPE", four), Full("NO_ROPE", four)},
      Eviction(R"(,"observation_window":3)"));
  add({"Streaming", Full("POST_ROPE", four), Full("NO_ROPE", four)},
      Eviction(R"(,"others":"LATEST")"));
  add({"RebuiltKeys", LowRank(kTwo, kReconstruct, "PRE_ROPE", four),
       LowRank(kTwo, kFold, "NO_ROPE", four)},
      q_hitter);
  add({"RebuiltKeysThatRoll", LowRank(kTwo, kReconstruct, "PRE_ROPE", four),
       LowRank(kTwo, kFold, "NO_ROPE", four)},
      Eviction(R"(,"positions":"ROLLING")"));
  add({"WholeKeysThatRoll", Full("PRE_ROPE", four), Full("NO_ROPE", four)},
      Eviction(R"(,"positions":"ROLLING")"));
  add({"Pairs", OnePair(kAtRuntime, "POST_ROPE", four), Full("NO_ROPE", four)},
      q_hitter);
  add(JointCase("Joint", kTwo, "PRE_ROPE", four, 6, "", 2), q_hitter);
  add({.name = "Bias",
       .key = Full("POST_ROPE", four),
       .value = Full("NO_ROPE", four),
       .key_exact = 5,
       .value_exact = 5,
       .sinks = 2},
      Eviction(R"(,"units":[{"heads":[0]},{"heads":[1,3]},{"heads":[2]}])"),
      TinyBiasedShape());
  add({"BiasOfKeysThatRoll", Full("PRE_ROPE", four), Full("NO_ROPE", four)},
      Eviction(R"(,"positions":"ROLLING")"), TinyBiasedShape());
  add({"Neox", Full("POST_ROPE", four), Full("NO_ROPE", four)}, q_hitter,
      TinyNeoxShape());
  add({"Opt", Full("NO_ROPE", four), Full("NO_ROPE", four)}, q_hitter,
      TinyOptShape());
  return cases;
}

}  // namespace kvasir::worker
