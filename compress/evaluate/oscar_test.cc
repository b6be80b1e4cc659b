#include "compress/evaluate/oscar.h"

#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "compress/evaluate/cache_transforms.h"
#include "compress/testing/test_decoder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::compress {
namespace {

at::Tensor Ids(int64_t sequences, int64_t length) {
  return (at::arange(sequences * length) * 7 % 31).view({sequences, length});
}

double Greatest(const at::Tensor& x) { return x.abs().max().item<double>(); }

// Records the attention inputs of each layer and changes nothing.
struct Recorder : public CacheTransform {
  struct Layer {
    at::Tensor query;
    at::Tensor key;
    at::Tensor value;
  };
  explicit Recorder(std::map<int64_t, Layer>* layers) : seen(layers) {}
  absl::StatusOr<Seen> RotatedKey(int64_t layer, const at::Tensor& key,
                                  const at::Tensor& query) const override {
    (*seen)[layer].query = query;
    (*seen)[layer].key = key;
    return Seen{key, 0};
  }
  absl::StatusOr<Seen> Value(int64_t layer,
                             const at::Tensor& value) const override {
    (*seen)[layer].value = value;
    return Seen{value, 0};
  }
  std::map<int64_t, Layer>* seen;
};

// Random second moments [H, D, D].
at::Tensor Moments(int64_t heads, int64_t dim) {
  const at::Tensor rows = at::randn({heads, 3 * dim, dim}, at::kDouble);
  return at::matmul(rows.transpose(1, 2), rows);
}

// Adds the outer products of the queries and outputs of KV head `head` by
// loops, one query after the other.
OscarSums SumsByLoops(const Recorder::Layer& layer, int64_t head,
                      int64_t sliding_window) {
  const int64_t dim = layer.key.size(3);
  OscarSums sums{at::zeros({dim, dim}, at::kDouble),
                 at::zeros({dim, dim}, at::kDouble)};
  const auto row = [](const at::Tensor& heads, int64_t token, int64_t h) {
    return heads[0][token][h].to(at::kDouble);
  };
  for (int64_t q = 2 * head; q < 2 * head + 2; ++q) {
    for (int64_t t = 0; t < layer.key.size(1); ++t) {
      const at::Tensor query = row(layer.query, t, q);
      at::Tensor mixed = at::zeros({dim}, at::kDouble);
      double weights = 0.0;
      for (int64_t s = 0; s <= t; ++s) {
        if (sliding_window > 0 && s <= t - sliding_window) continue;
        const double weight =
            std::exp(at::dot(query, row(layer.key, s, head)).item<double>() /
                     std::sqrt(static_cast<double>(dim)));
        mixed += row(layer.value, s, head) * weight;
        weights += weight;
      }
      mixed /= weights;
      sums.query += at::outer(query, query);
      sums.output += at::outer(mixed, mixed);
    }
  }
  return sums;
}

TEST(OscarTest, TheSumsOfAKvHeadAreOverAllQueriesAndOutputsOfItsQueryHeads) {
  model::DecoderSpec spec = TestSpec();
  spec.layers[1].sliding_window = 5;
  const ReferenceDecoder decoder = TestDecoder(1, std::nullopt, spec);
  const auto sums = MeasureOscarSums(decoder, Ids(2, 12));
  KVASIR_ASSERT_OK(sums);
  ASSERT_EQ(sums->size(), 2u);
  std::vector<std::map<int64_t, Recorder::Layer>> sequences(2);
  for (int64_t i = 0; i < 2; ++i) {
    const Recorder recorder(&sequences[static_cast<size_t>(i)]);
    KVASIR_ASSERT_OK(decoder.LastHidden(Ids(2, 12).slice(0, i, i + 1),
                                        {.transform = &recorder}));
  }
  for (int64_t layer = 0; layer < 2; ++layer) {
    const OscarSums& have = (*sums)[static_cast<size_t>(layer)];
    for (int64_t head = 0; head < 2; ++head) {
      const int64_t window = layer == 1 ? 5 : 0;
      const OscarSums first = SumsByLoops(sequences[0][layer], head, window);
      const OscarSums second = SumsByLoops(sequences[1][layer], head, window);
      EXPECT_TRUE(
          at::allclose(have.query[head], first.query + second.query, 1e-4));
      EXPECT_TRUE(
          at::allclose(have.output[head], first.output + second.output, 1e-4));
    }
  }
}

TEST(OscarTest, TheSumsDoNotDependOnTheNumberOfThreads) {
  const ReferenceDecoder decoder = TestDecoder(1, std::nullopt, TestSpec());
  const auto one = MeasureOscarSums(decoder, Ids(5, 12), 1);
  KVASIR_ASSERT_OK(one);
  for (const int threads : {2, 3, 8}) {
    const auto sums = MeasureOscarSums(decoder, Ids(5, 12), threads);
    KVASIR_ASSERT_OK(sums);
    for (size_t layer = 0; layer < 2; ++layer) {
      EXPECT_TRUE(at::equal((*sums)[layer].query, (*one)[layer].query));
      EXPECT_TRUE(at::equal((*sums)[layer].output, (*one)[layer].output));
    }
  }
}

TEST(OscarTest, TheRotationIsOrthogonalAndMakesAllChannelsEquallyImportant) {
  at::manual_seed(1);
  for (const int64_t dim : {1, 2, 8, 64}) {
    const at::Tensor moments = Moments(3, dim);
    const at::Tensor turn = OscarRotation(moments);
    const at::Tensor back = turn.transpose(1, 2);
    EXPECT_LT(Greatest(at::matmul(back, turn) - at::eye(dim)), 1e-12) << dim;
    const at::Tensor importance =
        at::matmul(back, at::matmul(moments, turn)).diagonal(0, 1, 2);
    const at::Tensor mean = importance.mean(1, /*keepdim=*/true);
    EXPECT_LT(Greatest(importance / mean - 1.0), 1e-10) << dim;
  }
}

// With these diagonal moments, U only changes the signs of rows of H. The sign
// cancels in the product of two numbers of a row.
TEST(OscarTest, ColumnsOfTheHadamardMatrixAreInBitReversedOrder) {
  const int64_t reversed[] = {0, 4, 2, 6, 1, 5, 3, 7};
  const at::Tensor energies =
      at::tensor({80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0}, at::kDouble);
  const at::Tensor turn = OscarRotation(at::diag(energies).unsqueeze(0))[0];
  for (int64_t row = 0; row < 8; ++row) {
    for (int64_t i = 0; i < 8; ++i) {
      const double sign =
          __builtin_popcountll(static_cast<uint64_t>(row & i)) % 2 == 0 ? 1.0
                                                                        : -1.0;
      EXPECT_NEAR((turn[row][0] * turn[row][reversed[i]]).item<double>(),
                  sign / 8.0, 1e-12)
          << row << " " << i;
    }
  }
}

TEST(OscarTest, TheLargestNumbersOfARowAreClippedBeforeItIsCoded) {
  const at::Tensor unit = at::eye(8).unsqueeze(0);
  const at::Tensor row =
      at::tensor({0.5, -1.0, 2.0, -3.0, 1.0, 9.0, -0.5, -20.0}, at::kFloat)
          .view({1, 1, 1, 8});
  const at::Tensor clipped =
      at::tensor({0.5, -1.0, 2.0, -3.0, 1.0, 3.0, -0.5, -3.0}, at::kFloat)
          .view({1, 1, 1, 8});
  // The share 0.7 of 8 numbers is 5.6, so the limit is the magnitude at index 5
  // of the sorted ones.
  const auto transform =
      MakeOscar({{unit, unit}},
                {.bits = 8, .group = 4, .key_clip = 0.7, .value_clip = 1.0});
  const auto key = transform->RotatedKey(0, row, row);
  const auto value = transform->Value(0, row);
  const auto want_key = CodeRange(clipped, 8, 4);
  const auto want_value = CodeRange(row, 8, 4);
  KVASIR_ASSERT_OK(key);
  KVASIR_ASSERT_OK(value);
  KVASIR_ASSERT_OK(want_key);
  KVASIR_ASSERT_OK(want_value);
  EXPECT_TRUE(at::equal(key->values, *want_key));
  EXPECT_TRUE(at::equal(value->values, *want_value));
}

TEST(OscarTest,
     WithADominantKeyChannelOscarHasASmallerScoreErrorThanPerTokenCodes) {
  at::manual_seed(2);
  const int64_t dim = 64;
  at::Tensor key = at::randn({1, 200, 2, dim});
  key.select(3, 5).add_(30.0);
  const at::Tensor query =
      at::matmul(at::randn({1, 200, 2, dim}), at::randn({dim, dim}));
  const at::Tensor rows = query[0].transpose(0, 1).to(at::kDouble);
  const at::Tensor turn = OscarRotation(at::matmul(rows.transpose(1, 2), rows));
  const auto transform = MakeOscar({{turn, turn}}, {.bits = 2, .group = dim});
  const auto rotated = transform->RotatedKey(0, key, query);
  const auto plain = CodeRange(key, 2);
  KVASIR_ASSERT_OK(rotated);
  KVASIR_ASSERT_OK(plain);
  const auto score_error = [&](const at::Tensor& coded) {
    return at::einsum("qhd,khd->hqk", {query[0], (coded - key)[0]})
        .pow(2)
        .mean()
        .item<double>();
  };
  EXPECT_LT(score_error(rotated->values), 0.5 * score_error(*plain));
}

}  // namespace
}  // namespace kvasir::compress
