#include "bench/cache_reads.h"

#include "base/status_matchers.h"
#include "plan/eviction.h"
#include "plan/plan.h"

namespace kvasir::bench {
namespace {

// Test fixture: two heads of 64 dimensions. The keys or the values of a token
// take 2 * 64 * 2 = 256 bytes in bf16, and 64 + 8 bytes (codes + ranges) with 4
// bits.
class CacheReadsTest : public testing::Test {
 protected:
  CacheReadsTest() {
    shape_.num_kv_heads = 2;
    shape_.head_dim = 64;
    shape_.rotary_dim = 64;
    shape_.layers.resize(2);
    plan_ = plan::FullRankPlan(shape_, kvasir::v1::BF16);
  }

  double Read(int64_t length_tokens, int64_t prompt_tokens = 0) const {
    const auto layout = cache::PageLayout::Create(plan_, shape_, {});
    KVASIR_EXPECT_OK(layout.status());
    return layout.ok() ? CacheBytesRead(*layout, length_tokens, prompt_tokens)
                       : -1;
  }

  plan::AttentionShape shape_;
  kvasir::v1::KvPlan plan_;
};

TEST_F(CacheReadsTest, TheBytesReadAreCountedForEveryTokenOfEveryLayer) {
  EXPECT_DOUBLE_EQ(Read(1), 2 * 2 * 256);
  EXPECT_DOUBLE_EQ(Read(1000), 1000 * 2 * 2 * 256);
}

TEST_F(CacheReadsTest, TokensThatASlidingWindowHidesAreNotCounted) {
  shape_.layers[1].sliding_window = 128;
  EXPECT_DOUBLE_EQ(Read(100), 100 * 2 * 2 * 256);
  EXPECT_DOUBLE_EQ(Read(1000), (1000 + 128) * 2 * 256);
}

TEST_F(CacheReadsTest,
       ForExactTokensTheBytesOfExactRowsAreCountedInsteadOfCodes) {
  kvasir::v1::SidePlan* key = plan_.mutable_layers(0)->mutable_key();
  kvasir::v1::Codec* codec = key->mutable_parts(0)->mutable_codec();
  codec->mutable_bits()->add_schedule(4);
  codec->mutable_per_token();
  codec->set_param_dtype(kvasir::v1::F16);
  EXPECT_DOUBLE_EQ(Read(1000), 1000 * (72 + 3 * 256));
  key->set_exact_window(32);
  EXPECT_DOUBLE_EQ(Read(1000), 1000 * (72 + 3 * 256) + 32 * (256 - 72));
  EXPECT_DOUBLE_EQ(Read(10), 10 * 4 * 256);
  plan_.mutable_layers(0)->set_exact_sinks(4);
  EXPECT_DOUBLE_EQ(Read(1000), 1000 * (72 + 3 * 256) + 36 * (256 - 72));
  EXPECT_DOUBLE_EQ(Read(34), 34 * 4 * 256);
}

TEST_F(CacheReadsTest, EvictedSlotsAreNotCounted) {
  KVASIR_ASSERT_OK(plan::ApplyEviction(
      {.budget = {.ratio = 0.25}, .every_tokens = 100}, shape_, &plan_));
  // A step reads keys and values of two layers, and the eviction metadata of
  // each slot.
  const auto layout = cache::PageLayout::Create(plan_, shape_, {});
  KVASIR_ASSERT_OK(layout.status());
  const double token = layout->marginal_payload_bytes_per_token();
  EXPECT_GT(token, 2 * 2 * 256);
  EXPECT_DOUBLE_EQ(Read(1001, 1000), 251 * token);
  EXPECT_DOUBLE_EQ(Read(1060, 1000), 310 * token);
  EXPECT_DOUBLE_EQ(Read(200, 1000), 200 * token);
  EXPECT_DOUBLE_EQ(Read(1001), 1001 * token) << "nothing went";
}

}  // namespace
}  // namespace kvasir::bench
