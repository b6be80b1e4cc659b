#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/op_test_util.h"
#include "kernels/ops.h"

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

// What one sequence asks of a launch: new tokens after `start` cached ones.
struct Ask {
  int64_t sequence;
  int64_t start;
  int64_t count;
};

// Sequences with keys, values and queries for every token, in a cache whose
// pages lie in random order and whose unwritten slots are NaN.
class Cache {
 public:
  Cache(const Shape& shape, std::vector<int64_t> lengths, uint32_t seed)
      : shape_(shape), lengths_(std::move(lengths)) {
    int64_t pages = 1;  // one that belongs to nobody
    for (const int64_t length : lengths_) pages += Pages(length);
    std::vector<int32_t> ids(static_cast<size_t>(pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
    InitPart(shape.key_width, pages, &key_, &key_groups_, &key_memory_);
    InitPart(shape.value_width, pages, &value_, &value_groups_, &value_memory_);
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      query_column_.push_back(h * shape.key_width);
      out_column_.push_back(h * shape.value_width);
    }
    for (int32_t j = 0; j < shape.num_kv_heads; ++j) {
      group_of_head_.push_back(j);
    }
    size_t next = 0;
    for (size_t i = 0; i < lengths_.size(); ++i) {
      const auto count = static_cast<size_t>(Pages(lengths_[i]));
      tables_.emplace_back(ids.begin() + static_cast<int64_t>(next),
                           ids.begin() + static_cast<int64_t>(next + count));
      next += count;
      const auto s = seed * 1000 + static_cast<uint32_t>(i) * 3;
      const int64_t n = lengths_[i];
      q_.push_back(RandomFloats(n * shape.num_heads * shape.key_width, s));
      k_.push_back(
          RandomFloats(n * shape.num_kv_heads * shape.key_width, s + 1));
      v_.push_back(
          RandomFloats(n * shape.num_kv_heads * shape.value_width, s + 2));
    }
  }

  // Writes tokens [begin, end) of a sequence.
  void Append(TestStream& test, int64_t sequence, int64_t begin, int64_t end) {
    const auto i = static_cast<size_t>(sequence);
    std::vector<int64_t> slots;
    for (int64_t t = begin; t < end; ++t) {
      slots.push_back(tables_[i][static_cast<size_t>(t / shape_.page_tokens)] *
                          shape_.page_tokens +
                      t % shape_.page_tokens);
    }
    KvAppendPart parts[2];
    parts[0].row_stride = shape_.num_kv_heads * shape_.key_width;
    parts[0].rows = k_[i].data() + begin * parts[0].row_stride;
    parts[0].part = key_;
    parts[1].row_stride = shape_.num_kv_heads * shape_.value_width;
    parts[1].rows = v_[i].data() + begin * parts[1].row_stride;
    parts[1].part = value_;
    KvAppendParams params;
    params.parts = parts;
    params.num_parts = 2;
    params.slots = slots.data();
    params.num_tokens = end - begin;
    params.page_tokens = shape_.page_tokens;
    KVASIR_EXPECT_OK(KvAppend(test.stream(), params, test.workspace()));
  }

  // Output rows of the asked tokens, one after the other.
  std::vector<float> Attend(TestStream& test, const std::vector<Ask>& asks,
                            int64_t dead_pages = 0) {
    std::vector<float> q;
    std::vector<AttentionSequence> sequences;
    int64_t rows = 0;
    const int64_t q_row = shape_.num_heads * shape_.key_width;
    for (const Ask& ask : asks) {
      const auto i = static_cast<size_t>(ask.sequence);
      q.insert(q.end(), q_[i].begin() + ask.start * q_row,
               q_[i].begin() + (ask.start + ask.count) * q_row);
      sequences.push_back(
          {rows, ask.count, ask.start, tables_[i].data(), dead_pages});
      rows += ask.count;
    }
    const int64_t out_row = shape_.num_heads * shape_.value_width;
    std::vector<float> out(static_cast<size_t>(rows * out_row), kPoison);
    PagedAttentionParams params;
    params.q = q.data();
    params.q_row_stride = q_row;
    params.out = out.data();
    params.out_row_stride = out_row;
    params.num_heads = shape_.num_heads;
    params.num_kv_heads = shape_.num_kv_heads;
    AttentionKeyPart key;
    key.latents = key_;
    key.group_of_head = group_of_head_.data();
    key.query_column = query_column_.data();
    AttentionValuePart value;
    value.latents = value_;
    value.group_of_head = group_of_head_.data();
    value.out_column = out_column_.data();
    params.keys = &key;
    params.num_key_parts = 1;
    params.values = &value;
    params.num_value_parts = 1;
    params.page_tokens = shape_.page_tokens;
    params.sequences = sequences.data();
    params.num_sequences = static_cast<int64_t>(sequences.size());
    params.scale = Scale();
    params.causal = shape_.causal;
    params.window = shape_.window;
    KVASIR_EXPECT_OK(PagedAttention(test.stream(), params, test.workspace()));
    return out;
  }

  // The definition in float64, from what the cache holds after rounding.
  std::vector<double> Expected(const Ask& ask) const {
    const auto i = static_cast<size_t>(ask.sequence);
    std::vector<double> out;
    for (int64_t t = ask.start; t < ask.start + ask.count; ++t) {
      for (int64_t h = 0; h < shape_.num_heads; ++h) {
        AddExpected(i, t, h, ask.start + ask.count, &out);
      }
    }
    return out;
  }

  std::vector<int32_t>& table(int64_t sequence) {
    return tables_[static_cast<size_t>(sequence)];
  }

 private:
  float Scale() const {
    return 1.0f / std::sqrt(static_cast<float>(shape_.key_width));
  }
  int64_t Pages(int64_t tokens) const {
    return (tokens + shape_.page_tokens - 1) / shape_.page_tokens;
  }

  void InitPart(int64_t width, int64_t pages, LatentPart* part,
                std::vector<LatentGroup>* groups, std::vector<char>* memory) {
    const int64_t stride = width * DTypeBytes(shape_.dtype);
    const int64_t region = (shape_.page_tokens * stride + 127) / 128 * 128;
    for (int64_t g = 0; g < shape_.num_kv_heads; ++g) {
      LatentGroup group;
      group.width = width;
      group.column = g * width;
      group.codes_offset_bytes = 128 + g * region;
      group.codes_stride_bytes = stride;
      groups->push_back(group);
    }
    part->dtype = shape_.dtype;
    part->groups = groups->data();
    part->num_groups = shape_.num_kv_heads;
    part->page_bytes = 128 + shape_.num_kv_heads * region;
    memory->assign(static_cast<size_t>(part->page_bytes * pages),
                   static_cast<char>(0xff));  // NaN in every dtype
    part->arena = memory->data();
  }

  double Rounded(float value) const {
    return VisitDType(shape_.dtype, [&](auto type) {
      return static_cast<double>(ToFloat(FromFloat<decltype(type)>(value)));
    });
  }

  void AddExpected(size_t i, int64_t t, int64_t head, int64_t length,
                   std::vector<double>* out) const {
    const int64_t kv_head = head / (shape_.num_heads / shape_.num_kv_heads);
    const int64_t begin =
        shape_.window > 0 ? std::max<int64_t>(0, t + 1 - shape_.window) : 0;
    const int64_t end = shape_.causal ? t + 1 : length;
    std::vector<double> weights;
    for (int64_t s = begin; s < end; ++s) {
      double score = 0.0;
      for (int64_t d = 0; d < shape_.key_width; ++d) {
        const auto q_index = static_cast<size_t>(
            (t * shape_.num_heads + head) * shape_.key_width + d);
        const auto k_index = static_cast<size_t>(
            (s * shape_.num_kv_heads + kv_head) * shape_.key_width + d);
        score += static_cast<double>(q_[i][q_index]) * Rounded(k_[i][k_index]);
      }
      weights.push_back(score * static_cast<double>(Scale()));
    }
    const double max = *std::max_element(weights.begin(), weights.end());
    double sum = 0.0;
    for (double& weight : weights) sum += weight = std::exp(weight - max);
    for (int64_t d = 0; d < shape_.value_width; ++d) {
      double value = 0.0;
      for (int64_t s = begin; s < end; ++s) {
        const auto v_index = static_cast<size_t>(
            (s * shape_.num_kv_heads + kv_head) * shape_.value_width + d);
        value +=
            weights[static_cast<size_t>(s - begin)] * Rounded(v_[i][v_index]);
      }
      out->push_back(value / sum);
    }
  }

  const Shape shape_;
  const std::vector<int64_t> lengths_;
  LatentPart key_;
  LatentPart value_;
  std::vector<LatentGroup> key_groups_;
  std::vector<LatentGroup> value_groups_;
  std::vector<int32_t> group_of_head_;
  std::vector<int64_t> query_column_;
  std::vector<int64_t> out_column_;
  std::vector<char> key_memory_;
  std::vector<char> value_memory_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<float>> q_;
  std::vector<std::vector<float>> k_;
  std::vector<std::vector<float>> v_;
};

class PagedAttentionTest : public ::testing::TestWithParam<Shape> {};

TEST_P(PagedAttentionTest, AllBackEndsGiveTheDefinitionAndTheSameBits) {
  const Shape& shape = GetParam();
  Cache cache(shape, {83, 1, 700}, 1);
  TestStream reference(1, CpuBackend::kReference);
  const std::vector<Ask> asks = {{0, 20, 63}, {1, 0, 1}, {2, 690, 10}};
  for (const Ask& ask : asks) {
    cache.Append(reference, ask.sequence, 0, ask.start + ask.count);
  }
  const std::vector<float> truth = cache.Attend(reference, asks);
  size_t next = 0;
  for (const Ask& ask : asks) {
    for (const double expected : cache.Expected(ask)) {
      // float32 sums of a few hundred terms of size one.
      ASSERT_NEAR(expected, static_cast<double>(truth[next++]), 2e-6);
    }
  }
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
  const Shape shape;
  constexpr int64_t kTokens = 150;
  TestStream test(2);
  Cache whole(shape, {kTokens, 40}, 2);
  whole.Append(test, 0, 0, kTokens);
  const std::vector<float> expected = whole.Attend(test, {{0, 0, kTokens}});
  Cache chunked(shape, {kTokens, 40}, 2);
  chunked.Append(test, 1, 0, 40);
  std::vector<float> got;
  for (int64_t t = 0; t < kTokens; t += chunk) {
    const int64_t count = std::min(chunk, kTokens - t);
    // Written only now: what lies ahead is NaN.
    chunked.Append(test, 0, t, t + count);
    std::vector<float> rows =
        chunked.Attend(test, {{1, 30, 10}, {0, t, count}});
    const int64_t other = 10 * shape.num_heads * shape.value_width;
    got.insert(got.end(), rows.begin() + other, rows.end());
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
    Cache cache(shape, {1100}, 3);
    cache.Append(test, 0, 0, 1100);
    const auto out = cache.Attend(test, {{0, 1090, 10}});
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << page_tokens;
  }
}

TEST(PagedAttentionPagesTest, PagesBehindTheWindowAreNotRead) {
  Shape shape;
  shape.window = 40;
  TestStream test(2);
  Cache cache(shape, {200}, 4);
  cache.Append(test, 0, 0, 200);
  const auto expected = cache.Attend(test, {{0, 195, 5}});
  // Slots up to 155 are invisible; table entries of their pages go.
  for (int64_t page = 0; page < 9; ++page) {
    cache.table(0)[static_cast<size_t>(page)] = 1 << 30;
  }
  EXPECT_TRUE(SameBits(expected, cache.Attend(test, {{0, 195, 5}}, 9)));
}

TEST(PagedAttentionPagesTest, RowsThatSeeNothingAreZero) {
  const Shape shape;
  TestStream test;
  Cache cache(shape, {20}, 5);
  const auto out = cache.Attend(test, {{0, 10, 1}}, 2);
  for (const float value : out) EXPECT_EQ(0.0f, value);
}

}  // namespace
}  // namespace kvasir::kernels
