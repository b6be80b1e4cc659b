#include "model/shapes/gguf_config.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/gguf/gguf_family.h"
#include "model/gguf/testing/gguf_builder.h"
#include "model/shapes/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns a file with the keys of a small model and its embedding.
GgufBuilder Small(const std::string& architecture = "llama") {
  GgufBuilder builder;
  const auto key = [&](const char* name) {
    return absl::StrCat(architecture, ".", name);
  };
  builder.String("general.architecture", architecture)
      .U32(key("embedding_length"), 64)
      .U32(key("block_count"), 2)
      .U32(key("feed_forward_length"), 96)
      .U32(key("context_length"), 8192)
      .U32(key("attention.head_count"), 4)
      .F32(key(architecture == "gptneox" ? "attention.layer_norm_epsilon"
                                         : "attention.layer_norm_rms_epsilon"),
           1e-6f)
      .Tensor("token_embd.weight", {64, 7}, 0, std::string(64 * 7 * 4, '\0'));
  return builder;
}

absl::StatusOr<json> ConfigOf(const GgufBuilder& builder) {
  const std::string file = builder.Build();
  const auto header = GgufHeader::Parse(file, file.size(), "x.gguf");
  if (!header.ok()) return header.status();
  const auto config = ConfigOfGguf(*header, {});
  if (!config.ok()) return config.status();
  return json::parse(config->json);
}

absl::StatusOr<DecoderSpec> SpecOf(const GgufBuilder& builder) {
  const base::TempFolder folder;
  return LoadModelConfig(folder.Write("x.gguf", builder.Build()));
}

TEST(GgufConfigTest, TheSizesOfTheModelAreTranslatedToConfigJson) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small()
                 .U32("llama.attention.head_count_kv", 2)
                 .U32("llama.attention.key_length", 32)
                 .U32("llama.attention.value_length", 32)
                 .F32("llama.rope.freq_base", 500000)
                 .U32("llama.expert_count", 0)));
  EXPECT_EQ(spec.architecture, "LlamaForCausalLM");
  EXPECT_EQ(spec.hidden_size, 64);
  EXPECT_EQ(spec.num_layers(), 2);
  EXPECT_EQ(spec.intermediate_size, 96);
  EXPECT_EQ(spec.max_position_embeddings, 8192);
  EXPECT_EQ(spec.num_heads, 4);
  EXPECT_EQ(spec.num_kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 32);
  EXPECT_EQ(spec.norm_eps, 1e-6);  // the shortest decimal of the float32
  EXPECT_EQ(spec.vocab_size, 7);
  EXPECT_TRUE(spec.tied_head);
  EXPECT_FALSE(spec.qkv_bias);
  EXPECT_EQ(spec.rope.rotary_dim, 32);
  EXPECT_NEAR(spec.rope.frequencies[8], std::pow(500000, -0.5), 1e-12);
}

TEST(GgufConfigTest, MissingSizesHaveTheDefaultsOfTheFormat) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const DecoderSpec spec, SpecOf(Small("qwen2")));
  EXPECT_EQ(spec.architecture, "Qwen2ForCausalLM");
  EXPECT_EQ(spec.num_kv_heads, 4);
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_TRUE(spec.qkv_bias);
  EXPECT_NEAR(spec.rope.frequencies[4], 0.01, 1e-12);  // base 10000
}

TEST(GgufConfigTest, AnArrayWithTheSameSizeForEachLayerIsReadAsOneSize) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const json config,
      ConfigOf(Small().I32s("llama.attention.head_count_kv", {2, 2})));
  EXPECT_EQ(config["num_key_value_heads"], 2);
}

