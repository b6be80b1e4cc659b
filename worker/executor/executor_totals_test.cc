// Tests an executor's counters (ExecutorTotals) and the size of its workspace,
// under every plan.
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_matchers.h"
#include "worker/offline/direct_runner.h"
#include "worker/program/attention_flops.h"
#include "worker/testing/plan_cases.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kPromptTokens = 40;

// Returns options without prompt lifts (worker/program/prompt_lift.h), because
// prompt_lift_test counts the work of lifts.
RankOptions Absorbing() {
  RankOptions options = TinyOptions();
  options.deterministic = true;
  return options;
}

class ExecutorTotalsTest : public ::testing::TestWithParam<PlanCase> {
 public:
  // Runs a prompt in chunks, then decodes two tokens.
  static void Run(Rank& rank, int64_t chunk) {
    DirectRunner runner(&rank.executor(), &rank.layout(), rank.pages());
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < kPromptTokens; ++i) ids.push_back(i * 37 % 1237);
    DirectStep step = {.sequence_id = 1, .sample = GreedySample()};
    for (int64_t done = 0; done < kPromptTokens; done += chunk) {
      step.token_ids = absl::MakeConstSpan(ids).subspan(
          static_cast<size_t>(done), static_cast<size_t>(chunk));
      KVASIR_ASSERT_OK(runner.Run({step}).status());
    }
    step.token_ids = {};
    KVASIR_ASSERT_OK(runner.Run({step}).status());
    KVASIR_ASSERT_OK(runner.Run({step}).status());
  }
};

// The prompt's 40 tokens fit into one tile of queries, so attention reads every
// cached slot once for each chunk.
TEST_P(ExecutorTotalsTest,
       ReconstructionFlopsAreCountedForEverySlotThatAStepReads) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                              MakePlannedRank(GetParam(), Absorbing()));
  int64_t per_slot = 0;
  for (int64_t l = 0; l < rank->plan().num_layers(); ++l) {
    per_slot += FlopsPerSlot(rank->plan(), l, plan::Side::kKey).reconstruction;
  }
  Run(*rank, 10);
  EXPECT_EQ(rank->executor().totals().reconstruction_flops,
            static_cast<double>(per_slot * (10 + 20 + 30 + 40 + 41 + 42)));
}

TEST_P(ExecutorTotalsTest,
       CountersOfCodesWithStaticRangesDoNotDependOnTheChunkSize) {
  ExecutorTotals totals[2];
  int64_t per_token = 0;
  for (const int64_t chunk : {1, 20}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                MakePlannedRank(GetParam(), Absorbing()));
    Run(*rank, chunk);
    totals[chunk / 20] = rank->executor().totals();
    per_token = 0;
    for (int64_t l = 0; l < rank->plan().num_layers(); ++l) {
      for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
        const plan::ResolvedPart& part =
            rank->plan().attention_of(l).side(side).parts[0];
        if (part.range == plan::RangeKind::kChannel && part.stores_latents()) {
          per_token += part.channels();
        }
      }
    }
  }
  EXPECT_EQ(totals[0].static_codes, per_token * (kPromptTokens + 2));
  EXPECT_EQ(totals[1].static_codes, totals[0].static_codes);
  EXPECT_EQ(totals[1].clamped_codes, totals[0].clamped_codes);
  if (per_token == 0) {
    EXPECT_EQ(totals[0].clamped_codes, 0);
  }
  // Only the ranges of the case "Channels" are so narrow that they clamp codes.
  if (GetParam().name == "Channels") {
    EXPECT_GT(totals[0].clamped_codes, 0);
  }
  EXPECT_LE(totals[0].clamped_codes, totals[0].static_codes);
}

