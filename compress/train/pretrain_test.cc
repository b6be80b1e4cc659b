#include "compress/train/pretrain.h"

#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/status_matchers.h"
#include "compress/train/decoder.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

model::ModelShape TinyShape() {
  return {.name = "test",
          .num_layers = 2,
          .hidden_size = 24,
          .intermediate_size = 40,
          .num_query_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 8,
          .vocab_size = 19,
          .max_position = 512,
          .rope_theta = 100.0,
          .bos_token_id = 0,
          .eos_token_id = 1};
}

// A text whose next token follows from the last two.
TokenStream PredictableText(int64_t length) {
  TokenStream stream;
  int32_t a = 2;
  int32_t b = 3;
  for (int64_t i = 0; i < length; ++i) {
    stream.ids.push_back(b);
    const int32_t next = 2 + (a + 3 * b) % 17;
    a = b;
    b = next;
  }
  stream.text_bytes = 2 * length;
  return stream;
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

bool GoOn(const PretrainProgress&) { return true; }

// ------------------------------------------------- forward, in plain float64

using Vector = std::vector<double>;
using Rows = std::vector<Vector>;

class PlainDecoder {
 public:
  explicit PlainDecoder(const Decoder& decoder) : shape_(decoder.shape()) {
    for (const NamedTensor& parameter : decoder.parameters()) {
      const torch::Tensor values =
          parameter.tensor.detach().to(torch::kFloat64).contiguous();
      const double* data = values.data_ptr<double>();
      weights_[parameter.name] = Vector(data, data + values.numel());
    }
  }

  Rows Logits(const std::vector<int64_t>& ids) const {
    Rows hidden;
    for (const int64_t id : ids) hidden.push_back(EmbeddingOf(id));
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      AddAttention(prefix, hidden);
      AddMlp(prefix, hidden);
    }
    Rows logits;
    const char* head =
        shape_.tied_embedding ? "model.embed_tokens.weight" : "lm_head.weight";
    for (const Vector& row : hidden) {
      logits.push_back(Product(head, Normal("model.norm.weight", row)));
    }
    return logits;
  }

 private:
  const Vector& Weight(const std::string& name) const {
    return weights_.at(name);
  }

  Vector EmbeddingOf(int64_t id) const {
    const Vector& table = Weight("model.embed_tokens.weight");
    const auto begin = table.begin() + id * shape_.hidden_size;
    return Vector(begin, begin + shape_.hidden_size);
  }

  Vector Product(const std::string& name, const Vector& x) const {
    const Vector& weight = Weight(name);
    Vector out(weight.size() / x.size(), 0.0);
    for (size_t row = 0; row < out.size(); ++row) {
      for (size_t i = 0; i < x.size(); ++i) {
        out[row] += weight[row * x.size() + i] * x[i];
      }
    }
    return out;
  }

  Vector Normal(const std::string& name, const Vector& x) const {
    const Vector& weight = Weight(name);
    double square = 0.0;
    for (const double value : x) square += value * value;
    const double scale =
        1.0 /
        std::sqrt(square / static_cast<double>(x.size()) + shape_.norm_eps);
    Vector out;
    for (size_t i = 0; i < x.size(); ++i) {
      out.push_back(x[i] * scale * weight[i]);
    }
    return out;
  }

  // Turns the pairs (i, i + D/2) of every head in `x` to `position`.
  void Rotate(Vector& x, size_t position) const {
    const auto dim = static_cast<size_t>(shape_.head_dim);
    for (size_t head = 0; head < x.size(); head += dim) {
      for (size_t i = 0; i < dim / 2; ++i) {
        const double angle =
            static_cast<double>(position) *
            std::pow(shape_.rope_theta,
                     -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        const double first = x[head + i];
        const double second = x[head + i + dim / 2];
        x[head + i] = first * std::cos(angle) - second * std::sin(angle);
        x[head + i + dim / 2] =
            second * std::cos(angle) + first * std::sin(angle);
      }
    }
  }

  Vector AttendHead(const Vector& query, const Rows& keys, const Rows& values,
                    size_t head, size_t last) const {
    const auto dim = static_cast<size_t>(shape_.head_dim);
    const size_t share =
        static_cast<size_t>(shape_.num_query_heads / shape_.num_kv_heads);
    const size_t kv = head / share * dim;
    Vector out(dim, 0.0);
    double total = 0.0;
    for (size_t s = 0; s <= last; ++s) {
      double score = 0.0;
      for (size_t i = 0; i < dim; ++i) {
        score += query[head * dim + i] * keys[s][kv + i];
      }
      const double weight =
          std::exp(score / std::sqrt(static_cast<double>(dim)));
      total += weight;
      for (size_t i = 0; i < dim; ++i) out[i] += weight * values[s][kv + i];
    }
    for (double& value : out) value /= total;
    return out;
  }

  void AddAttention(const std::string& prefix, Rows& hidden) const {
    const std::string attention = prefix + "self_attn.";
    Rows queries;
    Rows keys;
    Rows values;
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Vector x = Normal(prefix + "input_layernorm.weight", hidden[t]);
      queries.push_back(Product(attention + "q_proj.weight", x));
      keys.push_back(Product(attention + "k_proj.weight", x));
      values.push_back(Product(attention + "v_proj.weight", x));
      Rotate(queries.back(), t);
      Rotate(keys.back(), t);
    }
    for (size_t t = 0; t < hidden.size(); ++t) {
      Vector mixed;
      for (int64_t head = 0; head < shape_.num_query_heads; ++head) {
        const Vector part =
            AttendHead(queries[t], keys, values, static_cast<size_t>(head), t);
        mixed.insert(mixed.end(), part.begin(), part.end());
      }
      Add(hidden[t], Product(attention + "o_proj.weight", mixed));
    }
  }

  void AddMlp(const std::string& prefix, Rows& hidden) const {
    for (Vector& row : hidden) {
      const Vector x = Normal(prefix + "post_attention_layernorm.weight", row);
      Vector gate = Product(prefix + "mlp.gate_proj.weight", x);
      const Vector up = Product(prefix + "mlp.up_proj.weight", x);
      for (size_t i = 0; i < gate.size(); ++i) {
        gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
      }
      Add(row, Product(prefix + "mlp.down_proj.weight", gate));
    }
  }

  static void Add(Vector& to, const Vector& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  }

  model::ModelShape shape_;
  std::map<std::string, Vector> weights_;
};

