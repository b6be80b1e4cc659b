// Compares the executor's logits with those of the reference implementation,
// for every golden model. Also checks that chunks, other sequences, page size,
// threads and kernels change no bit of the logits.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "model/checkpoint/checkpoint.h"
#include "model/files/file.h"
#include "model/files/json.h"
#include "plan/plan.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/rank.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

std::string GoldenModels() {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/tests/golden/models");
}

// The golden models. tests/golden/README.md says what each of them tests.
std::vector<std::string> PlainModelNames() {
  return {"llama-bias",
          "llama-f16",
          "llama-gqa-tied",
          "llama-mha",
          "llama-mqa-head-dim",
          "llama-yarn",
          "llama-yarn-attention-factor",
          "llama-yarn-mscale",
          "llama3-scaled-sharded",
          "llama3-scaled-v5-config",
          "mistral-no-window",
          "mistral-window",
          "neox-parallel-quarter",
          "neox-serial-half",
          "neox-whole-heads",
          "opt-tied",
          "opt-untied-no-bias",
          "phi3-longrope-long",
          "qwen2-tied",
          "qwen2-untied",
          "qwen2-window-upper-layers",
          "qwen2-yarn"};
}

// The golden models that also have greedy tokens.
std::vector<std::string> GreedyModelNames() {
  return {"gemma2-full-bias",
          "gemma2-tied",
          "gemma3-scaled-v5-config",
          "gemma3-tied",
          "mixtral-all-experts",
          "mixtral-one-of-three",
          "mixtral-window",
          "olmo2",
          "olmo2-bias-tied",
          "phi3-longrope-short",
          "phi3-part-window",
          "qwen3-bias-window",
          "qwen3-tied",
          "qwen3moe-mixed",
          "qwen3moe-not-normalized",
          "smollm3-tied",
          "smollm3-window"};
}

std::vector<std::string> ModelNames() {
  std::vector<std::string> names = PlainModelNames();
  for (std::string& name : GreedyModelNames()) names.push_back(std::move(name));
  return names;
}

TEST(ExecutorGoldenFixturesTest, EveryGoldenModelIsTested) {
  std::vector<std::string> folders;
  for (const auto& entry :
       std::filesystem::directory_iterator(GoldenModels())) {
    folders.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(ModelNames(), ::testing::UnorderedElementsAreArray(folders));
}

struct Expected {
  std::vector<int32_t> input_ids;
  int64_t vocab = 0;
  std::vector<float> logits;  // [T, V]
  // The tokens of greedy decoding after the first kGreedyPromptTokens ids.
  // Empty if the reference has none.
  std::vector<int32_t> greedy;
};
constexpr size_t kGreedyPromptTokens = 9;

Expected ReadExpected(const std::string& name) {
  Expected expected;
  const std::string folder = absl::StrCat(GoldenModels(), "/", name);
  auto text = model::ReadSmallFile(folder + "/expected.json", 1 << 20);
  KVASIR_EXPECT_OK(text);
  auto root = model::ParseJson(*text, name);
  KVASIR_EXPECT_OK(root);
  expected.input_ids = (*root)["input_ids"].get<std::vector<int32_t>>();
  if (root->contains("greedy")) {
    expected.greedy = (*root)["greedy"].get<std::vector<int32_t>>();
  }
  expected.vocab = (*root)["logits_shape"][1].get<int64_t>();
  auto bytes = model::ReadSmallFile(
      absl::StrCat(folder, "/", (*root)["logits_file"].get<std::string>()),
      16 << 20);
  KVASIR_EXPECT_OK(bytes);
  expected.logits.resize(bytes->size() / sizeof(float));
  std::memcpy(expected.logits.data(), bytes->data(), bytes->size());
  return expected;
}

struct RunOptions {
  int64_t page_tokens = 16;
  int threads = 1;
  int64_t chunk = 1 << 20;
  // Whether sequences with other tokens run in the same steps.
  bool with_others = false;
  kernels::CpuBackend backend = kernels::CpuBackend::kReference;
};

// Runs `expected.input_ids` and returns the logits of every token, by position.
std::vector<float> Logits(const std::string& name, const Expected& expected,
                          const RunOptions& options) {
  auto checkpoint =
      model::Checkpoint::Open(absl::StrCat(GoldenModels(), "/", name));
  KVASIR_EXPECT_OK(checkpoint);
  constexpr uint64_t kSubject = 7;
  std::vector<float> logits(expected.input_ids.size() *
                            static_cast<size_t>(expected.vocab));
  RankOptions rank_options;
  UseTestDevice(&rank_options);
  rank_options.num_threads = options.threads;
  rank_options.backend = options.backend;
  rank_options.page_tokens = options.page_tokens;
  rank_options.kv_cache_bytes = 16 << 20;
  // A model with learned positions cannot serve texts that are longer than its
  // table of positions.
  rank_options.executor.max_model_len =
      std::min<int64_t>(128, checkpoint->spec().max_position_embeddings);
  rank_options.executor.max_num_seqs = 4;
  rank_options.executor.max_batched_tokens = 128;
  rank_options.executor.logits_tap = [&](const LogitsRow& row) {
    if (row.sequence_id != kSubject) return;
    std::copy(row.logits.begin(), row.logits.end(),
              logits.begin() + row.position * expected.vocab);
  };
  CheckpointSource source(&*checkpoint);
  auto rank = Rank::Create(
      checkpoint->spec(),
      plan::FullRankPlan(model::AttentionShapeOf(checkpoint->spec()),
                         kvasir::v1::F32),
      &source, rank_options);
  KVASIR_EXPECT_OK(rank);
  if (!rank.ok()) return logits;
  DirectRunner runner(&(*rank)->executor(), &(*rank)->layout(),
                      (*rank)->pages());

  std::vector<int32_t> other_ids(expected.input_ids.rbegin(),
                                 expected.input_ids.rend());
  const int64_t total = static_cast<int64_t>(expected.input_ids.size());
  for (int64_t start = 0; start < total; start += options.chunk) {
    const int64_t count = std::min(options.chunk, total - start);
    std::vector<DirectStep> steps;
    const absl::Span<const int32_t> others(other_ids);
    // In this step, a prefill chunk of another sequence runs before the tested
    // sequence, and a sequence with one token runs after it.
    if (options.with_others && start < 20) {
      steps.push_back({.sequence_id = 3, .token_ids = others.subspan(0, 3)});
    }
    steps.push_back({.sequence_id = kSubject,
                     .token_ids = absl::MakeConstSpan(expected.input_ids)
                                      .subspan(static_cast<size_t>(start),
                                               static_cast<size_t>(count))});
    if (options.with_others) {
      steps.push_back({.sequence_id = 11, .token_ids = others.subspan(9, 1)});
    }
    KVASIR_EXPECT_OK(runner.Run(steps));
  }
  return logits;
}

class ExecutorGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ExecutorGoldenTest, LogitsMatchThoseOfTheReferenceImplementation) {
  const Expected expected = ReadExpected(GetParam());
  const std::vector<float> logits = Logits(GetParam(), expected, {});
  double max_error = 0;
  double max_value = 0;
  double error_norm = 0;
  double norm = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double error = static_cast<double>(logits[i]) - expected.logits[i];
    max_error = std::max(max_error, std::abs(error));
    max_value =
        std::max(max_value, std::abs(static_cast<double>(expected.logits[i])));
    error_norm += error * error;
    norm += static_cast<double>(expected.logits[i]) * expected.logits[i];
  }
  RecordProperty("max_relative_error", absl::StrCat(max_error / max_value));
  EXPECT_LE(max_error / max_value, 1e-4);
  EXPECT_LE(std::sqrt(error_norm / norm), 1e-4);
}