TEST(GgufConfigTest, EveryKeyThatNamesAnEndTokenIsRead) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small()
                 .U32("tokenizer.ggml.bos_token_id", 1)
                 .U32("tokenizer.ggml.eos_token_id", 2)
                 .U32("tokenizer.ggml.eot_token_id", 3)
                 .U32("tokenizer.ggml.eom_token_id", 2)
                 .Strings("tokenizer.ggml.tokens",
                          {"a", "<s>", "</s>", "x", "<|im_end|>", "<|end|>"})
                 .I32s("tokenizer.ggml.token_type", {1, 3, 3, 3, 3, 1})));
  EXPECT_EQ(spec.bos_token_id, 1);
  // A normal token with such a text does not end an output.
  EXPECT_THAT(spec.eos_token_ids, ElementsAre(2, 3, 4));
  KVASIR_ASSERT_OK_AND_ASSIGN(const DecoderSpec none, SpecOf(Small()));
  EXPECT_TRUE(none.eos_token_ids.empty());
}

TEST(GgufConfigTest, ALlamaFileWithASlidingWindowIsReadAsMistral) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small().U32("llama.attention.sliding_window", 4096)));
  EXPECT_EQ(spec.architecture, "MistralForCausalLM");
  EXPECT_EQ(spec.layers[1].sliding_window, 4096);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec whole,
      SpecOf(Small("qwen2").U32("qwen2.attention.sliding_window", 8192)));
  EXPECT_EQ(whole.layers[0].sliding_window, 0);
}

TEST(GgufConfigTest, RopeScalingKeysBecomeTheRopeScalingOfConfigJson) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      json config,
      ConfigOf(Small()
                   .String("llama.rope.scaling.type", "yarn")
                   .F32("llama.rope.scaling.factor", 4)
                   .U32("llama.rope.scaling.original_context_length", 2048)
                   .F32("llama.rope.scaling.yarn_beta_fast", 16)));
  EXPECT_EQ(config["rope_scaling"],
            json({{"rope_type", "yarn"},
                  {"factor", 4.0},
                  {"beta_fast", 16.0},
                  {"original_max_position_embeddings", 2048}}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      config, ConfigOf(Small().F32("llama.rope.scale_linear", 2)));
  EXPECT_EQ(config["rope_scaling"],
            json({{"rope_type", "linear"}, {"factor", 2.0}}));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      config, ConfigOf(Small().String("llama.rope.scaling.type", "none")));
  EXPECT_FALSE(config.contains("rope_scaling"));
}

TEST(GgufConfigTest, RopeFactorsDivideTheFrequencies) {
  std::string factors;
  for (const float factor : {1.f, 1.f, 2.f, 4.f, 8.f, 8.f, 8.f, 8.f}) {
    AppendNumber(factor, &factors);
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(const DecoderSpec plain, SpecOf(Small()));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small().Tensor("rope_freqs.weight", {8}, 0, factors)));
  EXPECT_EQ(spec.rope.frequencies[1], plain.rope.frequencies[1]);
  EXPECT_EQ(spec.rope.frequencies[3], plain.rope.frequencies[3] / 4);
  EXPECT_EQ(spec.rope.frequencies[7], plain.rope.frequencies[7] / 8);
}

TEST(GgufConfigTest, RopeFactorsOfLlama3AreReadAsItsRopeScaling) {
  // The programs that write such files compute the factors in float32.
  constexpr int kPairs = 32;
  std::vector<float> factors;
  for (int pair = 0; pair < kPairs; ++pair) {
    const float frequency =
        1.f / std::pow(500000.f, static_cast<float>(pair) / kPairs);
    const float wavelength = 2 * static_cast<float>(M_PI) / frequency;
    const float smooth = (8192 / wavelength - 1) / 3;
    factors.push_back(smooth > 1   ? 1.f
                      : smooth < 0 ? 32.f
                                   : 1 / ((1 - smooth) / 32 + smooth));
  }
  const auto spec_of = [&](const std::vector<float>& numbers) {
    std::string bytes;
    for (const float number : numbers) AppendNumber(number, &bytes);
    return SpecOf(Small()
                      .U32("llama.attention.key_length", 2 * kPairs)
                      .F32("llama.rope.freq_base", 500000)
                      .Tensor("rope_freqs.weight", {kPairs}, 0, bytes))
        .value();
  };
  const DecoderSpec want =
      ParseConfig(
          R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
              "num_hidden_layers": 2, "intermediate_size": 96,
              "max_position_embeddings": 8192, "num_attention_heads": 4,
              "head_dim": 64, "vocab_size": 7, "rope_theta": 500000,
              "rope_scaling": {"rope_type": "llama3", "factor": 32,
                               "low_freq_factor": 1, "high_freq_factor": 4,
                               "original_max_position_embeddings": 8192}})",
          "config.json")
          .value();
  EXPECT_EQ(spec_of(factors).rope, want.rope);
  // Other factors are used as they are.
  factors[kPairs - 3] = 20;
  EXPECT_NE(spec_of(factors).rope, want.rope);
  EXPECT_EQ(spec_of(factors).rope.frequencies[kPairs - 3],
            std::pow(500000., -(kPairs - 3.) / kPairs) / 20);
}

