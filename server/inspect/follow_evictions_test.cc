#include "server/inspect/follow_evictions.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "nlohmann/json.hpp"
#include "worker/offline/direct_runner.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;
using worker::plan_cases::Full;

constexpr int64_t kPrompt = 61;
constexpr int64_t kOutput = 14;

std::unique_ptr<worker::Rank> RankThatEvicts(const std::string& rest,
                                             const char* stored = "POST_ROPE") {
  const worker::PlanCase plan_case = {
      .name = "Evicts",
      .key = Full(stored),
      .value = Full("NO_ROPE"),
      .eviction = absl::StrCat(
          R"({"budget":21,"sinks":3,"recent":9,"every_tokens":6,"lambda":1)",
          rest, "}")};
  auto rank = worker::MakePlannedRank(plan_case, worker::TinyOptions());
  KVASIR_EXPECT_OK(rank);
  return *std::move(rank);
}

EvictionTrace Follow(worker::Rank& rank, int64_t chunk = 64) {
  std::vector<int32_t> prompt;
  for (int32_t t = 0; t < kPrompt; ++t) prompt.push_back(t * 37 % 1237);
  auto trace =
      FollowEvictions(&rank, prompt,
                      {.output_tokens = kOutput,
                       .chunk_tokens = chunk,
                       .text_of = [](int32_t id) { return absl::StrCat(id); }});
  KVASIR_EXPECT_OK(trace);
  return *std::move(trace);
}

// Returns the tokens that a unit still has after the eviction at `seen` tokens.
std::vector<int64_t> KeptAt(const EvictionTrace::Unit& unit, int64_t seen) {
  std::vector<int64_t> kept;
  for (int64_t token = 0; token < seen; ++token) {
    const int64_t gone_at = unit.gone_at[static_cast<size_t>(token)];
    if (gone_at == 0 || gone_at > seen) kept.push_back(token);
  }
  return kept;
}

TEST(FollowEvictionsTest, TheStreamingMethodKeepsSinksAndTheLatestTokens) {
  for (const auto& [positions, stored] :
       {std::pair{"ORIGINAL", "POST_ROPE"}, {"ROLLING", "PRE_ROPE"}}) {
    const auto rank = RankThatEvicts(
        absl::StrCat(R"(,"others":"LATEST","positions":")", positions, "\""),
        stored);
    const EvictionTrace trace = Follow(*rank);
    ASSERT_EQ(trace.layers().size(), 2u);
    for (const EvictionTrace::Layer& layer : trace.layers()) {
      // When the text is longer than the budget of 21 tokens, tokens are
      // evicted at every multiple of 6 and at the prompt's end (61). The text
      // ends at 75 tokens.
      EXPECT_EQ(layer.points,
                (std::vector<int64_t>{24, 30, 36, 42, 48, 54, 60, 61, 66, 72}));
      for (const int64_t seen : layer.points) {
        std::vector<int64_t> want = {0, 1, 2};
        for (int64_t t = seen - 18; t < seen; ++t) want.push_back(t);
        for (const EvictionTrace::Unit& unit : layer.units) {
          EXPECT_EQ(KeptAt(unit, seen), want) << positions << ' ' << seen;
        }
      }
    }
  }
}

TEST(FollowEvictionsTest,
     OnlyTheTokensBetweenSinksAndRecentOnesDifferBetweenUnits) {
  const std::string units =
      R"(,"positions":"ORIGINAL","units":[{"heads":[0]},{"heads":[1,2,3]}])";
  const EvictionTrace trace = Follow(*RankThatEvicts(units));
  bool differ = false;
  for (const EvictionTrace::Layer& layer : trace.layers()) {
    ASSERT_EQ(layer.units.size(), 2u);
    for (const int64_t seen : layer.points) {
      for (const EvictionTrace::Unit& unit : layer.units) {
        const std::vector<int64_t> kept = KeptAt(unit, seen);
        ASSERT_EQ(kept.size(), 21u);
        EXPECT_TRUE(std::equal(kept.begin(), kept.begin() + 3,
                               std::vector<int64_t>{0, 1, 2}.begin()));
        EXPECT_EQ(kept[21 - 9], seen - 9);
      }
      differ |= KeptAt(layer.units[0], seen) != KeptAt(layer.units[1], seen);
    }
  }
  EXPECT_TRUE(differ);
}

TEST(FollowEvictionsTest,
     TheEvictionTraceDoesNotDependOnTheSizeOfPrefillChunks) {
  const std::string rest = R"(,"positions":"ORIGINAL")";
  EXPECT_EQ(Follow(*RankThatEvicts(rest), 5).ToJson(),
            Follow(*RankThatEvicts(rest), 64).ToJson());
}

TEST(FollowEvictionsTest, TracingAnEmptyTextOrAPlanWithoutEvictionIsRefused) {
  const auto rank = RankThatEvicts(R"(,"positions":"ORIGINAL")");
  EXPECT_THAT(
      FollowEvictions(rank.get(), {}, {}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("the text whose evictions are traced has no tokens")));
  worker::ModelExecutor& executor = rank->executor();
  EXPECT_THAT(executor.ReadPositions(2, {}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 2 does not exist: there are 2 "
                                 "layers")));
  EXPECT_THAT(
      executor.ReadPositions(0, {0}, 17),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("asked for 17 slots, but gave 1 pages of 16")));
  EXPECT_THAT(executor.ReadPositions(0, {100000}, 1),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("page 100000 of group 0 is outside")));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto whole,
                              worker::MakeTinyRank(worker::TinyOptions()));
  EXPECT_THAT(whole->executor().ReadPositions(0, {}, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("layer 0 evicts nothing, so it stores no "
                                 "positions")));
}

}  // namespace
}  // namespace kvasir::cli