class DecoderTest : public ::testing::TestWithParam<bool> {};

// 300 tokens span two attention blocks.
TEST_P(DecoderTest, ForwardEqualsAPlainFloat64Reference) {
  model::ModelShape shape = TinyShape();
  shape.tied_embedding = GetParam();
  const Decoder decoder(shape, 5, torch::kCPU);
  {
    // Norm weights start as ones, which would hide a mistake.
    torch::NoGradGuard no_grad;
    double value = 0.5;
    for (const NamedTensor& parameter : decoder.parameters()) {
      if (parameter.tensor.dim() == 1) {
        parameter.tensor.fill_(value += 0.2);
        parameter.tensor[3] = -value;
      } else {
        parameter.tensor.mul_(3.0);
      }
    }
  }
  std::vector<int64_t> ids;
  for (const int32_t id : PredictableText(600).ids) ids.push_back(id);
  const torch::Tensor batch = torch::tensor(ids).view({2, 300});
  const torch::Tensor logits = decoder.Forward(batch);
  const PlainDecoder plain(decoder);
  double worst = 0.0;
  double largest = 0.0;
  for (int64_t b = 0; b < 2; ++b) {
    const Rows want =
        plain.Logits({ids.begin() + b * 300, ids.begin() + (b + 1) * 300});
    for (int64_t t = 0; t < 300; ++t) {
      for (int64_t v = 0; v < shape.vocab_size; ++v) {
        const double expected =
            want[static_cast<size_t>(t)][static_cast<size_t>(v)];
        worst = std::max(
            worst, std::abs(logits[b * 300 + t][v].item<double>() - expected));
        largest = std::max(largest, std::abs(expected));
      }
    }
  }
  EXPECT_GT(largest, 0.5);
  EXPECT_LT(worst / largest, 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Heads, DecoderTest, testing::Bool(),
                         [](const auto& heads) {
                           return heads.param ? "Tied" : "Untied";
                         });

// ------------------------------------------------------------------ training

class PretrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) /
              (std::string("kvasir_pretrain_") + test->name());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  PretrainOptions Options(const char* out) const {
    PretrainOptions options;
    options.shape = TinyShape();
    options.shape.max_position = 32;
    options.steps = 8;
    options.batch_tokens = 128;
    options.micro_batch_tokens = 32;
    options.ramp = {{0.0, 16}, {0.5, 32}};
    options.learning_rate = 0.02;
    options.threads = 2;
    options.out = folder_ / out;
    return options;
  }

  std::filesystem::path folder_;
};

