#include "compress/oracle/evicting_attention.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "base/error_byte.h"
#include "cache/testing/eviction_reference.h"
#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kShare = 2;
constexpr int64_t kWidth = 6;

AttentionInputs Inputs(int64_t batch, int64_t length) {
  at::manual_seed(5);
  AttentionInputs in;
  in.query = at::randn({batch, length, kHeads * kShare, kWidth});
  in.key = at::randn({batch, length, kHeads, kWidth});
  in.value = at::randn({batch, length, kHeads, 5});
  return in;
}

EvictionRule Rule(std::vector<std::vector<int64_t>> units, int64_t budget,
                  int64_t every) {
  EvictionRule rule;
  rule.layer.slots.units = std::move(units);
  rule.layer.slots.sinks = 2;
  rule.layer.slots.recent = 3;
  rule.layer.slots.lambda = 0.5F;
  rule.layer.counts = {.budget_tokens = budget, .every_tokens = every};
  return rule;
}

using Kept = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

// Computes the attention of sequence 0 in float64 and without blocks: for each
// unit, token and head in turn. The slots are chosen by
// cache::EvictionReference, a simple implementation of the policy.
at::Tensor TokenByToken(const AttentionInputs& in,
                        const EvictionInputs& eviction, Kept* kept) {
  const EvictionRule& rule = *eviction.rule;
  const auto wide = [](const at::Tensor& t) {
    return t.defined() ? t[0].to(at::kDouble) : t;
  };
  const at::Tensor query = wide(in.query);
  const at::Tensor key = wide(in.key);
  const at::Tensor value = wide(in.value);
  const at::Tensor near_key = wide(in.near_key);
  const at::Tensor near_value = wide(in.near_value);
  const int64_t length = query.size(0);
  const int64_t prompt = rule.prompt_tokens > 0 ? rule.prompt_tokens : length;
  at::Tensor out =
      at::zeros({length, query.size(1), value.size(2)}, at::kDouble);
  for (size_t u = 0; u < rule.layer.slots.units.size(); ++u) {
    const std::vector<int64_t>& heads = rule.layer.slots.units[u];
    cache::EvictionReference held(rule.layer.slots, rule.layer.counts, prompt);
    const auto error = [&](const at::Tensor& squares, int64_t t) {
      float sum = 0;
      if (!squares.defined()) return sum;
      for (const int64_t head : heads) sum += squares[0][t][head].item<float>();
      return base::DecodeError(base::EncodeError(std::sqrt(sum)));
    };
    for (int64_t t = 0; t < length; ++t) {
      const bool went = !held.Append(error(eviction.key_error, t),
                                     error(eviction.value_error, t))
                             .empty();
      std::vector<int64_t> positions;
      for (const auto& slot : held.slots()) positions.push_back(slot.position);
      if (went) {
        (*kept)[{static_cast<int64_t>(u), t}] = {positions.begin(),
                                                 positions.end() - 1};
      }
      const auto slots = static_cast<int64_t>(positions.size());
      for (const int64_t head : heads) {
        std::vector<at::Tensor> keys;
        std::vector<at::Tensor> values;
        for (const int64_t p : positions) {
          const at::Tensor& k = p > t - in.near_key_tokens ? near_key : key;
          const at::Tensor& v =
              p > t - in.near_value_tokens ? near_value : value;
          keys.push_back(k[p][head]);
          values.push_back(v[p][head]);
        }
        for (int64_t q = head * kShare; q < (head + 1) * kShare; ++q) {
          const at::Tensor weights =
              at::softmax(at::mv(at::stack(keys), query[t][q]), 0);
          out[t][q].copy_(at::mv(at::stack(values).t(), weights));
          const int64_t window = rule.layer.counts.observation_window;
          if (window > 0 && t < prompt) {
            // Finds the position of the next eviction, or the end of the
            // prompt.
            int64_t until = t + 1;
            while (until < prompt &&
                   (until <= rule.layer.counts.budget_tokens ||
                    until % rule.layer.counts.every_tokens != 0)) {
              ++until;
            }
            if (t < until - window) continue;
          }
          for (int64_t s = 0; s < slots; ++s) {
            held.slots()[static_cast<size_t>(s)].mass +=
                weights[s].item<float>();
          }
        }
      }
    }
  }
  return out.unsqueeze(0);
}

void ExpectTokenByToken(const AttentionInputs& in, EvictionInputs eviction) {
  Kept have;
  eviction.on_kept = [&have](int64_t batch, int64_t unit, int64_t length,
                             const std::vector<int64_t>& positions) {
    if (batch == 0) have[{unit, length}] = positions;
  };
  const at::Tensor out = EvictingAttention(in, eviction).to(at::kDouble);
  Kept want;
  const at::Tensor plain = TokenByToken(in, eviction, &want);
  EXPECT_FALSE(want.empty());
  EXPECT_EQ(have, want);
  EXPECT_LT((out[0] - plain[0]).abs().max().item<double>(), 1e-5);
}

