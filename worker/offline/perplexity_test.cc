#include "worker/offline/perplexity.h"

#include <cmath>
#include <map>
#include <memory>
#include <vector>

#include "base/status_matchers.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

struct Text {
  std::vector<int32_t> ids;
  std::vector<int32_t> bytes;
  TokenizedText view() const { return {ids, bytes}; }
};

Text SomeText(int count) {
  Text text;
  for (int i = 0; i < count; ++i) {
    text.ids.push_back((i * i + 7 * i) % 1237);
    text.bytes.push_back(1 + i % 4);
  }
  return text;
}

std::unique_ptr<Rank> TinyRank(const RankOptions& options = TinyOptions()) {
  auto rank = MakeTinyRank(options);
  KVASIR_EXPECT_OK(rank);
  return *std::move(rank);
}

PerplexityResult MustScore(Rank& rank, const Text& text,
                           const PerplexityOptions& options) {
  auto result = Perplexity(&rank.executor(), text.view(), options);
  KVASIR_EXPECT_OK(result);
  return result.ok() ? *result : PerplexityResult{};
}

TEST(PerplexityTest, EveryTokenThatHasContextIsScored) {
  auto rank = TinyRank();
  const Text text = SomeText(100);
  const PerplexityResult without =
      MustScore(*rank, text, {.window_tokens = 40});
  EXPECT_EQ(without.tokens, 39 + 39 + 19);
  // tokens 0, 40 and 80 have no context
  EXPECT_EQ(without.bytes, 250 - 1 - 1 - 1);
  const PerplexityResult with =
      MustScore(*rank, text, {.window_tokens = 41, .bos_token_id = 1});
  EXPECT_EQ(with.tokens, 100);
  EXPECT_EQ(with.bytes, 250);
  EXPECT_NEAR(with.nats_per_byte, std::log(with.perplexity) * 100.0 / 250.0,
              1e-9);
}

TEST(PerplexityTest, PerplexityEqualsTheLossComputedFromTheLogits) {
  RankOptions options = TinyOptions();
  std::map<int64_t, std::vector<float>> logits;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    logits[row.position].assign(row.logits.begin(), row.logits.end());
  };
  auto rank = TinyRank(options);
  const Text text = SomeText(30);
  const PerplexityResult result =
      MustScore(*rank, text, {.window_tokens = 64, .chunk_tokens = 7});
  double nats = 0;
  for (size_t i = 0; i + 1 < text.ids.size(); ++i) {
    const std::vector<float>& row = logits[static_cast<int64_t>(i)];
    double sum = 0;
    for (const float logit : row) sum += std::exp(static_cast<double>(logit));
    nats += std::log(sum) - row[static_cast<size_t>(text.ids[i + 1])];
  }
  EXPECT_NEAR(std::log(result.perplexity), nats / 29, 1e-5);
}

TEST(PerplexityTest, ChunkSizeChangesNoBitOfThePerplexity) {
  auto rank = TinyRank();
  const Text text = SomeText(150);
  const PerplexityResult whole = MustScore(*rank, text, {.window_tokens = 100});
  for (const int64_t chunk : {1, 7, 64}) {
    const PerplexityResult chunked =
        MustScore(*rank, text, {.window_tokens = 100, .chunk_tokens = chunk});
    EXPECT_EQ(chunked.perplexity, whole.perplexity) << chunk;
  }
}

TEST(PerplexityTest, TheReportedBytesPerTokenMatchTheAllocatedPool) {
  auto rank = TinyRank();
  const PerplexityResult result =
      MustScore(*rank, SomeText(10), {.window_tokens = 10});
  // 2 layers * (key, value) * 4 heads * 8 dims of 2 bytes.
  EXPECT_EQ(result.kv_bytes_per_token, 2 * 2 * 4 * 8 * 2);
  EXPECT_EQ(result.kv_compression_ratio, 1.0);
  const double pool =
      result.kv_bytes_per_token * static_cast<double>(rank->pages()[0] * 16);
  EXPECT_EQ(rank->allocator().use(kernels::MemoryTag::kKvCache).bytes,
            static_cast<int64_t>(pool));
}

