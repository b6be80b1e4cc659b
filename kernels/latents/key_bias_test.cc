#include <gmock/gmock.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/status_macros.h"
#include "kernels/latents/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

struct Shape {
  int64_t num_heads = 6;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 40;
  int64_t tile_pairs = 9;
  int64_t exact_pairs = 3;
};

// A layer's rows, [T, row_stride]. They have queries, keys, the queries'
// numbers for the key bias, and some unused columns.
struct Layer {
  Shape shape;
  KeyBiasParams params;
  std::vector<int64_t> key_column;
  std::vector<int64_t> query_column;
  std::vector<int64_t> out_column;
  std::vector<KeyBiasPair> pairs;
  std::vector<double> radians;
  std::vector<int64_t> positions;
  std::vector<float> rows;

  explicit Layer(const Shape& of, std::vector<int64_t> at, float bias = 5.0f)
      : shape(of), positions(std::move(at)) {
    int64_t column = 2;
    const auto place = [&](int64_t heads, int64_t width,
                           std::vector<int64_t>* columns) {
      for (int64_t h = 0; h < heads; ++h, column += width + 1) {
        columns->push_back(column);
      }
    };
    place(of.num_heads, of.head_dim, &query_column);
    place(of.num_kv_heads, of.head_dim, &key_column);
    place(of.num_heads, KeyBiasColumns(of.tile_pairs, of.exact_pairs),
          &out_column);
    const int64_t pairs_of_head = of.tile_pairs + of.exact_pairs;
    const std::vector<float> biases =
        RandomFloats(of.num_kv_heads * pairs_of_head * 2, 3, bias);
    for (int64_t j = 0; j < of.num_kv_heads; ++j) {
      for (int64_t p = 0; p < pairs_of_head; ++p) {
        const auto i = pairs.size();
        radians.push_back(p < of.tile_pairs
                              ? 0.003 / static_cast<double>(p + j + 1)
                              : 0.7 / static_cast<double>(p + j + 1));
        pairs.push_back({static_cast<int32_t>(p + j),
                         static_cast<int32_t>(of.head_dim - 1 - p),
                         biases[2 * i], biases[2 * i + 1],
                         RopeStep(radians.back())});
      }
    }
    params.row_stride = column;
    params.num_heads = of.num_heads;
    params.num_kv_heads = of.num_kv_heads;
    params.tile_pairs = of.tile_pairs;
    params.exact_pairs = of.exact_pairs;
    rows = RandomFloats(static_cast<int64_t>(positions.size()) * column, 4);
    for (size_t t = 0; t < positions.size(); ++t) {
      for (const int64_t begin : out_column) {
        std::fill_n(rows.begin() + static_cast<int64_t>(t) * column + begin,
                    KeyBiasColumns(of.tile_pairs, of.exact_pairs), kPoison);
      }
    }
  }
  KeyBiasTables tables() const {
    return {key_column, query_column, out_column, pairs};
  }
};

absl::Status RunOp(TestStream& test, Layer* layer) {
  KVASIR_ASSIGN_OR_RETURN(
      const PreparedKeyBias prepared,
      Prepare(test.device(), layer->params, layer->tables()));
  return KeyBias(
      test.stream(), prepared,
      {OnDevice(layer->rows.data()), OnDevice(layer->positions.data()),
       static_cast<int64_t>(layer->positions.size())},
      test.workspace());
}

// Returns the rows that the definition in key_bias.h gives, computed in
// float64.
std::vector<double> Expected(const Layer& layer) {
  const Shape& shape = layer.shape;
  std::vector<double> rows(layer.rows.begin(), layer.rows.end());
  const int64_t of_head = shape.tile_pairs + shape.exact_pairs;
  for (size_t t = 0; t < layer.positions.size(); ++t) {
    const auto n = static_cast<double>(layer.positions[t]);
    const double a = std::floor(n / 64) * 64 + 32;
    double* row =
        rows.data() + static_cast<int64_t>(t) * layer.params.row_stride;
    for (int64_t i = 0; i < shape.num_kv_heads * of_head; ++i) {
      const KeyBiasPair& pair = layer.pairs[static_cast<size_t>(i)];
      const int64_t j = i / of_head;
      const int64_t p = i % of_head;
      const auto b0 = static_cast<double>(pair.bias_first);
      const auto b1 = static_cast<double>(pair.bias_second);
      const double step = layer.radians[static_cast<size_t>(i)];
      if (p < shape.tile_pairs) {
        const double c = std::cos(step * n) - std::cos(step * a);
        const double s = std::sin(step * n) - std::sin(step * a);
        double* key = row + layer.key_column[static_cast<size_t>(j)];
        key[pair.first] += b0 * c - b1 * s;
        key[pair.second] += b1 * c + b0 * s;
      }
      const int64_t share = shape.num_heads / shape.num_kv_heads;
      for (int64_t h = j * share; h < (j + 1) * share; ++h) {
        const double* q = row + layer.query_column[static_cast<size_t>(h)];
        double* out = row + layer.out_column[static_cast<size_t>(h)];
        const bool tile = p < shape.tile_pairs;
        double* u = tile ? out + p
                         : out + KeyBiasTileColumns(shape.tile_pairs) +
                               2 * (p - shape.tile_pairs);
        u[0] = q[pair.first] * b0 + q[pair.second] * b1;
        u[tile ? shape.tile_pairs : 1] =
            q[pair.second] * b0 - q[pair.first] * b1;
      }
    }
    for (const int64_t begin : layer.out_column) {
      for (int64_t i = 2 * shape.tile_pairs;
           i < KeyBiasTileColumns(shape.tile_pairs); ++i) {
        row[begin + i] = 0.0;
      }
    }
  }
  return rows;
}