TEST_P(ExecutorTotalsTest, TheWorkspaceIsAsLargeFor64KTokensOfContextAsFor1K) {
  model::ModelShape shape = TinyShape();
  shape.max_position = 1 << 16;
  RankOptions options = TinyOptions();
  options.page_tokens = 64;
  options.executor.max_num_seqs = 2;
  options.pages = {(1 << 10) + 8};  // 1024 token pages and up to 8 side pages
  int64_t bytes[2];
  for (const int64_t more : {0, 1}) {
    options.executor.max_model_len = 1 << (10 + 6 * more);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const auto rank,
        MakePlannedRank(GetParam(), options, nullptr, "BF16", shape));
    bytes[more] = rank->allocator().use(kernels::MemoryTag::kWorkspace).bytes;
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

// Evictions run after the prompt and after 42 tokens. With an observation
// window of 3, only the prompt's last 3 queries add to scores.
TEST(EvictionTotalsTest, ScoredTokensAreCountedByHowTheyWereScored) {
  struct Case {
    const char* rest;
    int64_t by_weights;
    int64_t again;
  };
  for (const Case& each :
       {Case{"", 4, kPromptTokens}, Case{R"(,"observation_window":3)", 4, 3},
        Case{R"(,"others":"LATEST")", 0, 0}}) {
    const PlanCase plan_case = {
        .name = "Evicts",
        .key = plan_cases::Full("POST_ROPE"),
        .value = plan_cases::Full("NO_ROPE"),
        .first_whole = true,
        .eviction = absl::StrCat(
            R"({"budget":40,"sinks":2,"recent":4,"every_tokens":42,)"
            R"("lambda":1,"positions":"ORIGINAL")",
            each.rest, "}")};
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                MakePlannedRank(plan_case, Absorbing()));
    DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
    const ExecutorTotals& totals = rank->executor().totals();
    std::vector<int32_t> ids(kPromptTokens, 7);
    runner.SetPrompt(1, kPromptTokens);
    for (int64_t done = 0; done < kPromptTokens; done += 20) {
      KVASIR_ASSERT_OK(runner
                           .Run({{.sequence_id = 1,
                                  .token_ids = absl::MakeConstSpan(ids).subspan(
                                      static_cast<size_t>(done), 20),
                                  .sample = GreedySample()}})
                           .status());
    }
    for (int token = 0; token < 4; ++token) {
      EXPECT_EQ(totals.eviction_seconds > 0, token > 2);
      KVASIR_ASSERT_OK(
          runner.Run({{.sequence_id = 1, .sample = GreedySample()}}).status());
    }
    EXPECT_EQ(totals.scored_by_weights, each.by_weights) << each.rest;
    EXPECT_EQ(totals.scored_again, each.again) << each.rest;
    EXPECT_EQ(totals.scored_without_room, 0) << each.rest;
  }
}

TEST(ExpertTotalsTest, ATokenIsCountedForEachOfItsExpertsWhateverTheChunkSize) {
  const model::ModelShape shape = TinyMixtralShape();
  std::vector<std::vector<int64_t>> counts;
  for (const int64_t chunk : {1, 8, 40}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                                MakeTinyRank(Absorbing(), nullptr, shape));
    EXPECT_EQ(rank->executor().totals().expert_tokens,
              std::vector<int64_t>(static_cast<size_t>(shape.num_experts)));
    ExecutorTotalsTest::Run(*rank, chunk);
    counts.push_back(rank->executor().totals().expert_tokens);
  }
  EXPECT_EQ(std::accumulate(counts[0].begin(), counts[0].end(), int64_t{0}),
            (kPromptTokens + 2) * shape.experts_per_token * shape.num_layers);
  EXPECT_EQ(counts[1], counts[0]);
  EXPECT_EQ(counts[2], counts[0]);
}

// The executor's matrices have all experts, and a token reads two of five in
// each layer.
TEST(ExpertTotalsTest, ATokenReadsOnlyTheWeightsOfItsExperts) {
  const model::ModelShape shape = TinyMixtralShape();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto rank,
                              MakeTinyRank(Absorbing(), nullptr, shape));
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  constexpr int32_t kId = 3;
  KVASIR_ASSERT_OK(runner
                       .Run({{.sequence_id = 1,
                              .token_ids = absl::MakeConstSpan(&kId, 1),
                              .sample = GreedySample()}})
                       .status());
  const int64_t before = rank->stream().weight_bytes_read();
  KVASIR_ASSERT_OK(
      runner.Run({{.sequence_id = 1, .sample = GreedySample()}}).status());
  // Columns are padded to multiples of 32.
  const int64_t expert_bytes = (32 * 64 + 24 * 32) * 2;
  EXPECT_EQ(
      rank->stream().weight_bytes_read() - before,
      rank->executor().matrix_bytes() - shape.num_layers * 3 * expert_bytes);
}

INSTANTIATE_TEST_SUITE_P(Methods, ExecutorTotalsTest,
                         ::testing::ValuesIn(PlanCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

}  // namespace
}  // namespace kvasir::worker