std::string Floats(const std::vector<float>& numbers) {
  std::string bytes;
  for (const float number : numbers) AppendNumber(number, &bytes);
  return bytes;
}

TEST(GgufConfigTest, ALlamaFileWithExpertsIsReadAsMixtral) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small()
                 .U32("llama.expert_count", 8)
                 .U32("llama.expert_used_count", 2)
                 .U32("llama.expert_gating_func", 1)
                 .U32("llama.attention.sliding_window", 4096)));
  EXPECT_EQ(spec.architecture, "MixtralForCausalLM");
  EXPECT_EQ(
      spec.experts,
      (ExpertsSpec{
          .count = 8, .top_k = 2, .intermediate_size = 96, .normalize = true}));
  EXPECT_EQ(spec.layers[1].sliding_window, 4096);
}

TEST(GgufConfigTest, Qwen3MoeLayersWithARouterTensorHaveExperts) {
  const GgufBuilder builder =
      Small("qwen3moe")
          .U32("qwen3moe.expert_count", 8)
          .U32("qwen3moe.expert_used_count", 2)
          .U32("qwen3moe.expert_feed_forward_length", 24)
          .Tensor("blk.1.ffn_gate_inp.weight", {1}, 0, "1234");
  KVASIR_ASSERT_OK_AND_ASSIGN(const json config, ConfigOf(builder));
  EXPECT_EQ(config["mlp_only_layers"], json::array({0}));
  // If the file lacks the key, the experts' weights are normalized, as
  // in llama.cpp.
  EXPECT_EQ(config["norm_topk_prob"], true);
  EXPECT_EQ(config["num_experts"], 8);
  EXPECT_EQ(config["moe_intermediate_size"], 24);
}

TEST(GgufConfigTest, AGemma2FileGivesScoreScaleCapsAndWindows) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      DecoderSpec spec, SpecOf(Small("gemma2")
                                   .U32("gemma2.attention.sliding_window", 512)
                                   .F32("gemma2.attn_logit_softcapping", 50)
                                   .F32("gemma2.final_logit_softcapping", 0)));
  EXPECT_EQ(spec.architecture, "Gemma2ForCausalLM");
  EXPECT_EQ(spec.embedding_scale, 8);
  EXPECT_EQ(spec.norm_weight_offset, 1);
  EXPECT_EQ(spec.score_scale, 0.25);  // heads of 16
  EXPECT_EQ(spec.score_cap, 50);
  EXPECT_EQ(spec.logit_cap, 0);
  EXPECT_EQ(spec.layers[0].sliding_window, 512);
  EXPECT_EQ(spec.layers[1].sliding_window, 0);
  // Without these keys, the defaults are those of config.json.
  KVASIR_ASSERT_OK_AND_ASSIGN(spec, SpecOf(Small("gemma2")));
  EXPECT_EQ(spec.layers[0].sliding_window, 4096);
  EXPECT_EQ(spec.logit_cap, 30);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      spec, SpecOf(Small("gemma2").U32("gemma2.attention.sliding_window", 0)));
  EXPECT_EQ(spec.layers[0].sliding_window, 0);
}

