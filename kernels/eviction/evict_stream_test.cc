// Tests kv_append, attention and eviction together on a long text, in a cache
// with only 64 slots.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/ops.h"
#include "kernels/eviction/ops.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kHeads = 8;
constexpr int64_t kKvHeads = 4;
constexpr int64_t kUnits = 2;
constexpr int64_t kPageTokens = 16;
constexpr int64_t kKept = 40;
constexpr int64_t kEvery = 24;  // tokens between two evictions
constexpr int64_t kPages = (kKept + kEvery) / kPageTokens;
constexpr int64_t kTokens = 1500;

// Returns `width` random numbers for a token. They depend only on the token and
// the seed, so they are the same however the text is cut into chunks.
std::vector<float> RowOf(int64_t token, int64_t width, uint32_t seed) {
  return RandomFloats(width, seed + static_cast<uint32_t>(token), 0.7f);
}

struct Run {
  int threads = 1;
  CpuBackend backend = CpuBackend::kSimd;
  bool keeps_weights = false;
  int64_t most_tokens = 1;  // largest number of tokens in one step
};

class EndlessText {
 public:
  explicit EndlessText(const Run& run)
      : run_(run),
        test_(run.threads, run.backend, static_cast<size_t>(run.threads) << 20),
        key_(Groups(Codes({40}, {4}, 20), {0, 0, 1, 1}), kKvHeads, kPageTokens,
             0, kPages, 1),
        value_(Codes({24}, {3}), kKvHeads, kPageTokens, 0, kPages, 2) {
    const int64_t plane = kUnits * kPageTokens * 4;
    metadata_.page_tokens = kPageTokens;
    metadata_.num_units = kUnits;
    metadata_.positions_offset = plane;
    metadata_.error_offset[kKeyError] = 2 * plane;
    metadata_.error_offset[kValueError] = 2 * plane + plane / 4;
    metadata_.page_bytes = 3 * plane;
    memory_.assign(static_cast<size_t>(kPages * metadata_.page_bytes), '\xff');
    metadata_.arena = memory_.data();
    table_.resize(kPages);
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), std::mt19937(3));
    for (int64_t h = 0; h < kHeads; ++h) {
      key_.columns.push_back(h * 40);
      value_.columns.push_back(h * 24);
    }
    MakeAppend();
    MakeEviction();
  }

  // Runs the tokens up to `end`, and evicts after every kEvery tokens.
  void RunTo(int64_t end) {
    std::mt19937 engine(9);
    while (next_ < end) {
      const int64_t due = kEvery - next_ % kEvery;
      const int64_t count =
          std::min({due, end - next_,
                    1 + static_cast<int64_t>(engine()) % run_.most_tokens});
      Step(count);
      if (next_ % kEvery == 0 && slots_ > kKept) Evict();
    }
  }

  int64_t slots() const { return slots_; }
  // Returns the contents of all slots in use, and the output of the last token.
  std::vector<float> State() const {
    std::vector<float> state(out_.end() - kHeads * 24, out_.end());
    for (int64_t u = 0; u < kUnits; ++u) {
      for (int64_t s = 0; s < slots_; ++s) {
        const int64_t page = table_[static_cast<size_t>(s / kPageTokens)];
        const int64_t at = s % kPageTokens;
        state.push_back(ScoresOf(metadata_, page, u)[at]);
        state.push_back(
            static_cast<float>(PositionsOf(metadata_, page, u)[at]));
        for (const int side : {kKeyError, kValueError}) {
          state.push_back(ErrorsOf(metadata_, side, page, u)[at]);
        }
      }
    }
    return state;
  }
  std::vector<uint32_t> Positions(int64_t unit) const {
    std::vector<uint32_t> positions;
    for (int64_t s = 0; s < slots_; ++s) {
      positions.push_back(
          PositionsOf(metadata_, table_[static_cast<size_t>(s / kPageTokens)],
                      unit)[s % kPageTokens]);
    }
    return positions;
  }

 private:
  static constexpr int64_t kRowWidth = 2 * 40 + 4 * 24;

  void MakeAppend() {
    key_units_ = {0, 1};
    value_units_ = {0, 0, 1, 1};
    KvAppendPartArgs keys{0, key_.part};
    keys.unit_of_group = key_units_.data();
    keys.errors_of[kKeyError] = true;
    KvAppendPartArgs values{2 * 40, value_.part};
    values.unit_of_group = value_units_.data();
    values.errors_of[kValueError] = true;
    append_ = std::make_unique<PreparedKvAppend>(
        *Prepare(test_.device(),
                 KvAppendShape{.row_stride = kRowWidth,
                               .page_tokens = kPageTokens,
                               .metadata = OnDevice(metadata_)},
                 std::vector<KvAppendPart>{OnDevice(keys), OnDevice(values)}));
  }
  void MakeEviction() {
    eviction_ = std::make_unique<PreparedEviction>(*Prepare(
        test_.device(), OnDevice(metadata_),
        std::vector<EvictPart>{{OnDevice(key_.part), key_units_.data()},
                               {OnDevice(value_.part), value_units_.data()}}));
  }

  void Step(int64_t count) {
    std::vector<float> rows;
    std::vector<float> q;
    std::vector<int64_t> to;
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<float> row = RowOf(next_ + i, kRowWidth, 10);
      const std::vector<float> query = RowOf(next_ + i, kHeads * 40, 1 << 20);
      rows.insert(rows.end(), row.begin(), row.end());
      q.insert(q.end(), query.begin(), query.end());
      const int64_t slot = slots_ + i;
      to.push_back(table_[static_cast<size_t>(slot / kPageTokens)] *
                       kPageTokens +
                   slot % kPageTokens);
      positions.push_back(next_ + i);
    }
    KVASIR_EXPECT_OK(KvAppend(test_.stream(), *append_,
                              {OnDevice<const float>(rows.data()),
                               OnDevice<const int64_t>(to.data()),
                               count,
                               {},
                               OnDevice<const int64_t>(positions.data())},
                              test_.workspace()));
    Attend(count, q);
    next_ += count;
    slots_ += count;
  }

  void Attend(int64_t count, const std::vector<float>& q) {
    const AttentionKeyPartArgs key = {key_.part, key_.group_of_head.data(),
                                      key_.columns.data()};
    const AttentionValuePartArgs value = {
        value_.part, value_.group_of_head.data(), value_.columns.data()};
    AttentionSequence sequence;
    sequence.num_rows = count;
    sequence.first_slot = slots_;
    sequence.block_table = OnDevice<const int32_t>(table_.data());
    PagedAttentionArgs params;
    out_.assign(static_cast<size_t>(count * kHeads * 24), kPoison);
    params.q = q.data();
    params.q_row_stride = kHeads * 40;
    params.out = out_.data();
    params.out_row_stride = kHeads * 24;
    params.num_heads = kHeads;
    params.num_kv_heads = kKvHeads;
    params.keys = &key;
    params.num_key_parts = 1;
    params.values = &value;
    params.num_value_parts = 1;
    params.page_tokens = kPageTokens;
    params.scale = 0.4f;
    params.metadata = metadata_;
    params.unit_of_head = value_units_.data();
    params.mass.most_rows = kEvery;
    params.mass.most_weights = run_.keeps_weights ? 4096 : 0;
    PlaceWeights(kHeads, params.mass.most_weights, kPageTokens,
                 absl::MakeSpan(&sequence, 1));
    params.sequences = &sequence;
    params.num_sequences = 1;
    KVASIR_EXPECT_OK(AttendOnDevice(test_, params, test_.workspace()));
  }

  void Evict() {
    const Eviction eviction = {
        .num_slots = slots_,
        .kept = kKept,
        .sinks = 2,
        .recent = 10,
        .decay = 0.9f,
        .block_table = OnDevice<const int32_t>(table_.data()),
        .to_table = OnDevice<const int32_t>(table_.data())};
    const absl::StatusOr<EvictionStep> step =
        CheckEvictions(kUnits, {eviction});
    KVASIR_EXPECT_OK(step);
    std::vector<int32_t> kept(static_cast<size_t>(step->kept_slots));
    const EvictionRows rows = {OnDevice<const Eviction>(&eviction), 1,
                               OnDevice(kept.data())};
    KVASIR_EXPECT_OK(EvictSelect(test_.stream(), *eviction_, rows, *step,
                                 test_.workspace()));
    KVASIR_EXPECT_OK(
        EvictCompact(test_.stream(), *eviction_, rows, test_.workspace()));
    slots_ = kKept;
  }

  const Run run_;
  TestStream test_;
  TestPart key_;
  TestPart value_;
  SlotMetadataArgs metadata_;
  std::vector<char> memory_;
  std::vector<int32_t> table_;
  std::vector<int32_t> key_units_;
  std::vector<int32_t> value_units_;
  std::unique_ptr<PreparedKvAppend> append_;
  std::unique_ptr<PreparedEviction> eviction_;
  std::vector<float> out_;
  int64_t next_ = 0;
  int64_t slots_ = 0;
};