// Computes the expected loss by scoring each window as a separate text.
TEST(PerplexityTest, OverlappingWindowsScoreEachTokenExactlyOnce) {
  auto rank = TinyRank();
  const Text text = SomeText(75);
  for (const bool has_bos : {false, true}) {
    PerplexityOptions options = {.window_tokens = 40, .stride_tokens = 16};
    if (has_bos) options.bos_token_id = 1;
    options.parts = 5;
    const PerplexityResult result = MustScore(*rank, text, options);
    const int64_t own = has_bos ? 39 : 40;
    double nats = 0;
    int64_t tokens = 0;
    const auto nats_of = [&](int64_t begin, int64_t end) {
      const TokenizedText part = {
          absl::MakeConstSpan(text.ids).subspan(
              static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
          absl::MakeConstSpan(text.bytes)
              .subspan(static_cast<size_t>(begin),
                       static_cast<size_t>(end - begin))};
      PerplexityOptions alone = {.window_tokens = 40};
      alone.bos_token_id = options.bos_token_id;
      const auto scored = Perplexity(&rank->executor(), part, alone);
      KVASIR_EXPECT_OK(scored);
      tokens += scored->tokens;
      return std::log(scored->perplexity) * static_cast<double>(scored->tokens);
    };
    nats += nats_of(0, own);
    for (int64_t start = own; start < 75; start += 16) {
      const int64_t end = std::min<int64_t>(75, start + 16);
      // The loss of the scored tokens is the loss of the whole window minus the
      // loss of its tokens before `start`.
      nats += nats_of(end - own, end) - nats_of(end - own, start);
      tokens -= 2 * (start - (end - own) - (has_bos ? 0 : 1));
    }
    EXPECT_EQ(result.tokens, tokens);
    EXPECT_EQ(result.tokens, has_bos ? 75 : 74);
    EXPECT_EQ(result.bytes, MustScore(*rank, text,
                                      {.window_tokens = 100,
                                       .bos_token_id = options.bos_token_id})
                                .bytes);
    EXPECT_NEAR(
        std::log(result.perplexity) * static_cast<double>(result.tokens), nats,
        1e-3);
    ASSERT_EQ(result.parts.size(), 5u);
    for (const PerplexityPart& part : result.parts) {
      EXPECT_NEAR(static_cast<double>(part.tokens), 15, 1);
      EXPECT_GT(part.nats, 0);
    }
  }
}

TEST(PerplexityTest, OptionsOutsideTheirLimitsAreRefused) {
  auto rank = TinyRank();
  const Text text = SomeText(10);
  for (const int64_t window : {0, 1, 129}) {
    EXPECT_THAT(
        Perplexity(&rank->executor(), text.view(), {.window_tokens = window}),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("a window must have 2 to 128 tokens")));
  }
  EXPECT_THAT(Perplexity(&rank->executor(), text.view(),
                         {.window_tokens = 16, .chunk_tokens = 65}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a chunk must have 1 to 64 tokens")));
  EXPECT_THAT(
      Perplexity(&rank->executor(), text.view(),
                 {.window_tokens = 16, .stride_tokens = 16}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("the stride must be 0 or more and less than the "
                         "window's 16 tokens, but is 16")));
  EXPECT_THAT(
      Perplexity(&rank->executor(), text.view(),
                 {.window_tokens = 16, .stride_tokens = 4, .parts = 10}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("parts of a text must be 1 to 9, but is 10")));
  EXPECT_THAT(Perplexity(&rank->executor(), {}, {.window_tokens = 16}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("nothing to score")));
}

}  // namespace
}  // namespace kvasir::worker