TEST(GgufConfigTest, AGemma3FileHasOneRopeBaseForWindowsAndOneForOtherLayers) {
  const auto layers = [](int count) {
    GgufBuilder builder;
    builder.String("general.architecture", "gemma3")
        .U32("gemma3.embedding_length", 64)
        .U32("gemma3.block_count", static_cast<uint32_t>(count))
        .U32("gemma3.feed_forward_length", 96)
        .U32("gemma3.context_length", 1024)
        .U32("gemma3.attention.head_count", 2)
        .U32("gemma3.attention.key_length", 8)
        .F32("gemma3.attention.layer_norm_rms_epsilon", 1e-6f)
        .F32("gemma3.rope.freq_base", 1e6)
        .Tensor("token_embd.weight", {64, 7}, 0, std::string(64 * 7 * 4, 0));
    return builder;
  };
  KVASIR_ASSERT_OK_AND_ASSIGN(
      DecoderSpec spec, SpecOf(layers(8)
                                   .U32("gemma3.attention.sliding_window", 1024)
                                   .String("gemma3.rope.scaling.type", "linear")
                                   .F32("gemma3.rope.scaling.factor", 8)));
  EXPECT_EQ(spec.score_scale, 1 / std::sqrt(8.0));
  for (size_t layer = 0; layer < 8; ++layer) {
    // The window is as long as the context, but it is not dropped: layers with
    // a window have another RoPE base.
    EXPECT_EQ(spec.layers[layer].sliding_window, layer == 5 ? 0 : 1024);
  }
  EXPECT_EQ(spec.rope.frequencies[0], 1.0 / 8);
  EXPECT_NEAR(spec.rope.frequencies[2], 1e-3 / 8, 1e-12);
  EXPECT_NEAR(spec.window_rope->frequencies[2], 1e-2, 1e-12);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      spec, SpecOf(layers(3)
                       .U32("gemma3.attention.sliding_window", 64)
                       .U32("gemma3.attention.sliding_window_pattern", 2)
                       .F32("gemma3.rope.freq_base_swa", 100)));
  EXPECT_EQ(spec.layers[1].sliding_window, 0);
  EXPECT_EQ(spec.layers[2].sliding_window, 64);
  EXPECT_NEAR(spec.window_rope->frequencies[2], 0.1, 1e-12);
  KVASIR_ASSERT_OK_AND_ASSIGN(spec, SpecOf(layers(2)));
  EXPECT_EQ(spec.layers[0].sliding_window, 0);
  // The largest Gemma 3 model, with 62 layers, has another score scale.
  KVASIR_ASSERT_OK_AND_ASSIGN(spec, SpecOf(layers(62)));
  EXPECT_EQ(spec.score_scale, 1 / std::sqrt(32.0));
}

GgufBuilder LongPhi3(const std::string& long_factors) {
  return Small("phi3")
      .U32("phi3.rope.dimension_count", 12)
      .U32("phi3.rope.scaling.original_context_length", 4096)
      .Tensor("rope_factors_long.weight", {long_factors.size() / 4}, 0,
              long_factors)
      .Tensor("rope_factors_short.weight", {6}, 0,
              Floats({1, 1.1f, 1.1f, 1.1f, 1.1f, 2}));
}

TEST(GgufConfigTest, APhi3FileHasRopeFactorsForShortAndForLongTexts) {
  const std::string longs = Floats({1, 2, 4, 8, 16, 32.5f});
  KVASIR_ASSERT_OK_AND_ASSIGN(DecoderSpec spec, SpecOf(LongPhi3(longs)));
  EXPECT_EQ(spec.rope.rotary_dim, 12);
  EXPECT_EQ(spec.rope.short_positions, 4096);
  EXPECT_EQ(spec.rope.frequencies[1], std::pow(1e4, -1.0 / 6) / 1.1);
  EXPECT_EQ(spec.rope.long_frequencies[5], std::pow(1e4, -5.0 / 6) / 32.5);
  const double usual = std::sqrt(1 + std::log(2) / std::log(4096));
  EXPECT_EQ(spec.rope.attention_factor, usual);
  // If the file's attention factor is the usual factor rounded to float32, the
  // usual factor is used exactly. Any other factor is used as it is.
  KVASIR_ASSERT_OK_AND_ASSIGN(
      spec, SpecOf(LongPhi3(longs).F32("phi3.rope.scaling.attn_factor",
                                       static_cast<float>(usual))));
  EXPECT_EQ(spec.rope.attention_factor, usual);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      spec,
      SpecOf(LongPhi3(longs).F32("phi3.rope.scaling.attn_factor", 1.25f)));
  EXPECT_EQ(spec.rope.attention_factor, 1.25);
}

