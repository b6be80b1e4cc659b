#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "worker/collective/in_process_group.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/collective_ranks.h"
#include "worker/testing/family_plan_cases.h"

namespace kvasir::worker {
namespace {

using Group = std::vector<std::unique_ptr<Collective>>;

enum class Over { kThreads, kGloo };

constexpr uint64_t kId = 1;
constexpr int kDecoded = 8;

// How the ranks run the prompt and decode.
struct RunMode {
  // True: the whole prompt runs in one step, and every step also runs another
  // sequence. False: the prompt runs in two chunks.
  bool batched = false;
  // The output tokens to decode. If empty, the sampled tokens are decoded.
  std::vector<int32_t> forced = {};
};

// The result of one rank. `tokens` were sampled after the prompt and after each
// decoded token. `logits` [num_rows(), vocab] has a row for each prompt and
// output token.
struct Outcome {
  size_t vocab = 0;
  std::vector<int32_t> tokens;  // 1 + kDecoded tokens
  std::vector<float> logits;

  size_t num_rows() const { return logits.size() / vocab; }
  absl::Span<const float> Row(size_t row) const {
    return absl::MakeSpan(logits).subspan(row * vocab, vocab);
  }
};

std::vector<int32_t> Prompt(int64_t length, int32_t by,
                            const model::ModelShape& shape) {
  const auto num_ids = static_cast<int32_t>(shape.vocab_size);
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < length; ++i) prompt.push_back((by * i + 3) % num_ids);
  return prompt;
}

Outcome RunRank(Collective* own, const model::ModelShape& shape,
                const PlanCase* plan_case, const RunMode& mode) {
  Outcome outcome;
  outcome.vocab = static_cast<size_t>(shape.vocab_size);
  RankOptions options = TinyOptions();
  options.deterministic = true;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    if (row.sequence_id != kId) return;
    outcome.logits.insert(outcome.logits.end(), row.logits.begin(),
                          row.logits.end());
  };
  auto rank = plan_case != nullptr
                  ? MakePlannedRank(*plan_case, options, own, "F32", shape)
                  : MakeTinyRank(options, own, shape, kvasir::v1::F32);
  KVASIR_EXPECT_OK(rank);
  if (!rank.ok()) return outcome;
  DirectRunner runner(&(*rank)->executor(), &(*rank)->layout(),
                      (*rank)->pages());
  const std::vector<int32_t> prompt = Prompt(20, 11, shape);
  const std::vector<int32_t> other = Prompt(9, 5, shape);
  const auto run = [&](absl::Span<const int32_t> token_ids, bool output) {
    std::vector<DirectStep> steps = {
        {.sequence_id = kId, .token_ids = token_ids, .output = output}};
    const bool samples =
        output || token_ids.end() == prompt.data() + prompt.size();
    if (samples) steps[0].sample = GreedySample();
    if (mode.batched) {
      // The other sequence comes first, because it may be a prompt, and prompts
      // must come before output in a step.
      steps.insert(steps.begin(), {.sequence_id = 7, .sample = GreedySample()});
      if (!output) steps[0].token_ids = other;
    }
    const auto result = runner.Run(steps);
    KVASIR_EXPECT_OK(result);
    if (!result.ok() || !samples) return result.ok();
    for (const auto& sequence : result->sequences()) {
      if (sequence.sequence_id() == kId) {
        outcome.tokens.push_back(sequence.token_id());
      }
    }
    return true;
  };
  const auto whole = absl::MakeSpan(prompt);
  if (!mode.batched && !run(whole.first(13), false)) return outcome;
  if (!run(mode.batched ? whole : whole.subspan(13), false)) return outcome;
  for (size_t i = 0; i < kDecoded; ++i) {
    const absl::Span<const int32_t> forced = mode.forced;
    if (!run(forced.empty() ? forced : forced.subspan(i, 1), true)) break;
  }
  return outcome;
}

// Runs all ranks of the group with the plan of `plan_case`, or with a full-rank
// plan if it is null.
std::vector<Outcome> RunRanks(const Group& group,
                              const model::ModelShape& shape,
                              const PlanCase* plan_case,
                              const RunMode& mode = {}) {
  std::vector<Outcome> outcomes(group.size());
  OnRanks(static_cast<int64_t>(group.size()), [&](int64_t rank) {
    const auto r = static_cast<size_t>(rank);
    outcomes[r] = RunRank(group[r].get(), shape, plan_case, mode);
    // Abort, so that the other ranks do not wait for the rank that failed.
    if (outcomes[r].tokens.size() != 1 + kDecoded) {
      group[r]->Abort(absl::InternalError("failed"));
    }
  });
  return outcomes;
}

