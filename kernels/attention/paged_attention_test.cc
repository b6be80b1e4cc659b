// Attention over a dense cache, which has the keys and values of each KV head
// as numbers.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Shape {
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t key_width = 32;
  int64_t value_width = 32;
  int64_t page_tokens = 16;
  DType dtype = DType::kBf16;
  int64_t window = 0;
  bool causal = true;
};

LatentSpec SpecOf(const Shape& shape) {
  LatentSpec spec;
  spec.num_heads = shape.num_heads;
  spec.num_kv_heads = shape.num_kv_heads;
  spec.keys[0].widths = {shape.key_width};
  spec.keys[0].dtype = shape.dtype;
  spec.values[0].widths = {shape.value_width};
  spec.values[0].dtype = shape.dtype;
  spec.page_tokens = shape.page_tokens;
  spec.window = shape.window;
  spec.causal = shape.causal;
  return spec;
}

class PagedAttentionTest : public ::testing::TestWithParam<Shape> {};

TEST_P(PagedAttentionTest, AllBackEndsGiveTheDefinitionAndTheSameBits) {
  LatentCache cache(SpecOf(GetParam()), {83, 1, 700}, 1);
  const std::vector<LatentAsk> asks = {{0, 20, 63}, {1, 0, 1}, {2, 690, 10}};
  std::vector<double> expected;
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
    const std::vector<double> rows = cache.Expected(ask);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<float> truth = cache.Attend(reference, asks);
  // float32 sums of a few hundred terms.
  EXPECT_LT(WorstError(cache.Params(), expected, truth), 1e-5);
  TestStream one(1);
  TestStream two(2);
  TestStream many(9);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(truth, cache.Attend(one, asks)));
    EXPECT_TRUE(SameBits(truth, cache.Attend(two, asks)));
    EXPECT_TRUE(SameBits(truth, cache.Attend(many, asks)));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PagedAttentionTest,
    ::testing::Values(Shape{}, Shape{4, 4, 64, 64, 32, DType::kF32},
                      Shape{6, 2, 80, 40, 64, DType::kF16},
                      Shape{8, 1, 33, 7, 16, DType::kBf16},
                      Shape{4, 2, 64, 64, 64, DType::kBf16, 50},
                      Shape{4, 2, 32, 32, 16, DType::kF32, 130},
                      Shape{3, 3, 256, 256, 16, DType::kBf16},
                      Shape{4, 2, 32, 32, 5, DType::kBf16, 0, false},
                      Shape{70, 1, 16, 16, 16, DType::kBf16}));

class ChunkingTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(ChunkingTest, ChunksAndBatchDoNotChangeARow) {
  const int64_t chunk = GetParam();
  constexpr int64_t kTokens = 150;
  TestStream test(2);
  LatentCache whole(SpecOf({}), {kTokens, 40}, 2);
  whole.Write(0, 0, kTokens);
  const std::vector<float> expected = whole.Attend(test, {{0, 0, kTokens}});
  LatentCache chunked(SpecOf({}), {kTokens, 40}, 2);
  chunked.Write(1, 0, 40);
  std::vector<float> got;
  for (int64_t t = 0; t < kTokens; t += chunk) {
    const int64_t count = std::min(chunk, kTokens - t);
    // It is written only now, so later slots are NaN.
    chunked.Write(0, t, t + count);
    const std::vector<float> rows =
        chunked.Attend(test, {{1, 30, 10}, {0, t, count}});
    got.insert(got.end(), rows.begin() + 10 * chunked.Params().out_row_stride,
               rows.end());
  }
  EXPECT_TRUE(SameBits(expected, got));
}

INSTANTIATE_TEST_SUITE_P(Chunks, ChunkingTest,
                         ::testing::Values(1, 7, 64, 149));

TEST(PagedAttentionPagesTest, PageSizeDoesNotChangeBits) {
  TestStream test(2);
  std::vector<float> first;
  for (const int64_t page_tokens : {16, 32, 64}) {
    Shape shape;
    shape.page_tokens = page_tokens;
    LatentCache cache(SpecOf(shape), {1100}, 3);
    cache.Write(0, 0, 1100);
    const auto out = cache.Attend(test, {{0, 1090, 10}});
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << page_tokens;
  }
}

TEST(PagedAttentionPagesTest, PagesThatTheWindowHasPassedAreNotRead) {
  Shape shape;
  shape.window = 40;
  TestStream test(2);
  LatentCache cache(SpecOf(shape), {200}, 4);
  cache.Write(0, 0, 200);
  const auto expected = cache.Attend(test, {{0, 195, 5}});
  // Slots up to 155 are invisible, so the table entries of their pages are
  // invalidated.
  for (size_t page = 0; page < 9; ++page) cache.table(0)[page] = 1 << 30;
  EXPECT_TRUE(SameBits(expected, cache.Attend(test, {{0, 195, 5, 9}})));
}

TEST(PagedAttentionPagesTest, RefusesMoreSlotsThan32Bits) {
  TestStream test(1);
  LatentCache cache(SpecOf({}), {1}, 1);
  PagedAttentionArgs args = cache.Params();
  AttentionSequence sequence;
  sequence.first_slot = 1000;
  sequence.num_rows = 1;
  sequence.evicted = kAttentionMostSlots - 1000;
  args.sequences = &sequence;
  args.num_sequences = 1;
  EXPECT_THAT(
      AttendOnDevice(test, args, test.workspace()),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("paged_attention: sequence 0: 1000 slots, 1 new "
                               "ones and 2147482647 evicted ones: want "
                               "2147483647 at most")));
  sequence.evicted = -1;
  EXPECT_THAT(AttendOnDevice(test, args, test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("evicted: want at least 0, have -1")));
}

}  // namespace
}  // namespace kvasir::kernels