const std::vector<Shape> kShapes = {{},
                                    {1, 1, 8, 2, 1},
                                    {4, 4, 64, 0, 4},
                                    {4, 1, 64, 16, 0},
                                    {3, 3, 256, 100, 8}};

TEST(KeyBiasTest, TheKeyBiasMatchesItsDefinitionOnAllBackEnds) {
  for (const Shape& shape : kShapes) {
    for (const std::vector<int64_t>& positions :
         {std::vector<int64_t>{}, std::vector<int64_t>{5},
          std::vector<int64_t>{0, 31, 32, 63, 64, 1000, 131072, 9'999'999}}) {
      const Layer layer(shape, positions);
      const std::vector<double> expected = Expected(layer);
      Layer truth = layer;
      TestStream reference(1, CpuBackend::kReference);
      KVASIR_EXPECT_OK(RunOp(reference, &truth));
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(static_cast<double>(truth.rows[i]), expected[i], 1e-5) << i;
      }
      ForEachSimdTarget([&] {
        for (const int threads : {1, 3}) {
          TestStream test(threads);
          Layer own = layer;
          KVASIR_EXPECT_OK(RunOp(test, &own));
          EXPECT_TRUE(SameBits(truth.rows, own.rows));
        }
      });
    }
  }
}

TEST(KeyBiasTest, TheUnitScalesTheNumbersOfAQueryButNotTheKey) {
  for (const float unit : {0.25f, 1024.0f}) {
    const Layer layer(Shape(), {5, 100, 131072});
    Layer one = layer;
    TestStream reference(1, CpuBackend::kReference);
    KVASIR_EXPECT_OK(RunOp(reference, &one));
    for (const int64_t begin : layer.out_column) {
      for (size_t t = 0; t < layer.positions.size(); ++t) {
        float* const numbers =
            one.rows.data() +
            static_cast<int64_t>(t) * layer.params.row_stride + begin;
        const int64_t count =
            KeyBiasColumns(layer.params.tile_pairs, layer.params.exact_pairs);
        for (int64_t i = 0; i < count; ++i) numbers[i] /= unit;
      }
    }
    for (const CpuBackend backend :
         {CpuBackend::kReference, CpuBackend::kSimd}) {
      Layer own = layer;
      own.params.unit = unit;
      for (KeyBiasPair& pair : own.pairs) {
        pair.bias_first /= unit;
        pair.bias_second /= unit;
      }
      TestStream test(1, backend);
      KVASIR_EXPECT_OK(RunOp(test, &own));
      EXPECT_TRUE(SameBits(one.rows, own.rows));
    }
  }
}

TEST(KeyBiasTest, ManyTokensOnManyThreadsGiveTheSameBits) {
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < 150; ++t) positions.push_back(3 * t);
  const Layer layer(Shape(), positions);
  Layer truth = layer;
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(RunOp(reference, &truth));
  Layer own = layer;
  TestStream test(3);
  KVASIR_EXPECT_OK(RunOp(test, &own));
  EXPECT_TRUE(SameBits(truth.rows, own.rows));
}

TEST(KeyBiasTest, AtTheCentreOfATileEvenALargeBiasDoesNotChangeAKey) {
  const Layer layer({1, 1, 8, 1, 0}, {31, 32}, 1000.0f);
  Layer own = layer;
  TestStream test(1);
  KVASIR_EXPECT_OK(RunOp(test, &own));
  const auto key =
      static_cast<size_t>(layer.params.row_stride + layer.key_column[0]);
  for (size_t i = key; i < key + 8; ++i) {
    EXPECT_EQ(own.rows[i], layer.rows[i]);
  }
}

TEST(KeyBiasTest, TheErrorNamesTheInvalidField) {
  TestStream test(1);
  const auto refuses = [&](auto change, const char* text) {
    Layer layer(Shape(), {1, 2});
    change(&layer);
    EXPECT_THAT(
        RunOp(test, &layer),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refuses([](Layer* l) { l->params.num_heads = 5; },
          "the number of query heads must be a positive multiple of the number "
          "of KV heads, 2, but is 5");
  refuses([](Layer* l) { l->params.tile_pairs = -1; },
          "tile_pairs: must be at least 0, but is -1");
  refuses([](Layer* l) { l->params.exact_pairs = 9; },
          "exact_pairs must be from 0 to 8, but is 9");
  refuses([](Layer* l) { l->params.unit = 3.0f; },
          "unit must be a power of two, but is 3");
  refuses([](Layer* l) { l->params.unit = std::nanf(""); },
          "unit must be a power of two, but is nan");
  refuses([](Layer* l) { l->pairs.pop_back(); },
          "there must be 24 pairs, but there are 23");
  refuses([](Layer* l) { l->pairs[1].second = -4; },
          "index in a pair: must be at least 0, but is -4");
  refuses([](Layer* l) { l->key_column.pop_back(); },
          "key_column must have an entry for each of 2 heads, but has 1");
  refuses([](Layer* l) { l->query_column[0] = -2; },
          "query_column: must be at least 0, but is -2");
  refuses([](Layer* l) { l->params.row_stride = 100; },
          "row_stride: must be at least ");
}

}  // namespace
}  // namespace kvasir::kernels