double Norm(absl::Span<const float> numbers) {
  double sum = 0;
  for (const float each : numbers) sum += double{each} * each;
  return std::sqrt(sum);
}

int64_t Argmax(absl::Span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

// Returns the largest logit minus the second largest.
float Margin(absl::Span<const float> logits) {
  std::vector<float> two(2);
  std::partial_sort_copy(logits.begin(), logits.end(), two.begin(), two.end(),
                         std::greater<>());
  return two[0] - two[1];
}

// Expects equal tokens, and logits that differ only by rounding: several ranks
// add in another order than one rank.
void ExpectSameNumbers(const Outcome& outcome, const Outcome& one) {
  EXPECT_EQ(outcome.tokens, one.tokens);
  std::vector<float> differences;
  float largest = 0;
  for (size_t i = 0; i < one.logits.size(); ++i) {
    differences.push_back(outcome.logits[i] - one.logits[i]);
    largest = std::max(largest, std::abs(one.logits[i]));
  }
  EXPECT_LT(Norm(differences), 1e-4 * Norm(one.logits));
  for (const float difference : differences) {
    ASSERT_NEAR(difference, 0, 1e-5f * largest);
  }
}

// Returns the mean loss, in nats, of the tokens that a single rank chose. Plans
// with quantized latents are compared by this loss, because a difference in the
// last bit of a latent may round to another code.
double LossOf(const Outcome& outcome, const std::vector<int32_t>& tokens) {
  double sum = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto logits = outcome.Row(outcome.num_rows() - tokens.size() + i);
    double all = 0;
    for (const float logit : logits) all += std::exp(double{logit});
    sum += std::log(all) - double{logits[static_cast<size_t>(tokens[i])]};
  }
  return sum / static_cast<double>(tokens.size());
}

void ExpectSameChoices(const Outcome& outcome, const Outcome& one,
                       int64_t* clear_rows) {
  const double loss = LossOf(one, one.tokens);
  EXPECT_NEAR(LossOf(outcome, one.tokens), loss, 0.001 * loss);
  for (size_t row = 0; row < one.num_rows(); ++row) {
    if (Margin(one.Row(row)) <= 0.05f) continue;
    ++*clear_rows;
    EXPECT_EQ(Argmax(outcome.Row(row)), Argmax(one.Row(row))) << "row " << row;
  }
}

class TensorParallelTest : public ::testing::Test {
 protected:
  void SetUp() override { std::signal(SIGPIPE, SIG_IGN); }

  // The group is made once per test, because Gloo takes long to connect.
  const Group& GroupOf(Over over, int64_t size) {
#if defined(KVASIR_TSAN)
    over = Over::kThreads;  // ThreadSanitizer does not see Gloo's timed waits
#endif
    Group& group = groups_[{over, size}];
    if (group.empty()) {
      group = over == Over::kThreads ? InProcessGroup::Create(size)
                                     : MakeGlooRanks(size);
    }
    return group;
  }

  // Checks that several ranks, connected by threads and by Gloo, compute what a
  // single rank computes. For a plan with quantized latents, returns the number
  // of rows whose best token was compared.
  int64_t ExpectSameAsOne(const model::ModelShape& shape,
                          std::initializer_list<int64_t> sizes,
                          const PlanCase* plan_case = nullptr) {
    const bool codes = plan_case != nullptr && plan_case->codes;
    const Outcome one =
        RunRanks(GroupOf(Over::kThreads, 1), shape, plan_case)[0];
    int64_t clear_rows = 0;
    for (const int64_t size : sizes) {
      SCOPED_TRACE(absl::StrCat(size, " ranks"));
      RunMode mode;
      if (codes) {
        mode.forced.assign(one.tokens.begin(), one.tokens.end() - 1);
      }
      const std::vector<Outcome> first =
          RunRanks(GroupOf(Over::kThreads, size), shape, plan_case, mode);
      EXPECT_EQ(first.size(), static_cast<size_t>(size));
      if (first.empty() || first[0].logits.size() != one.logits.size()) {
        ADD_FAILURE() << "did not run";
        continue;
      }
      for (const Outcome& outcome : first) {
        EXPECT_EQ(outcome.tokens, first[0].tokens);
        EXPECT_EQ(outcome.logits, first[0].logits);
      }
      // Run again over a network, with another chunking and batch: every rank
      // must get the same bits. More than 4 ranks run over threads again,
      // because Gloo is slow with more ranks than cores.
      mode.batched = true;
      const Over network = size <= 4 ? Over::kGloo : Over::kThreads;
      for (const Outcome& outcome :
           RunRanks(GroupOf(network, size), shape, plan_case, mode)) {
        EXPECT_EQ(outcome.tokens, first[0].tokens);
        EXPECT_EQ(outcome.logits, first[0].logits);
      }
      if (codes) {
        ExpectSameChoices(first[0], one, &clear_rows);
      } else {
        ExpectSameNumbers(first[0], one);
      }
    }
    return clear_rows;
  }