TEST(EvictStreamTest,
     ChunkSizeThreadsAndKeptWeightsDoNotChangeTheBitsOfALongStream) {
  EndlessText one({.keeps_weights = true});
  EndlessText again({.threads = 3, .most_tokens = kEvery});
  EndlessText mixed({.threads = 2, .keeps_weights = true, .most_tokens = 3});
  for (int64_t tokens = 77; tokens < kTokens; tokens += 77) {
    one.RunTo(tokens);
    again.RunTo(tokens);
    mixed.RunTo(tokens);
    const std::vector<float> state = one.State();
    ASSERT_TRUE(SameBits(state, again.State())) << tokens;
    ASSERT_TRUE(SameBits(state, mixed.State())) << tokens;
  }
}

TEST(EvictStreamTest, TheReferenceAndTheSimdKernelsKeepTheSameTokens) {
  EndlessText reference({.backend = CpuBackend::kReference, .most_tokens = 5});
  EndlessText simd({.keeps_weights = true, .most_tokens = 2});
  reference.RunTo(300);
  simd.RunTo(300);
  EXPECT_TRUE(SameBits(reference.State(), simd.State()));
}

TEST(EvictStreamTest, SinkTokensAndTheLatestTokensAreKeptInOrder) {
  EndlessText stream({.most_tokens = 7});
  for (int64_t tokens = 4 * kEvery; tokens < 1500; tokens += kEvery) {
    stream.RunTo(tokens);
    ASSERT_EQ(stream.slots(), kKept);
    std::vector<uint32_t> middle[kUnits];
    for (int64_t u = 0; u < kUnits; ++u) {
      const std::vector<uint32_t> positions = stream.Positions(u);
      EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
      EXPECT_EQ(positions[0], 0);
      EXPECT_EQ(positions[1], 1);
      for (int64_t i = 1; i <= 10; ++i) {
        EXPECT_EQ(positions[static_cast<size_t>(kKept - i)], tokens - i);
      }
      middle[u] = positions;
    }
    EXPECT_NE(middle[0], middle[1]);
  }
}

}  // namespace
}  // namespace kvasir::kernels
