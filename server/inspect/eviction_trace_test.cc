#include "server/inspect/eviction_trace.h"

#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/inspect/test_plans.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;
using Positions = std::vector<uint32_t>;

// Returns an empty trace of two layers with two units each. A unit keeps 5
// slots, including 1 sink and 2 recent tokens.
EvictionTrace MakeTrace(const std::string& rest = "") {
  return EvictionTrace(
      *SourceWith(kFullKey, kFullValue,
                  absl::StrCat(R"(,"eviction":{"budget":5,"sinks":1,
                      "recent":2,"lambda":1,"decay":1,"positions":"ORIGINAL",
                      "every_tokens":4,"units":[{"heads":[0,1]},
                      {"heads":[2,3]}])",
                               rest, "}"))
           .plan);
}

EvictionTrace Traced() {
  EvictionTrace trace = MakeTrace();
  KVASIR_EXPECT_OK(trace.Add(0, 8, Positions{0, 2, 5, 6, 7, 0, 1, 3, 6, 7}));
  KVASIR_EXPECT_OK(trace.Add(0, 12,
                             Positions{0, 2, 9, 10, 11,  //
                                       0, 3, 8, 10, 11}));
  trace.SetText(
      {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "<\xff>"},
      12);
  return trace;
}

TEST(EvictionTraceTest, EachEvictionUnitRecordsTheLengthAtWhichItEvictsAToken) {
  const EvictionTrace trace = Traced();
  ASSERT_EQ(trace.layers().size(), 2u);
  const EvictionTrace::Layer& layer = trace.layers()[0];
  ASSERT_EQ(layer.units.size(), 2u);
  EXPECT_EQ(layer.units[1].heads, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(layer.points, (std::vector<int64_t>{8, 12}));
  EXPECT_EQ(layer.units[0].gone_at,
            (std::vector<int64_t>{0, 8, 0, 8, 8, 12, 12, 12, 12, 0, 0, 0, 0}));
  EXPECT_EQ(layer.units[1].gone_at,
            (std::vector<int64_t>{0, 12, 8, 0, 8, 8, 12, 12, 0, 12, 0, 0, 0}));
}

TEST(EvictionTraceTest, TheSummaryAddsUpTheTokensThatEachUnitKeepsAtTheEnd) {
  const EvictionTrace trace = Traced();
  const auto summary = trace.SummaryOf(trace.layers()[0]);
  EXPECT_EQ(summary.seen, 12);
  EXPECT_EQ(summary.kept, 5);
  EXPECT_EQ(summary.sinks, 2);
  EXPECT_EQ(summary.heavy, 4);
  EXPECT_EQ(summary.recent, 4);
  EXPECT_EQ(summary.oldest_heavy, 2);
  EXPECT_THAT(
      trace.ToText(),
      HasSubstr(
          "tokens that stayed, of 12 tokens of the text and 1 of output"));
  EXPECT_THAT(
      trace.ToText(),
      HasSubstr("    0          2       5 of 12       20.0%  40.0%   40.0%"
                "             2      2\n    1          0   all\n"));
}

TEST(EvictionTraceTest, WithoutScoresAllKeptTokensExceptSinksAreRecent) {
  EvictionTrace trace = MakeTrace(R"(,"others":"LATEST")");
  KVASIR_EXPECT_OK(trace.Add(1, 8, Positions{0, 4, 5, 6, 7, 0, 4, 5, 6, 7}));
  trace.SetText(std::vector<std::string>(8, "x"), 8);
  const auto summary = trace.SummaryOf(trace.layers()[1]);
  EXPECT_EQ(summary.recent, 8);
  EXPECT_EQ(summary.heavy, 0);
  EXPECT_FALSE(summary.oldest_heavy.has_value());
}

TEST(EvictionTraceTest, TheJsonOfATraceContainsAllEvictions) {
  // Incomplete UTF-8 characters in tokens are replaced when the JSON
  // is printed.
  const auto json = nlohmann::json::parse(Traced().ToJson().dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  EXPECT_EQ(json["prompt_tokens"], 12);
  EXPECT_EQ(json["tokens"][12], "<\xef\xbf\xbd>");
  EXPECT_EQ(json["layers"][0]["evicted_at"], (std::vector<int>{8, 12}));
  EXPECT_EQ(json["layers"][0]["last"]["heavy"], 4);
  EXPECT_EQ(json["layers"][0]["units"][1]["gone_at"][1], 12);
  EXPECT_TRUE(json["layers"][0]["units"][1]["gone_at"][0].is_null());
  EXPECT_TRUE(json["layers"][1]["last"].is_null());
}

TEST(EvictionTraceTest, TheErrorForAnImpossibleEvictionNamesLayerUnitAndToken) {
  for (const auto& [kept, named] :
       std::vector<std::pair<Positions, const char*>>{
           {{0, 1, 9, 10, 11},
            "token 1 cannot be kept: it must be from 1 to 11"},
           {{0, 9, 2, 10, 11},
            "token 2 cannot be kept: it must be from 10 to 11"},
           {{0, 2, 9, 10, 12},
            "token 12 cannot be kept: it must be from 11 to 11"},
           {{0, 2, 8, 9, 10},
            "of the first 12 tokens, those from 11 on are not kept"}}) {
    EvictionTrace trace = MakeTrace();
    KVASIR_ASSERT_OK(trace.Add(1, 8,
                               Positions{0, 2, 5, 6, 7,  //
                                         0, 2, 5, 6, 7}));
    Positions next = {0, 2, 9, 10, 11};
    next.insert(next.end(), kept.begin(), kept.end());
    EXPECT_THAT(trace.Add(1, 12, next),
                StatusIs(absl::StatusCode::kInternal, HasSubstr(named)));
    EXPECT_THAT(trace.Add(1, 12, next),
                StatusIs(absl::StatusCode::kInternal,
                         HasSubstr("the eviction of layer 1, unit ")));
  }
}

}  // namespace
}  // namespace kvasir::cli
