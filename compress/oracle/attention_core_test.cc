#include "compress/oracle/attention_core.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

// Computes attention in float64, query by query and head by head.
at::Tensor PlainAttention(const AttentionInputs& in) {
  const int64_t share = in.query.size(2) / in.key.size(2);
  const auto wide = [](const at::Tensor& t) {
    return t.defined() ? t.to(at::kDouble) : t;
  };
  const at::Tensor query = wide(in.query);
  const at::Tensor key = wide(in.key);
  const at::Tensor value = wide(in.value);
  const at::Tensor near_key = wide(in.near_key);
  const at::Tensor near_value = wide(in.near_value);
  at::Tensor out =
      at::zeros({query.size(0), query.size(1), query.size(2), value.size(3)},
                at::kDouble);
  for (int64_t b = 0; b < query.size(0); ++b) {
    for (int64_t t = 0; t < query.size(1); ++t) {
      const int64_t first =
          in.sliding_window > 0
              ? std::max<int64_t>(0, t - in.sliding_window + 1)
              : 0;
      const auto rows = [&](const at::Tensor& far, const at::Tensor& near,
                            int64_t window, int64_t head) {
        at::Tensor seen = far[b].slice(0, first, t + 1).select(1, head).clone();
        const int64_t exact = std::min(window, t + 1 - first);
        if (exact > 0) {
          seen.slice(0, t + 1 - first - exact)
              .copy_(near[b].slice(0, t + 1 - exact, t + 1).select(1, head));
        }
        return seen;
      };
      for (int64_t h = 0; h < query.size(2); ++h) {
        const at::Tensor keys =
            rows(key, near_key, in.near_key_tokens, h / share);
        const at::Tensor values =
            rows(value, near_value, in.near_value_tokens, h / share);
        const at::Tensor weights = at::softmax(at::mv(keys, query[b][t][h]), 0);
        out[b][t][h].copy_(at::mv(values.t(), weights));
      }
    }
  }
  return out;
}

AttentionInputs Inputs(int64_t length) {
  at::manual_seed(3);
  AttentionInputs in;
  in.query = at::randn({1, length, 2, 3});
  in.key = at::randn({1, length, 1, 3});
  in.value = at::randn({1, length, 1, 5});
  return in;
}

void ExpectPlain(const AttentionInputs& in) {
  const at::Tensor have = CausalAttention(in).to(at::kDouble);
  EXPECT_LT((have - PlainAttention(in)).abs().max().item<double>(), 1e-5);
}

TEST(AttentionCoreTest, AttentionInBlocksOfQueriesEqualsAttentionInOnePiece) {
  ExpectPlain(Inputs(300));
}

TEST(AttentionCoreTest, ASlidingWindowHidesOlderTokens) {
  for (const int64_t window : {1, 7, 280}) {
    AttentionInputs in = Inputs(290);
    in.sliding_window = window;
    ExpectPlain(in);
  }
}

TEST(AttentionCoreTest, QueriesSeeTheKeysAndValuesOfTheNearestTokensExactly) {
  for (const int64_t window : {1, 5, 400}) {
    AttentionInputs in = Inputs(270);
    in.near_key = at::randn_like(in.key);
    in.near_value = at::randn_like(in.value);
    in.near_key_tokens = window;
    in.near_value_tokens = 2 * window;
    ExpectPlain(in);
    in.sliding_window = 9;
    ExpectPlain(in);
  }
}

}  // namespace
}  // namespace kvasir::compress
