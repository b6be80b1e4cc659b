#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "worker/executor/direct_runner.h"
#include "worker/ranks/in_process_group.h"
#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {
namespace {

struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<float> logits;
};

// A prompt in chunks and eight decoded tokens; every rank in its own thread.
// `plan_case` null: a full-rank plan.
std::vector<Outcome> RunRanks(int64_t size, const model::ModelShape& shape,
                              const PlanCase* plan_case = nullptr) {
  const auto group = InProcessGroup::Create(size);
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Outcome& outcome = outcomes[static_cast<size_t>(r)];
      RankOptions options = TinyOptions();
      options.executor.logits_tap = [&](const LogitsRow& row) {
        outcome.logits.insert(outcome.logits.end(), row.logits.begin(),
                              row.logits.end());
      };
      Collective* const own = group[static_cast<size_t>(r)].get();
      auto rank = plan_case != nullptr
                      ? MakePlannedRank(*plan_case, options, own, "F32", shape)
                      : MakeTinyRank(options, own, shape, kvasir::v1::F32);
      KVASIR_ASSERT_OK(rank);
      DirectRunner runner(&(*rank)->executor(), &(*rank)->layout(),
                          (*rank)->pages());
      std::vector<int32_t> prompt;
      for (int32_t i = 0; i < 20; ++i) {
        prompt.push_back((11 * i + 3) % static_cast<int32_t>(shape.vocab_size));
      }
      for (int step = 0; step < 9; ++step) {
        DirectStep direct = {.sequence_id = 1};
        if (step == 0) direct.token_ids = absl::MakeSpan(prompt).first(13);
        if (step == 1) direct.token_ids = absl::MakeSpan(prompt).subspan(13);
        if (step > 0) direct.sample = GreedySample();
        auto result = runner.Run(absl::MakeConstSpan(&direct, 1));
        KVASIR_ASSERT_OK(result);
        if (step > 0) {
          outcome.tokens.push_back(result->sequences(0).token_id());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// Ranks together do what one does, up to the order of the sums. Of codes a last
// bit may be another code: only the ranks of a group are compared.
void ExpectSameAsOne(const model::ModelShape& shape,
                     std::initializer_list<int64_t> sizes,
                     const PlanCase* plan_case = nullptr) {
  const Outcome one = RunRanks(1, shape, plan_case)[0];
  float largest = 0;
  for (const float logit : one.logits) {
    largest = std::max(largest, std::abs(logit));
  }
  for (const int64_t size : sizes) {
    const std::vector<Outcome> outcomes = RunRanks(size, shape, plan_case);
    const std::vector<Outcome> again = RunRanks(size, shape, plan_case);
    ASSERT_EQ(outcomes[0].logits.size(), one.logits.size());
    for (size_t r = 0; r < outcomes.size(); ++r) {
      // The same bits on every rank and in every run.
      EXPECT_EQ(outcomes[r].tokens, outcomes[0].tokens) << size << " ranks";
      EXPECT_EQ(outcomes[r].logits, outcomes[0].logits) << size << " ranks";
      EXPECT_EQ(again[r].logits, outcomes[0].logits) << size << " ranks";
    }
    if (plan_case != nullptr && plan_case->codes) continue;
    EXPECT_EQ(outcomes[0].tokens, one.tokens) << size << " ranks";
    for (size_t i = 0; i < one.logits.size(); ++i) {
      ASSERT_NEAR(outcomes[0].logits[i], one.logits[i], 1e-5f * largest);
    }
  }
}

TEST(TensorParallelTest, RanksTogetherDoWhatOneDoes) {
  ExpectSameAsOne(TinyShape(), {2, 4, 8});
}

// A rank that has no id of the head and the embedding, and one of part of a
// panel.
TEST(TensorParallelTest, RanksTogetherDoWhatOneDoesOfFewIds) {
  model::ModelShape shape = TinyShape();
  shape.vocab_size = 40;
  ExpectSameAsOne(shape, {2, 4, 8});
  shape.tied_embedding = true;
  ExpectSameAsOne(shape, {2, 4});
}

// Of each rank, log probabilities of given tokens and of those it samples, with
// room for some of the logits only: of targets a block of the vocabulary at a
// time, of samples a row.
std::vector<std::vector<float>> LogprobsOf(int64_t size) {
  constexpr int64_t kTokens = 24;
  const auto group = InProcessGroup::Create(size);
  std::vector<std::vector<float>> logprobs(group.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      RankOptions options = TinyOptions();
      options.executor.logits_bytes = 1;
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const auto rank,
          MakeTinyRank(options, group[r].get(), TinyShape(), kvasir::v1::F32));
      DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
      std::vector<int32_t> ids;
      std::vector<int32_t> targets;
      for (int32_t i = 0; i < kTokens; ++i) {
        ids.push_back(i * 53 % 1237);
        targets.push_back((i * 97 + 1200) % 1237);
      }
      auto scored = runner.Run(
          {{.sequence_id = 1, .token_ids = ids, .target_ids = targets}});
      KVASIR_ASSERT_OK(scored);
      const auto& own = scored->sequences(0).target_logprobs();
      ASSERT_EQ(own.size(), kTokens);
      logprobs[r].assign(own.begin(), own.end());
      std::vector<DirectStep> steps;
      for (uint64_t id = 2; id < 6; ++id) {
        steps.push_back({.sequence_id = id,
                         .token_ids = absl::MakeSpan(ids).first(id),
                         .sample = GreedySample()});
        steps.back().sample->set_num_logprobs(3);
      }
      auto sampled = runner.Run(steps);
      KVASIR_ASSERT_OK(sampled);
      for (const auto& sequence : sampled->sequences()) {
        logprobs[r].push_back(static_cast<float>(sequence.token_id()));
        logprobs[r].push_back(sequence.logprob());
        for (const auto& top : sequence.top()) {
          logprobs[r].push_back(static_cast<float>(top.token_id()));
          logprobs[r].push_back(top.logprob());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return logprobs;
}

TEST(TensorParallelTest, RanksGiveTheLogprobsOfOne) {
  const std::vector<float> one = LogprobsOf(1)[0];
  ASSERT_EQ(one.size(), 24 + 4 * (2 + 3 * 2));
  for (const int64_t size : {2, 4, 8}) {
    const std::vector<std::vector<float>> ranks = LogprobsOf(size);
    for (const std::vector<float>& rank : ranks) {
      EXPECT_EQ(rank, ranks[0]) << size << " ranks";
    }
    EXPECT_THAT(ranks[0],
                ::testing::Pointwise(::testing::FloatNear(1e-4f), one))
        << size << " ranks";
  }
}

// Positions of the slots that each unit of each layer keeps of a text of 60
// tokens [2, 4, kept]: the ranks' units one behind the other.
std::vector<std::vector<uint32_t>> KeptBy(int64_t size,
                                          const PlanCase& plan_case) {
  constexpr int64_t kTokens = 60;
  constexpr int64_t kPrompt = 33;
  const auto group = InProcessGroup::Create(size);
  std::vector<std::vector<std::vector<uint32_t>>> of_ranks(group.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const auto rank,
          MakePlannedRank(plan_case, TinyOptions(), group[r].get(), "F32"));
      DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
      runner.SetPrompt(1, kPrompt);
      for (int64_t done = 0; done < kTokens;) {
        const int64_t count =
            done >= kPrompt
                ? 1
                : std::min(kPrompt, runner.next_eviction(1).value_or(kPrompt)) -
                      done;
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < count; ++i) {
          ids.push_back(static_cast<int32_t>((done + i) * 37 % 1237));
        }
        KVASIR_ASSERT_OK(runner
                             .Run({{.sequence_id = 1,
                                    .token_ids = ids,
                                    .output = done >= kPrompt}})
                             .status());
        done += count;
      }
      const DirectRunner::Slots slots = runner.slots(1, 0);
      for (int64_t layer = 0; layer < 2; ++layer) {
        KVASIR_ASSERT_OK_AND_ASSIGN(of_ranks[r].emplace_back(),
                                    rank->executor().ReadPositions(
                                        layer, slots.pages, slots.kept_slots));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::vector<uint32_t>> kept(2);
  for (const auto& of_rank : of_ranks) {
    for (size_t layer = 0; layer < of_rank.size(); ++layer) {
      kept[layer].insert(kept[layer].end(), of_rank[layer].begin(),
                         of_rank[layer].end());
    }
  }
  return kept;
}

// A rank scores its units by its own heads alone; what other ranks do reaches
// it through sums that differ in their last bits.
TEST(TensorParallelTest, RanksKeepTheTokensThatOneKeeps) {
  PlanCase plan_case = {"Evicts", plan_cases::Full("POST_ROPE"),
                        plan_cases::Full("NO_ROPE")};
  const std::map<size_t, std::string> units_of = {
      {4, R"([{"heads":[0]},{"heads":[1]},{"heads":[2]},{"heads":[3]}])"},
      {2, R"([{"heads":[0,1]},{"heads":[2,3]}])"}};
  for (const auto& [num_units, units] : units_of) {
    plan_case.eviction = absl::StrCat(
        R"({"budget":12,"sinks":2,"recent":4,"every_tokens":6,"lambda":1,)"
        R"("decay":0.1,"positions":"ORIGINAL","units":)",
        units, "}");
    const std::vector<std::vector<uint32_t>> one = KeptBy(1, plan_case);
    for (const std::vector<uint32_t>& layer : one) {
      ASSERT_EQ(layer.size(), num_units * 12);
      // Not the latest ones alone, and each unit its own.
      EXPECT_LT(layer[3], 40u);
      EXPECT_FALSE(
          std::equal(layer.begin(), layer.begin() + 12, layer.begin() + 12));
    }
    for (size_t size = 2; size <= num_units; size *= 2) {
      EXPECT_EQ(KeptBy(static_cast<int64_t>(size), plan_case), one)
          << size << " ranks";
    }
  }
}

// Two sums a layer into one stream, each with a bias that rank 0 adds.
TEST(TensorParallelTest, RanksTogetherDoWhatOneDoesInLayerNormFamilies) {
  ExpectSameAsOne(TinyNeoxShape(), {2, 4});
  ExpectSameAsOne(TinyOptShape(), {2, 4});
}

TEST(TensorParallelTest, RanksTogetherDoWhatOneDoesUnderEveryPlan) {
  for (const PlanCase& plan_case : PlanCases()) {
    SCOPED_TRACE(plan_case.name);
    ExpectSameAsOne(TinyShape(), {2, 8}, &plan_case);
  }
}

TEST(TensorParallelTest, AndUnderPlansOfOtherFamilies) {
  constexpr int64_t kWindow = 7;
  for (const FamilyCase& each : FamilyCases(kWindow)) {
    SCOPED_TRACE(each.plan_case.name);
    ExpectSameAsOne(each.shape, {2, 4}, &each.plan_case);
  }
}

}  // namespace
}  // namespace kvasir::worker
