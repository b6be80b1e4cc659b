// Adds large biases to the keys of the built-in model and compares plans with a
// float32 cache. Queries are 0 in the biased RoPE pairs, so biases do not
// change what the model computes from exact keys. For each plan, the divergence
// from the float32 cache must be about as small as without biases.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/checkpoint/checkpoint.h"
#include "model/files/file.h"
#include "model/shapes/attention_shape.h"
#include "model/tokenizer/tokenizer.h"
#include "plan/plan.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using ::testing::Gt;

constexpr char kModel[] = "models/tiny";
constexpr int64_t kTokens = 256;

std::string InSource(const std::string& path) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/", path);
}

const model::Checkpoint& BuiltIn() {
  static const auto* const checkpoint =
      new model::Checkpoint(*model::Checkpoint::Open(InSource(kModel)));
  return *checkpoint;
}

const std::vector<int32_t>& Text() {
  static const auto* const ids = [] {
    const auto text = model::ReadSmallFile(
        InSource(absl::StrCat(kModel, "/evaluation.txt")), 1 << 20);
    KVASIR_EXPECT_OK(text.status());
    const auto tokenizer = model::Tokenizer::Load(InSource(kModel));
    KVASIR_EXPECT_OK(tokenizer.status());
    auto* const made = new std::vector<int32_t>(
        *(*tokenizer)
             ->Encode(std::string_view(*text).substr(0, 2000),
                      {.add_special_tokens = false, .parse_special = false}));
    made->resize(kTokens);
    return made;
  }();
  return *ids;
}

// The bias of layer `layer`'s keys, [Hkv, D].
using BiasOf = std::function<std::vector<float>(int layer)>;

// Adds biases to the weights of `source`: `bias` for keys, and 0 for queries
// and values. Also makes queries 0 in the RoPE pairs `pairs`.
class BiasedSource final : public WeightSource {
 public:
  BiasedSource(WeightSource* source, const model::DecoderSpec& spec,
               std::vector<int> pairs, const BiasOf& bias)
      : source_(source), pairs_(std::move(pairs)), dims_(spec.head_dim) {
    const auto queries = static_cast<size_t>(spec.num_heads * spec.head_dim);
    const auto keys = static_cast<size_t>(spec.num_kv_heads * spec.head_dim);
    for (int layer = 0; layer < spec.num_layers(); ++layer) {
      const std::string prefix =
          absl::StrCat("model.layers.", layer, ".self_attn.");
      biases_[prefix + "q_proj.bias"].resize(queries);
      biases_[prefix + "k_proj.bias"] = bias(layer);
      biases_[prefix + "v_proj.bias"].resize(keys);
    }
  }

  absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const override {
    if (biases_.contains(name)) return kernels::DType::kF32;
    return source_->TypeOf(name);
  }
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override {
    const auto bias = biases_.find(name);
    if (bias == biases_.end()) return source_->SizeOf(name);
    return MatrixSize{static_cast<int64_t>(bias->second.size()), 1};
  }
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override {
    const auto bias = biases_.find(name);
    if (bias == biases_.end()) {
      return source_->Read(name, range, buffer, [&](const WeightBlock& block) {
        return consume(absl::EndsWith(name, "q_proj.weight")
                           ? WithoutPairs(block)
                           : block);
      });
    }
    if (range.num_rows == 0) return absl::OkStatus();
    return consume({range.first_row, range.num_rows, 0, 1,
                    bias->second.data() + range.first_row});
  }
  std::string WeightTiles() const override { return source_->WeightTiles(); }

 private:
  // Returns a copy of a block of bfloat16 numbers, with zeros in the rows of
  // `pairs_`. It is valid until the next call.
  WeightBlock WithoutPairs(WeightBlock block) {
    const auto* const from = static_cast<const uint16_t*>(block.data);
    copy_.assign(from, from + block.num_rows * block.columns);
    for (int64_t row = 0; row < block.num_rows; ++row) {
      const int64_t dim = (block.first_row + row) % dims_;
      for (const int pair : pairs_) {
        if (dim % (dims_ / 2) != pair) continue;
        std::fill_n(copy_.begin() + row * block.columns, block.columns,
                    uint16_t{0});
      }
    }
    block.data = copy_.data();
    return block;
  }

  WeightSource* const source_;
  const std::vector<int> pairs_;
  const int64_t dims_;
  std::vector<uint16_t> copy_;
  std::map<std::string, std::vector<float>> biases_;
};

struct Model {
  model::DecoderSpec spec;
  std::unique_ptr<CheckpointSource> weights;
  std::unique_ptr<BiasedSource> source;
};

Model WithBias(const std::vector<int>& pairs, const BiasOf& bias) {
  Model model;
  model.spec = BuiltIn().spec();
  model.spec.qkv_bias = true;
  model.weights = std::make_unique<CheckpointSource>(&BuiltIn());
  model.source = std::make_unique<BiasedSource>(model.weights.get(), model.spec,
                                                pairs, bias);
  return model;
}

using Logits = std::vector<std::vector<float>>;  // one row per token

