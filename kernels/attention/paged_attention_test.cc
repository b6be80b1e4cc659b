// Tests paged_attention over a dense cache, which stores the unquantized keys
// and values of each KV head.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels {
namespace {

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

LatentSpec DenseSpec(const Shape& shape) {
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

TEST_P(PagedAttentionTest,
       AllBackEndsGiveTheSameBitsAndAreCloseToExactAttention) {
  LatentCache cache(DenseSpec(GetParam()), {83, 1, 700}, 1);
  const std::vector<LatentAsk> asks = {{0, 20, 63}, {1, 0, 1}, {2, 690, 10}};
  WriteAll(cache, asks);
  // The tolerance suits float32 sums of a few hundred terms.
  const std::vector<float> truth = CheckedReference(cache, asks, 1e-5);
  AttentionStreams& streams = SharedStreams();
  ExpectBits(cache, asks, truth, {&streams.one, &streams.three, &streams.many});
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

TEST(PagedAttentionPagesTest, PagesBeforeTheSlidingWindowAreNotRead) {
  Shape shape;
  shape.window = 40;
  TestStream test(2);
  LatentCache cache(DenseSpec(shape), {200}, 4);
  cache.Write(0, 0, 200);
  const auto expected = cache.Attend(test, {{0, 195, 5}});
  // Slots up to 155 are no longer visible. So the table entries of the nine
  // pages that have only such slots are made invalid.
  for (size_t page = 0; page < 9; ++page) cache.table(0)[page] = 1 << 30;
  EXPECT_TRUE(SameBits(expected, cache.Attend(test, {{0, 195, 5, 9}})));
}

TEST(PagedAttentionPagesTest,
     SequencesOfMoreSlotsThanAnInt32CanCountAreRefused) {
  LatentCache cache(LatentSpec(), {1}, 1);
  PagedAttentionArgs args = cache.Params();
  AttentionSequence sequence;
  sequence.first_slot = 1000;
  sequence.num_rows = 1;
  sequence.evicted = kAttentionMostSlots - 1000;
  args.sequences = &sequence;
  args.num_sequences = 1;
  ExpectRefusal(
      args,
      "paged_attention: sequence 0 has 1000 earlier, 1 new and 2147482647 "
      "evicted slots; at most 2147483647 are allowed together");
  sequence.evicted = -1;
  ExpectRefusal(args, "evicted: must be at least 0, but is -1");
}

}  // namespace
}  // namespace kvasir::kernels