 private:
  std::map<std::pair<Over, int64_t>, Group> groups_;
};

TEST_F(TensorParallelTest, SeveralRanksComputeTheOutputOfASingleRank) {
  ExpectSameAsOne(TinyShape(), {2, 4, 8});
}

// With only 40 token ids, one rank has no rows of output head and embedding.
// Another rank has fewer rows than a panel of packed weights.
TEST_F(TensorParallelTest,
       SeveralRanksComputeTheOutputOfASingleRankWithASmallVocabulary) {
  model::ModelShape shape = TinyShape();
  shape.vocab_size = 40;
  ExpectSameAsOne(shape, {2, 4, 8});
  shape.tied_embedding = true;
  ExpectSameAsOne(shape, {2, 4});
}

// Returns for each rank the log probabilities of given tokens (targets) and of
// sampled tokens. The ranks have so little memory for logits that they compute
// targets in blocks of the vocabulary, and samples row by row.
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

TEST_F(TensorParallelTest, SeveralRanksComputeTheLogprobsOfASingleRank) {
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

// Runs a text of 60 tokens with eviction. Returns, for each of the two layers,
// the positions that the eviction units keep [units, kept]. The units of all
// ranks are in rank order.
std::vector<std::vector<uint32_t>> KeptBy(const Group& group,
                                          const PlanCase& plan_case) {
  constexpr int64_t kTokens = 60;
  constexpr int64_t kPrompt = 33;
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

// Each rank scores its eviction units with its own heads only. The other ranks
// affect these scores only through all-reduced sums, so they differ from a
// single rank's scores only in the last bits.
TEST_F(TensorParallelTest,
       EvictionsOnSeveralRanksKeepTheTokensThatASingleRankKeeps) {
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
    const std::vector<std::vector<uint32_t>> one =
        KeptBy(GroupOf(Over::kThreads, 1), plan_case);
    for (const std::vector<uint32_t>& layer : one) {
      ASSERT_EQ(layer.size(), num_units * 12);
      // The test is meaningful only if the kept slots are not just the latest
      // ones, and if units keep different slots.
      EXPECT_LT(layer[3], 40u);
      EXPECT_FALSE(
          std::equal(layer.begin(), layer.begin() + 12, layer.begin() + 12));
    }
    for (size_t size = 2; size <= num_units; size *= 2) {
      for (const Over over : {Over::kThreads, Over::kGloo}) {
        EXPECT_EQ(KeptBy(GroupOf(over, static_cast<int64_t>(size)), plan_case),
                  one)
            << size << " ranks";
      }
    }
  }
}

// In GPT-NeoX and OPT, the outputs of attention and MLP have a bias, which only
// rank 0 may add.
TEST_F(TensorParallelTest,
       SeveralRanksComputeTheOutputOfASingleRankForModelsWithLayerNorm) {
  ExpectSameAsOne(TinyNeoxShape(), {2, 4});
  ExpectSameAsOne(TinyOptShape(), {2, 4});
}

// Each rank normalizes the queries and keys of its own heads.
TEST_F(TensorParallelTest,
       SeveralRanksComputeTheOutputOfASingleRankForModelsWithQkNorm) {
  ExpectSameAsOne(TinyQwen3Shape(), {2, 4, 8});
}

// Each rank has a part of every expert.
TEST_F(TensorParallelTest,
       SeveralRanksComputeTheOutputOfASingleRankForModelsWithExperts) {
  ExpectSameAsOne(TinyMixtralShape(), {2, 4});
  ExpectSameAsOne(TinyQwen3MoeShape(), {2, 8});
}

TEST_F(TensorParallelTest,
       SeveralRanksComputeTheOutputOfASingleRankUnderEveryPlan) {
  int64_t clear_rows = 0;
  for (const PlanCase& plan_case : PlanCases()) {
    SCOPED_TRACE(plan_case.name);
    clear_rows += ExpectSameAsOne(TinyShape(), {2, 4, 8}, &plan_case);
  }
  EXPECT_GT(clear_rows, 100);
}

TEST_F(TensorParallelTest,
       InEveryModelFamilySeveralRanksComputeTheOutputOfASingleRank) {
  constexpr int64_t kWindow = 7;
  int64_t clear_rows = 0;
  for (const FamilyCase& each : FamilyCases(kWindow)) {
    SCOPED_TRACE(each.plan_case.name);
    clear_rows += ExpectSameAsOne(each.shape, {2, 4}, &each.plan_case);
  }
  EXPECT_GT(clear_rows, 100);
}

}  // namespace
}  // namespace kvasir::worker
