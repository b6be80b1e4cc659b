#include "model/checkpoint/random_weights.h"

#include <cmath>

#include "gtest/gtest.h"
#include "model/checkpoint/plan_tensors.h"

namespace kvasir::model {
namespace {

RandomTensor Matrix(const char* name, double deviation) {
  return {name, {100, 1000}, RandomKind::kNormal, deviation};
}

std::vector<float> Fill(const RandomTensor& tensor, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
  FillRandom(tensor, seed, 0, values);
  return values;
}

TEST(RandomWeightsTest, RandomWeightsHaveTheRequestedMeanAndDeviation) {
  double sum = 0.0;
  double squares = 0.0;
  double fourths = 0.0;
  const std::vector<float> values = Fill(Matrix("a", 0.25), 1);
  for (const float value : values) {
    sum += value;
    squares += std::pow(value, 2);
    fourths += std::pow(value, 4);
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0.0, 0.004);
  EXPECT_NEAR(std::sqrt(squares / count), 0.25, 0.003);
  // The kurtosis is 3 for a normal distribution, 1.8 for a uniform one, and 2.7
  // for the sum of four uniform numbers.
  EXPECT_NEAR(fourths * count / (squares * squares), 2.7, 0.06);
}

TEST(RandomWeightsTest,
     RandomElementsDoNotDependOnTheSizeOfThePiecesThatAreFilled) {
  const RandomTensor tensor = Matrix("a", 1.0);
  const std::vector<float> whole = Fill(tensor, 7);
  for (const int64_t begin : {0, 1, 2, 501, 99998, 99999}) {
    for (const size_t length : {size_t{1}, size_t{2}}) {
      if (static_cast<size_t>(begin) + length > whole.size()) continue;
      std::vector<float> part(length);
      FillRandom(tensor, 7, begin, part);
      for (size_t i = 0; i < length; ++i) {
        EXPECT_EQ(part[i], whole[static_cast<size_t>(begin) + i])
            << begin << " + " << i;
      }
    }
  }
}

TEST(RandomWeightsTest, RandomWeightsDependOnTheSeedAndTheTensorsName) {
  EXPECT_EQ(Fill(Matrix("a", 1.0), 7), Fill(Matrix("a", 1.0), 7));
  EXPECT_NE(Fill(Matrix("a", 1.0), 7), Fill(Matrix("a", 1.0), 8));
  EXPECT_NE(Fill(Matrix("a", 1.0), 7), Fill(Matrix("b", 1.0), 7));
}

TEST(RandomWeightsTest, AllRandomWeightsOfANormAreOne) {
  const RandomTensor norm{"n", {3}, RandomKind::kOnes, 0.0};
  EXPECT_EQ(Fill(norm, 1), (std::vector<float>{1.0F, 1.0F, 1.0F}));
}

// In GPT-NeoX's fused tensor, each head has three blocks of rows: queries, keys
// and values. This test compares the rows of the keys.
TEST(RandomWeightsTest, RandomKeyWeightsEqualTheirRowsInTheFusedTensor) {
  const ModelShape shape = {.name = "small",
                            .family = Family::kNeox,
                            .num_layers = 1,
                            .hidden_size = 12,
                            .intermediate_size = 8,
                            .num_query_heads = 3,
                            .num_kv_heads = 3,
                            .head_dim = 4,
                            .vocab_size = 10,
                            .max_position = 16,
                            .rotary_part = 0.5,
                            .qkv_bias = true};
  DecoderSpec spec;
  spec.model_type = "gpt_neox";
  spec.hidden_size = 12;
  spec.num_heads = spec.num_kv_heads = 3;
  spec.head_dim = 4;
  spec.intermediate_size = 8;
  spec.vocab_size = 10;
  spec.norm = NormKind::kLayerNorm;
  spec.mlp = MlpKind::kGelu;
  spec.qkv_bias = spec.o_bias = spec.mlp_bias = true;
  spec.layers.resize(1);
  const auto find = [](const std::vector<RandomTensor>& tensors,
                       const std::string& name) {
    for (const RandomTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << name;
    return RandomTensor{};
  };
  const std::vector<RandomTensor> ours = RandomTensorsOf(shape, spec);
  EXPECT_EQ(ours.size(), RequiredTensors(spec).size());
  const auto fused =
      Fill(find(RandomTensorsOf(shape),
                "gpt_neox.layers.0.attention.query_key_value.weight"),
           7);
  const RandomTensor key = find(ours, "model.layers.0.self_attn.k_proj.weight");
  const std::vector<float> values = Fill(key, 7);
  for (size_t row = 0; row < 12; ++row) {
    const size_t stored = row / 4 * 12 + 4 + row % 4;
    for (size_t i = 0; i < 12; ++i) {
      ASSERT_EQ(values[row * 12 + i], fused[stored * 12 + i]) << row;
    }
  }
  std::vector<float> piece(30);
  FillRandom(key, 7, 41, piece);
  for (size_t i = 0; i < piece.size(); ++i) ASSERT_EQ(piece[i], values[41 + i]);
}

}  // namespace
}  // namespace kvasir::model