TEST(GgufConfigTest, AllLayersOfAPhi3FileHaveItsWindow) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const DecoderSpec spec,
      SpecOf(Small("phi3")
                 .U32("phi3.attention.sliding_window", 2047)
                 .U32("phi3.rope.scaling.original_context_length", 8192)));
  EXPECT_EQ(spec.layers[0].sliding_window, 2047);
  EXPECT_TRUE(spec.rope.long_frequencies.empty());
}

TEST(GgufConfigTest, TheNumberOfRotatedDimsIsExactForEveryHeadDim) {
  for (const std::string architecture : {"phi3", "gptneox"}) {
    for (uint32_t head_dim = 2; head_dim <= 1024; head_dim += 2) {
      GgufBuilder builder = Small(architecture);
      const uint32_t dims = head_dim / 2 / 2 * 2 + 2;
      builder.U32(architecture + ".attention.key_length", head_dim)
          .U32(architecture + ".rope.dimension_count", dims);
      KVASIR_ASSERT_OK_AND_ASSIGN(const json config, ConfigOf(builder));
      const double part =
          config[architecture == "phi3" ? "partial_rotary_factor"
                                        : "rotary_pct"];
      ASSERT_EQ(static_cast<uint32_t>(head_dim * part), dims) << head_dim;
    }
  }
}

TEST(GgufConfigTest, TheGuideNamesEveryArchitecture) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  for (const char* page : {"docs/guide.md", "docs/models.md"}) {
    std::ifstream in(absl::StrCat(source == nullptr ? "." : source, "/", page));
    const std::string text(std::istreambuf_iterator<char>(in), {});
    for (const GgufFamily& family : kGgufFamilies) {
      EXPECT_THAT(text, HasSubstr(absl::StrCat(
                            "`", std::string(family.architecture), "`")))
          << page;
    }
  }
}

struct BadConfig {
  std::string name;
  GgufBuilder builder;
  absl::StatusCode code;
  std::vector<std::string> parts;
};