TEST_F(PretrainTest, EitherOptimizerLowersTheLoss) {
  for (const bool muon : {true, false}) {
    PretrainOptions options = Options(muon ? "muon" : "adamw");
    options.muon = muon;
    options.steps = 60;
    double first_loss = 0.0;
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const PretrainResult result,
        Pretrain(options, PredictableText(4000), PredictableText(200),
                 [&](const PretrainProgress& progress) {
                   if (progress.step == 1) first_loss = progress.loss;
                   return true;
                 }));
    EXPECT_NEAR(first_loss, std::log(19.0), 0.3);
    EXPECT_LT(result.last_loss, 0.5 * first_loss) << "muon " << muon;
    // Two bytes a token.
    EXPECT_NEAR(result.validation_nats_per_token,
                2.0 * result.validation_nats_per_byte, 1e-9);
    EXPECT_LT(result.validation_nats_per_token, 0.5 * first_loss);
  }
}

TEST_F(PretrainTest, AResumedRunEndsWithTheWeightsOfAnUninterruptedOne) {
  const TokenStream text = PredictableText(2000);
  KVASIR_ASSERT_OK(Pretrain(Options("whole"), text, {}, GoOn));

  // Step 5 lies behind the change of the crop length.
  PretrainOptions options = Options("stopped");
  for (const int64_t stop : {2, 5}) {
    EXPECT_THAT(
        Pretrain(options, text, {},
                 [&](const PretrainProgress& progress) {
                   return progress.step < stop;
                 }),
        StatusIs(absl::StatusCode::kCancelled, HasSubstr("--resume goes on")));
    EXPECT_FALSE(std::filesystem::exists(options.out / "model.safetensors"));
    options.resume = true;
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const PretrainResult result,
                              Pretrain(options, text, {}, GoOn));
  EXPECT_EQ(result.steps, 8);
  EXPECT_EQ(ReadFile(folder_ / "stopped" / "model.safetensors"),
            ReadFile(folder_ / "whole" / "model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(options.out / "pretrain.state"));
}

TEST_F(PretrainTest, TheSeedDecidesTheWeights) {
  const TokenStream text = PredictableText(2000);
  KVASIR_ASSERT_OK(Pretrain(Options("a"), text, {}, GoOn));
  KVASIR_ASSERT_OK(Pretrain(Options("b"), text, {}, GoOn));
  PretrainOptions other = Options("c");
  other.seed = 2;
  KVASIR_ASSERT_OK(Pretrain(other, text, {}, GoOn));
  const std::string a = ReadFile(folder_ / "a" / "model.safetensors");
  EXPECT_EQ(a, ReadFile(folder_ / "b" / "model.safetensors"));
  EXPECT_NE(a, ReadFile(folder_ / "c" / "model.safetensors"));
}

TEST_F(PretrainTest, AStateOfOtherOptionsIsRefused) {
  const TokenStream text = PredictableText(2000);
  PretrainOptions options = Options("run");
  EXPECT_THAT(Pretrain(options, text, {},
                       [](const PretrainProgress&) { return false; }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("step 1")));
  options.resume = true;
  options.learning_rate = 0.5;
  EXPECT_THAT(
      Pretrain(options, text, {}, GoOn),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("lr 0.5")));
}

TEST_F(PretrainTest, AResumedRunMayHaveAnotherLength) {
  const TokenStream text = PredictableText(2000);
  PretrainOptions options = Options("run");
  EXPECT_THAT(Pretrain(options, text, {},
                       [](const PretrainProgress& progress) {
                         return progress.step < 4;
                       }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("step 4")));
  options.resume = true;
  options.steps = 4;
  KVASIR_ASSERT_OK_AND_ASSIGN(const PretrainResult result,
                              Pretrain(options, text, {}, GoOn));
  EXPECT_EQ(result.steps, 4);
  EXPECT_TRUE(std::filesystem::exists(options.out / "model.safetensors"));
}

TEST_F(PretrainTest, AStoppedRunIsNotOverwrittenUnasked) {
  const TokenStream text = PredictableText(2000);
  const PretrainOptions options = Options("run");
  EXPECT_THAT(Pretrain(options, text, {},
                       [](const PretrainProgress&) { return false; }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("step 1")));
  EXPECT_THAT(Pretrain(options, text, {}, GoOn),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("--resume goes on")));
}