class ExecutorGreedyTest : public ::testing::TestWithParam<std::string> {};

// Feeds the reference's tokens one by one, so that a wrong prediction does not
// change the predictions after it.
TEST_P(ExecutorGreedyTest, GreedyTokensAreThoseOfTheReferenceImplementation) {
  Expected expected = ReadExpected(GetParam());
  ASSERT_EQ(expected.greedy.size(), 64u);
  expected.input_ids.resize(kGreedyPromptTokens);
  expected.input_ids.insert(expected.input_ids.end(), expected.greedy.begin(),
                            expected.greedy.end());
  const std::vector<float> logits = Logits(GetParam(), expected, {.chunk = 1});
  std::vector<int32_t> tokens;
  for (size_t t = kGreedyPromptTokens; t < expected.input_ids.size(); ++t) {
    const auto row =
        logits.begin() + static_cast<int64_t>(t - 1) * expected.vocab;
    tokens.push_back(static_cast<int32_t>(
        std::max_element(row, row + expected.vocab) - row));
  }
  EXPECT_EQ(tokens, expected.greedy);
}

TEST_P(ExecutorGoldenTest, ChunksPagesThreadsAndKernelsChangeNoBitOfTheLogits) {
  const Expected expected = ReadExpected(GetParam());
  const std::vector<float> whole = Logits(GetParam(), expected, {});
  const auto same = [&](const RunOptions& options) {
    const std::vector<float> other = Logits(GetParam(), expected, options);
    return std::memcmp(whole.data(), other.data(),
                       whole.size() * sizeof(float)) == 0;
  };
  for (const int64_t chunk : {1, 3, 7, 64}) {
    EXPECT_TRUE(same({.chunk = chunk})) << "chunk " << chunk;
    EXPECT_TRUE(same({.chunk = chunk, .with_others = true}))
        << "with others, chunk " << chunk;
  }
  for (const int64_t page_tokens : {32, 64}) {
    EXPECT_TRUE(same({.page_tokens = page_tokens, .chunk = 7}))
        << "page of " << page_tokens;
  }
  const RunOptions fast = {.backend = kernels::CpuBackend::kSimd};
  EXPECT_TRUE(same(fast)) << "SIMD";
  EXPECT_TRUE(same({.threads = 2, .backend = kernels::CpuBackend::kSimd}))
      << "2 threads";
  EXPECT_TRUE(same({.threads = 2,
                    .chunk = 7,
                    .with_others = true,
                    .backend = kernels::CpuBackend::kSimd}))
      << "2 threads, chunks, others";
}

std::string TestName(const ::testing::TestParamInfo<std::string>& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, ExecutorGoldenTest,
                         ::testing::ValuesIn(ModelNames()), TestName);
INSTANTIATE_TEST_SUITE_P(Models, ExecutorGreedyTest,
                         ::testing::ValuesIn(GreedyModelNames()), TestName);

}  // namespace
}  // namespace kvasir::worker