std::vector<BadConfig> BadConfigs() {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnserved = absl::StatusCode::kUnimplemented;
  const std::string zeros(32, '\0');
  std::string ones;
  for (int i = 0; i < 8; ++i) AppendNumber(1.f, &ones);
  return {
      {"NoArchitecture",
       GgufBuilder().U32("x", 1),
       kInvalid,
       {"general.architecture", "is missing"}},
      {"UnknownArchitecture",
       GgufBuilder().String("general.architecture", "mamba"),
       kUnserved,
       {"\"mamba\" is not served", "llama, qwen2, "}},
      {"MissingSize",
       GgufBuilder().String("general.architecture", "llama"),
       kInvalid,
       {"llama.embedding_length", "is missing"}},
      {"SizeOfAWrongType",
       GgufBuilder()
           .String("general.architecture", "llama")
           .String("llama.embedding_length", "64"),
       kInvalid,
       {"llama.embedding_length", "want an integer", "string"}},
      {"HugeSize",
       Small().U32("llama.attention.key_length", 1 << 20),
       kInvalid,
       {"head_dim", "1048576"}},
      {"UnknownKey",
       Small().F32("llama.attention.clamp_kqv", 8),
       kUnserved,
       {"llama.attention.clamp_kqv", "not known"}},
      {"Experts",
       Small("qwen2").U32("qwen2.expert_count", 8),
       kUnserved,
       {"qwen2.expert_count", "have 8"}},
      {"UsedExpertsAreMissing",
       Small().U32("llama.expert_count", 8),
       kInvalid,
       {"llama.expert_used_count", "is missing"}},
      {"MoreExpertsUsedThanThereAre",
       Small().U32("llama.expert_count", 8).U32("llama.expert_used_count", 9),
       kInvalid,
       {"num_experts_per_tok", "have 9"}},
      {"HugeNumberOfExperts",
       Small()
           .U32("llama.expert_count", 1 << 30)
           .U32("llama.expert_used_count", 2),
       kInvalid,
       {"num_local_experts", "1073741824"}},
      {"NoExperts",
       Small("qwen3moe").U32("qwen3moe.expert_used_count", 2),
       kInvalid,
       {"qwen3moe.expert_count", "is missing"}},
      {"SigmoidOfExperts",
       Small()
           .U32("llama.expert_count", 8)
           .U32("llama.expert_used_count", 2)
           .U32("llama.expert_gating_func", 2),
       kUnserved,
       {"llama.expert_gating_func", "have 2"}},
      {"SharedExperts",
       Small()
           .U32("llama.expert_count", 8)
           .U32("llama.expert_used_count", 2)
           .U32("llama.expert_shared_count", 1),
       kUnserved,
       {"llama.expert_shared_count", "have 1"}},
      {"WeightsOfExpertsThatAreNotNormalized",
       Small()
           .U32("llama.expert_count", 8)
           .U32("llama.expert_used_count", 2)
           .Bool("llama.expert_weights_norm", false),
       kUnserved,
       {"llama.expert_weights_norm"}},
      {"CapOfGemma3",
       Small("gemma3").F32("gemma3.final_logit_softcapping", 30),
       kUnserved,
       {"final_logit_softcapping", "have 30"}},
      {"CapOfLlama",
       Small().F32("llama.final_logit_softcapping", 30),
       kUnserved,
       {"llama.final_logit_softcapping", "not known"}},
      {"WindowsOfAnotherNumberOfLayers",
       Small("gemma3").Array("gemma3.attention.sliding_window_pattern",
                             GgufType::kBool, 3, std::string(3, '\1')),
       kInvalid,
       {"sliding_window_pattern", "2 layers, have 3"}},
      {"WindowsOfNoPeriod",
       Small("gemma3").U32("gemma3.attention.sliding_window_pattern", 0),
       kInvalid,
       {"sliding_window_pattern", "have 0"}},
      {"WindowOfOlmo3",
       Small("olmo2").U32("olmo2.attention.sliding_window", 128),
       kUnserved,
       {"olmo2.attention.sliding_window", "have 128"}},
      {"LongRopeWithoutFactors",
       Small("phi3")
           .U32("phi3.rope.scaling.original_context_length", 4096)
           .String("phi3.rope.scaling.type", "longrope"),
       kInvalid,
       {"long_factor", "want a list of 8 factors"}},
      {"LongRopeOfAnotherLength",
       LongPhi3(Floats({1, 2, 3})),
       kInvalid,
       {"long_factor", "want a list of 6 factors"}},
      {"LongRopeOfHugeFactors",
       LongPhi3(Floats({1, 2, 3, 4, 5, 1e30f})),
       kInvalid,
       {"long_factor", "1e+30"}},
      {"LongRopeWithoutTheOriginalContext",
       Small("phi3").Tensor("rope_factors_long.weight", {8}, 0, ones),
       kInvalid,
       {"original_context_length", "is missing"}},
      {"LongRopeAndAnotherScaling",
       LongPhi3(Floats({1, 2, 4, 8, 16, 32}))
           .String("phi3.rope.scaling.type", "yarn"),
       kUnserved,
       {"rope.scaling.type", "\"yarn\"", "rope_factors_long"}},
      {"LongRopeOfLlama",
       Small().Tensor("rope_factors_long.weight", {8}, 0, ones),
       kUnserved,
       {"rope_factors_long.weight", "llama"}},
      {"LongRopeAndRopeFactors",
       LongPhi3(Floats({1, 2, 4, 8, 16, 32}))
           .Tensor("rope_freqs.weight", {8}, 0, ones),
       kUnserved,
       {"rope_freqs.weight", "together with LongRoPE"}},
      {"RopeFactorsOfGemma3",
       Small("gemma3").Tensor("rope_freqs.weight", {8}, 0, ones),
       kUnserved,
       {"rope_freqs.weight", "together with LongRoPE"}},
      {"WindowsOfTooManyLayers",
       GgufBuilder()
           .String("general.architecture", "gemma2")
           .U32("gemma2.embedding_length", 64)
           .U32("gemma2.block_count", 1025)
           .U32("gemma2.feed_forward_length", 96)
           .U32("gemma2.context_length", 1024)
           .U32("gemma2.attention.head_count", 2)
           .F32("gemma2.attention.layer_norm_rms_epsilon", 1e-6f)
           .Tensor("token_embd.weight", {1}, 0, "1234"),
       kInvalid,
       {"gemma2.block_count", "want 1 to 1024, have 1025"}},
      {"NoPartOfAHeadRotates",
       Small("gptneox").U32("gptneox.rope.dimension_count", 0),
       kInvalid,
       {"gptneox.rope.dimension_count", "want 1 to 16, have 0"}},
      {"SizesThatDifferBetweenLayers",
       Small().I32s("llama.attention.head_count_kv", {2, 4}),
       kUnserved,
       {"differs between layers (2 and 4)"}},
      {"NoLayers",
       Small().I32s("llama.attention.head_count_kv", {}),
       kInvalid,
       {"empty array"}},
      {"ValuesOfAnotherLength",
       Small()
           .U32("llama.attention.key_length", 16)
           .U32("llama.attention.value_length", 32),
       kUnserved,
       {"value_length", "16, have 32"}},
      {"PartOfAHeadRotates",
       Small().U32("llama.rope.dimension_count", 8),
       kUnserved,
       {"rope.dimension_count", "want 16, have 8"}},
      {"LongRope",
       Small().String("llama.rope.scaling.type", "longrope"),
       kUnserved,
       {"longrope"}},
      {"AttentionFactor",
       Small().F32("llama.rope.scaling.attn_factor", 2),
       kUnserved,
       {"attn_factor", "have 2"}},
      {"EpsilonThatIsNotFinite",
       GgufBuilder(Small()).F32("llama.rope.freq_base", 1.f / 0.f),
       kInvalid,
       {"rope.freq_base", "finite"}},
      {"WindowOfQwen2",
       Small("qwen2").U32("qwen2.attention.sliding_window", 128),
       kUnserved,
       {"sliding_window", "have 128"}},
      {"EndTokenBeyondTheVocabulary",
       Small().U32("tokenizer.ggml.eos_token_id", 7),
       kInvalid,
       {"eos_token_id", "0 to 6"}},
      {"FewRopeFactors",
       Small().Tensor("rope_freqs.weight", {4}, 0, ones.substr(0, 16)),
       kInvalid,
       {"rope_freqs.weight", "each of the 8 pairs, have 4"}},
      {"RopeFactorOfZero",
       Small().Tensor("rope_freqs.weight", {8}, 0, zeros),
       kInvalid,
       {"rope_freqs.weight", "number 0 is 0"}},
      {"RopeFactorsOfAWrongType",
       Small().Tensor("rope_freqs.weight", {8}, 1, zeros.substr(0, 16)),
       kInvalid,
       {"rope_freqs.weight", "have 8 of F16"}},
      {"RopeFactorsAndScaling",
       Small()
           .Tensor("rope_freqs.weight", {8}, 0, ones)
           .String("llama.rope.scaling.type", "linear"),
       kUnserved,
       {"rope_freqs.weight", "linear"}},
  };
}

class BadGgufConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadGgufConfigTest, TheErrorForAnInvalidKeyStatesItsNameAndItsValue) {
  const absl::Status status = SpecOf(GetParam().builder).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("x.gguf"));
  for (const std::string& part : GetParam().parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadGgufConfigTest,
                         ::testing::ValuesIn(BadConfigs()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace kvasir::model