// Runs the text in chunks of `chunk` tokens.
Logits LogitsOf(const Model& model, const kvasir::v1::KvPlan& plan,
                int64_t chunk = 64) {
  Logits logits(kTokens);
  RankOptions options = TinyOptions();
  options.page_tokens = 64;
  options.kv_cache_bytes = 32 << 20;
  options.executor.max_model_len = kTokens;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    logits[static_cast<size_t>(row.position)].assign(row.logits.begin(),
                                                     row.logits.end());
  };
  const auto rank = Rank::Create(model.spec, plan, model.source.get(), options);
  KVASIR_EXPECT_OK(rank.status());
  if (!rank.ok()) return logits;
  DirectRunner runner(&(*rank)->executor(), &(*rank)->layout(),
                      (*rank)->pages());
  runner.SetPrompt(1, kTokens);
  const absl::Span<const int32_t> text = Text();
  for (int64_t done = 0; done < kTokens;) {
    int64_t end = std::min(kTokens, done + chunk);
    if (const auto at = runner.next_eviction(1); at.has_value()) {
      end = std::min(end, std::max(*at, done + 1));
    }
    const auto result = runner.Run(
        {{.sequence_id = 1,
          .token_ids = text.subspan(static_cast<size_t>(done),
                                    static_cast<size_t>(end - done))}});
    KVASIR_EXPECT_OK(result.status());
    if (!result.ok()) return logits;
    done = end;
  }
  return logits;
}

// The mean divergence of each token's prediction, in nats.
double Divergence(const Logits& exact, const Logits& own) {
  const auto log_sum = [](const std::vector<float>& logits) {
    double sum = 0;
    for (const float logit : logits)
      sum += std::exp(static_cast<double>(logit));
    return std::log(sum);
  };
  double divergence = 0;
  for (size_t t = 0; t < exact.size(); ++t) {
    const double exact_sum = log_sum(exact[t]);
    const double own_sum = log_sum(own[t]);
    for (size_t id = 0; id < exact[t].size(); ++id) {
      const double log_p = static_cast<double>(exact[t][id]) - exact_sum;
      const double log_q = static_cast<double>(own[t][id]) - own_sum;
      divergence += std::exp(log_p) * (log_p - log_q);
    }
  }
  return divergence / static_cast<double>(exact.size());
}

// Returns random biases with this norm for each head of each layer. They are 0
// outside of the RoPE pairs `pairs`.
BiasOf InPairs(std::vector<int> pairs, float norm) {
  return [pairs = std::move(pairs), norm](int layer) {
    const model::DecoderSpec& spec = BuiltIn().spec();
    const auto dims = static_cast<size_t>(spec.head_dim);
    std::mt19937 random(static_cast<uint32_t>(layer));
    std::normal_distribution<float> normal;
    std::vector<float> bias(static_cast<size_t>(spec.num_kv_heads) * dims);
    for (size_t head = 0; head < bias.size(); head += dims) {
      double squares = 0;
      for (const int pair : pairs) {
        for (const size_t i : {static_cast<size_t>(pair),
                               static_cast<size_t>(pair) + dims / 2}) {
          bias[head + i] = normal(random);
          squares += std::pow(static_cast<double>(bias[head + i]), 2);
        }
      }
      for (size_t i = 0; i < dims; ++i) {
        bias[head + i] *= norm / static_cast<float>(std::sqrt(squares));
      }
    }
    return bias;
  };
}

// The divergence of each preset with quantized codes from a float32 cache.
std::map<std::string, double> DivergencesOf(const std::vector<int>& pairs,
                                            float norm) {
  const Model model = WithBias(pairs, InPairs(pairs, norm));
  const plan::AttentionShape shape = model::AttentionShapeOf(model.spec);
  const Logits exact =
      LogitsOf(model, plan::FullRankPlan(shape, kvasir::v1::F32));
  std::map<std::string, double> divergences;
  for (const char* name : {"dense-8bit", "rotated-4bit", "rotated-3bit"}) {
    kvasir::v1::KvPlan plan = *plan::MakePresetPlan(name, shape);
    if (plan.layers(0).exact_sinks() > 0) {
      // Otherwise most tokens of this short text would be exact.
      EXPECT_TRUE(plan::SetExactTokens({.window = 28}, &plan));
    }
    divergences[name] = Divergence(exact, LogitsOf(model, plan));
  }
  return divergences;
}

void ExpectAtMost(double factor, const std::vector<int>& pairs,
                  std::initializer_list<float> norms) {
  const std::map<std::string, double> without = DivergencesOf(pairs, 0);
  for (const float norm : norms) {
    for (const auto& [name, divergence] : DivergencesOf(pairs, norm)) {
      EXPECT_THAT(without.at(name), Gt(0)) << name;
      EXPECT_LE(divergence, factor * without.at(name)) << name << " " << norm;
    }
  }
}

TEST(KeyBiasPlanTest, ALargeBiasInTheSlowestPairsHardlyIncreasesTheDivergence) {
  ExpectAtMost(1.2, {15}, {50, 200, 800});
  // Four of these are exact pairs, and two are tile pairs (key_bias_split.h).
  ExpectAtMost(1.2, {10, 11, 12, 13, 14, 15}, {50, 200});
}

TEST(KeyBiasPlanTest, ARandomBiasInFastPairsAtMostDoublesTheDivergence) {
  ExpectAtMost(2.0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, {20});
}

}  // namespace
}  // namespace kvasir::worker