TEST(EvictingAttentionTest, TheResultEqualsATokenByTokenRunOfThePolicy) {
  const AttentionInputs in = Inputs(2, 90);
  at::Tensor key_error = at::rand({2, 90, kHeads});
  at::Tensor value_error = at::rand({2, 90, kHeads});
  for (const auto& units : std::vector<std::vector<std::vector<int64_t>>>{
           {{0}, {1}, {2}, {3}}, {{0, 3}, {1, 2}}, {{0, 1, 2, 3}}}) {
    EvictionRule rule = Rule(units, 17, 8);
    ExpectTokenByToken(in, {.rule = &rule});
    rule.prompt_tokens = 37;
    ExpectTokenByToken(
        in,
        {.rule = &rule, .key_error = key_error, .value_error = value_error});
    rule.layer.slots.decay = 0.5F;
    rule.layer.counts.observation_window = 3;
    ExpectTokenByToken(in, {.rule = &rule, .key_error = key_error});
    rule.layer.slots.scored = false;
    ExpectTokenByToken(in, {.rule = &rule});
  }
}

// Errors that differ by 2 % are rounded to the same byte. The lower slot must
// then be kept, even if the error of the other slot is smaller.
TEST(EvictingAttentionTest, CodeErrorsAreRoundedToOneByte) {
  AttentionInputs in = Inputs(1, 12);
  EvictionRule rule = Rule({{0, 1, 2, 3}}, 4, 12);
  rule.layer.slots.sinks = 0;
  rule.layer.slots.recent = 2;
  rule.layer.slots.lambda = 0;
  rule.prompt_tokens = 11;
  const auto squares = [](float error) { return error * error / kHeads; };
  at::Tensor key_error = at::full({1, 12, kHeads}, squares(8));
  key_error[0][3].fill_(squares(1.02F));
  key_error[0][5].fill_(squares(1.01F));
  key_error[0][7].fill_(squares(1.0F));
  std::vector<int64_t> kept;
  EvictionInputs eviction{.rule = &rule, .key_error = key_error};
  eviction.on_kept = [&kept](int64_t, int64_t, int64_t,
                             const std::vector<int64_t>& positions) {
    kept = positions;
  };
  EvictingAttention(in, eviction);
  EXPECT_EQ(kept, (std::vector<int64_t>{3, 5, 9, 10}));
}

TEST(EvictingAttentionTest,
     QueriesStillSeeTheNearestTokensExactlyIfTokensAreEvicted) {
  AttentionInputs in = Inputs(1, 60);
  in.near_key = at::randn_like(in.key);
  in.near_value = at::randn_like(in.value);
  in.near_key_tokens = 3;
  in.near_value_tokens = 2;
  const EvictionRule rule = Rule({{0, 1}, {2, 3}}, 10, 4);
  ExpectTokenByToken(in, {.rule = &rule});
}

TEST(EvictingAttentionTest,
     EvictionsAtEveryTokenOrFarApartEqualATokenByTokenRun) {
  const EvictionRule each = Rule({{0, 1, 2, 3}}, 6, 1);
  ExpectTokenByToken(Inputs(1, 25), {.rule = &each});
  const EvictionRule long_way = Rule({{0, 1, 2, 3}}, 20, 300);
  ExpectTokenByToken(Inputs(1, 310), {.rule = &long_way});
}

TEST(EvictingAttentionTest, WithABudgetOfTheWholeLengthNothingIsEvicted) {
  const AttentionInputs in = Inputs(2, 70);
  const EvictionRule rule = Rule({{0, 2}, {1, 3}}, 70, 4);
  const at::Tensor have = EvictingAttention(in, {.rule = &rule});
  EXPECT_LT((have - CausalAttention(in)).abs().max().item<double>(), 1e-5);
}

TEST(EvictingAttentionTest, ARandomScoreIsDrawnOncePerToken) {
  const AttentionInputs in = Inputs(1, 64);
  EvictionRule rule = Rule({{0, 1}, {2, 3}}, 12, 1);
  rule.random_seed = 9;
  std::vector<int64_t> last;
  EvictionInputs eviction{.rule = &rule};
  eviction.on_kept = [&](int64_t, int64_t unit, int64_t length,
                         const std::vector<int64_t>& positions) {
    if (unit != 0) return;
    EXPECT_EQ(positions.size(), 12u);
    // The unit may keep the newest token and tokens that it kept before, but no
    // others.
    for (const int64_t position : positions) {
      if (position < length - 1 && !last.empty()) {
        EXPECT_TRUE(std::binary_search(last.begin(), last.end(), position));
      }
    }
    last = positions;
  };
  EvictingAttention(in, eviction);
  // The unit keeps two sinks, three recent tokens, and seven random tokens
  // between them.
  ASSERT_EQ(last.size(), 12u);
  EXPECT_EQ(last[1], 1);
  EXPECT_EQ(last[9], 60);
  EXPECT_LT(last[5], 55);
}

}  // namespace
}  // namespace kvasir::compress