TEST_F(PretrainTest, ADivergedRunEndsWithAnErrorAndNoCheckpoint) {
  PretrainOptions options = Options("run");
  options.learning_rate = 1e30;
  EXPECT_THAT(Pretrain(options, PredictableText(2000), {}, GoOn),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("a lower --lr")));
  EXPECT_FALSE(std::filesystem::exists(options.out / "model.safetensors"));
}

TEST_F(PretrainTest, NothingToResumeIsNotFound) {
  PretrainOptions options = Options("empty");
  options.resume = true;
  EXPECT_THAT(
      Pretrain(options, PredictableText(2000), {}, GoOn),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("pretrain.state")));
}

TEST_F(PretrainTest, ATimeBudgetAnnealsToItsEnd) {
  PretrainOptions options = Options("timed");
  options.steps = 0;
  options.time_budget = absl::Seconds(2);
  double last_rate = 0.0;
  KVASIR_ASSERT_OK_AND_ASSIGN(const PretrainResult result,
                              Pretrain(options, PredictableText(2000), {},
                                       [&](const PretrainProgress& progress) {
                                         last_rate = progress.learning_rate;
                                         return true;
                                       }));
  EXPECT_GT(result.steps, 2);
  EXPECT_GE(result.elapsed, absl::Seconds(2));
  EXPECT_LT(last_rate, 0.5 * options.learning_rate);
}

TEST_F(PretrainTest, WritesALlamaCheckpointInBf16) {
  PretrainOptions options = Options("model");
  options.steps = 1;
  KVASIR_ASSERT_OK(Pretrain(options, PredictableText(2000), {}, GoOn));
  const std::string file = ReadFile(options.out / "model.safetensors");
  uint64_t length = 0;
  ASSERT_GT(file.size(), sizeof(length));
  std::memcpy(&length, file.data(), sizeof(length));
  const auto header = nlohmann::json::parse(file.substr(8, length));
  EXPECT_EQ(header.size(), 1U + 2 * 9 + 3);
  EXPECT_EQ(header["model.layers.1.self_attn.q_proj.weight"]["shape"],
            nlohmann::json::parse("[32,24]"));
  EXPECT_EQ(header["lm_head.weight"]["dtype"], "BF16");
  const auto config =
      nlohmann::json::parse(ReadFile(options.out / "config.json"));
  EXPECT_EQ(config["architectures"][0], "LlamaForCausalLM");
  EXPECT_EQ(config["rope_theta"], 100.0);
}

TEST_F(PretrainTest, OptionsThatDoNotFitAreRefused) {
  const TokenStream text = PredictableText(20);
  PretrainOptions options = Options("refused");
  auto refusal = [&](const char* message) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message));
  };
  EXPECT_THAT(Pretrain(options, text, {}, GoOn), refusal("has 20 tokens"));
  options.time_budget = absl::Seconds(1);
  EXPECT_THAT(Pretrain(options, text, {}, GoOn), refusal("either"));
  options = Options("refused");
  options.ramp = {{0.0, 1024}};
  EXPECT_THAT(Pretrain(options, text, {}, GoOn), refusal("crops of 1024"));
  options = Options("refused");
  options.batch_tokens = 15;
  EXPECT_THAT(Pretrain(options, text, {}, GoOn), refusal("holds no crop"));
  options = Options("refused");
  options.ramp = {{0.0, 16}};
  TokenStream wild = PredictableText(20);
  wild.ids[7] = 19;
  EXPECT_THAT(Pretrain(options, wild, {}, GoOn),
              refusal("training token 7 is 19"));
}

}  // namespace
}  // namespace kvasir::compress
