#include "model/shapes/config.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "model/files/file.h"
#include "model/files/json.h"
#include "model/shapes/test_configs.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string GoldenFolder() {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/tests/golden");
}

void ExpectFrequencies(const RopeSpec& rope, const std::vector<double>& want,
                       double attention_factor) {
  ASSERT_EQ(rope.frequencies.size(), want.size());
  for (size_t f = 0; f < want.size(); ++f) {
    // The reference computes in float32, so the comparison needs a tolerance.
    EXPECT_NEAR(rope.frequencies[f] / want[f], 1.0, 2e-6) << f;
  }
  EXPECT_NEAR(rope.attention_factor, attention_factor, 1e-7);
}

TEST(ConfigTest, ReadsALlamaConfig) {
  const DecoderSpec spec = MustParse(SmallLlama());
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_EQ(spec.num_kv_heads, 2);
  EXPECT_EQ(spec.num_layers(), 3);
  EXPECT_EQ(spec.layers[0].sliding_window, 0);
  EXPECT_FALSE(spec.qkv_bias);
  EXPECT_FALSE(spec.tied_head);
  EXPECT_EQ(spec.rope.rotary_dim, 16);
  EXPECT_EQ(spec.rope.frequencies[0], 1.0);
  EXPECT_NEAR(spec.rope.frequencies[7], std::pow(10000.0, -14.0 / 16), 1e-12);
}

TEST(ConfigTest, ReadsANeoxConfig) {
  DecoderSpec spec = MustParse(SmallNeox());
  EXPECT_EQ(spec.norm, NormKind::kLayerNorm);
  EXPECT_EQ(spec.norm_eps, 1e-5);
  EXPECT_EQ(spec.mlp, MlpKind::kGelu);
  EXPECT_TRUE(spec.parallel_residual);
  EXPECT_TRUE(spec.qkv_bias && spec.o_bias && spec.mlp_bias);
  EXPECT_FALSE(spec.tied_head);
  EXPECT_FALSE(spec.learned_positions);
  EXPECT_EQ(spec.rope.rotary_dim, 4);  // a quarter of 16
  EXPECT_EQ(spec.rope.pairing, RopePairing::kHalfSplit);
  ExpectFrequencies(spec.rope, {1.0, 0.01}, 1.0);

  json config =
      With(With(SmallNeox(), "rotary_pct", 0.5), "hidden_act", "gelu_fast");
  config["use_parallel_residual"] = false;
  config["attention_bias"] = false;
  config["rotary_emb_base"] = 16;
  spec = MustParse(config);
  EXPECT_EQ(spec.mlp, MlpKind::kGeluTanh);
  EXPECT_FALSE(spec.parallel_residual);
  EXPECT_FALSE(spec.qkv_bias || spec.o_bias);
  EXPECT_TRUE(spec.mlp_bias);
  ExpectFrequencies(spec.rope, {1.0, 0.5, 0.25, 0.125}, 1.0);
}

TEST(ConfigTest, NewAndOldNeoxRopeFieldsThatContradictEachOtherAreRefused) {
  // Newer versions of transformers write RoPE settings as rope_parameters.
  json config = SmallNeox();
  config["rope_parameters"] = {{"rope_type", "default"},
                               {"rope_theta", 16.0},
                               {"partial_rotary_factor", 0.5}};
  ExpectFrequencies(MustParse(config).rope, {1.0, 0.5, 0.25, 0.125}, 1.0);
  config["rotary_pct"] = 0.25;
  EXPECT_THAT(Parse(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(HasSubstr("partial_rotary_factor"),
                                            HasSubstr("disagrees"))));
  config = With(SmallNeox(), "rope_theta", 500.0);
  config["rotary_emb_base"] = 10000;
  EXPECT_THAT(Parse(config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("rope_theta"), HasSubstr("500"),
                             HasSubstr("rotary_emb_base 10000"))));
}

TEST(ConfigTest, LinearRopeScalingOfANeoxModelAppliesOnlyToItsRotatedDims) {
  json config = With(SmallNeox(), "rotary_pct", 0.5);
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  config["rotary_emb_base"] = 16;
  ExpectFrequencies(MustParse(config).rope, {0.25, 0.125, 0.0625, 0.03125},
                    1.0);
}

TEST(ConfigTest, ReadsAnOptConfig) {
  DecoderSpec spec = MustParse(SmallOpt());
  EXPECT_EQ(spec.norm, NormKind::kLayerNorm);
  EXPECT_EQ(spec.mlp, MlpKind::kRelu);
  EXPECT_EQ(spec.intermediate_size, 96);
  EXPECT_TRUE(spec.learned_positions);
  EXPECT_TRUE(spec.tied_head);
  EXPECT_TRUE(spec.qkv_bias && spec.o_bias && spec.mlp_bias);
  EXPECT_FALSE(spec.parallel_residual);
  EXPECT_EQ(spec.rope.rotary_dim, 0);
  EXPECT_FALSE(spec.layers[1].rope);
  spec = MustParse(With(SmallOpt(), "enable_bias", false));
  EXPECT_FALSE(spec.qkv_bias || spec.o_bias || spec.mlp_bias);
  EXPECT_EQ(MustParse(With(SmallOpt(), "activation_function", "gelu")).mlp,
            MlpKind::kGelu);
}

TEST(ConfigTest,
     NeoxAndOptConfigsWithFieldsThatOnlyLlamaModelsSupportAreRefused) {
  for (const json& config : {SmallNeox(), SmallOpt()}) {
    EXPECT_THAT(Parse(With(config, "num_key_value_heads", 2)),
                StatusIs(absl::StatusCode::kUnimplemented,
                         AllOf(HasSubstr("num_key_value_heads"),
                               HasSubstr("want 4, have 2"))));
    EXPECT_THAT(
        Parse(With(config, "head_dim", 8)),
        StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("head_dim")));
    EXPECT_THAT(Parse(With(config, "sliding_window", 8)),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr("sliding_window")));
  }
}

TEST(ConfigTest, HeadDimMayDifferFromHiddenSizeDividedByHeads) {
  EXPECT_EQ(MustParse(With(SmallLlama(), "head_dim", 32)).head_dim, 32);
  EXPECT_EQ(MustParse(With(SmallLlama(), "head_dim", nullptr)).head_dim, 16);
}

TEST(ConfigTest, TheAttentionBiasFieldOfLlamaAlsoAppliesToTheOutputProjection) {
  const DecoderSpec spec =
      MustParse(With(SmallLlama(), "attention_bias", true));
  EXPECT_TRUE(spec.qkv_bias);
  EXPECT_TRUE(spec.o_bias);
  EXPECT_FALSE(spec.mlp_bias);
}

TEST(ConfigTest, MistralConfigsDistinguishAMissingWindowFromANullWindow) {
  json config = SmallLlama();
  config["architectures"] = {"MistralForCausalLM"};
  EXPECT_EQ(MustParse(config).layers[2].sliding_window, 4096);
  EXPECT_EQ(
      MustParse(With(config, "sliding_window", 8)).layers[0].sliding_window, 8);
  EXPECT_EQ(MustParse(With(config, "sliding_window", nullptr))
                .layers[0]
                .sliding_window,
            0);
}

TEST(ConfigTest,
     Qwen2ModelsHaveSlidingWindowsOnlyInUpperLayersAndOnlyIfEnabled) {
  json config = SmallLlama();
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["sliding_window"] = 8;
  config["max_window_layers"] = 1;
  EXPECT_EQ(MustParse(config).layers[2].sliding_window, 0);
  EXPECT_TRUE(MustParse(config).qkv_bias);
  EXPECT_FALSE(MustParse(config).o_bias);
  config["use_sliding_window"] = true;
  EXPECT_EQ(MustParse(config).layers[0].sliding_window, 0);
  EXPECT_EQ(MustParse(config).layers[1].sliding_window, 8);
  config["layer_types"] = {"sliding_attention", "full_attention",
                           "full_attention"};
  EXPECT_EQ(MustParse(config).layers[0].sliding_window, 8);
  EXPECT_EQ(MustParse(config).layers[1].sliding_window, 0);
}

TEST(ConfigTest, LinearRopeScalingDividesTheFrequenciesByTheFactor) {
  json config = With(SmallLlama(), "head_dim", 8);
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  ExpectFrequencies(MustParse(config).rope, {0.25, 0.025, 0.0025, 0.00025},
                    1.0);
}

TEST(ConfigTest, Llama3ScalingMatchesTheReference) {
  const json scaling = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const std::vector<double> want = {1,
                                    0.193922758,
                                    0.0376060307,
                                    0.00729266508,
                                    0.000524846022,
                                    3.42810235e-05,
                                    6.64786967e-06,
                                    1.28917316e-06};
  json config = With(SmallLlama(), "rope_theta", 500000.0);
  config["rope_scaling"] = scaling;
  ExpectFrequencies(MustParse(config).rope, want, 1.0);

  json newer = With(SmallLlama(), "rope_parameters", scaling);
  newer["rope_parameters"]["rope_theta"] = 500000.0;
  ExpectFrequencies(MustParse(newer).rope, want, 1.0);
}

TEST(ConfigTest, YarnScalingMatchesTheReference) {
  json config = SmallLlama();
  config["rope_scaling"] = {{"rope_type", "yarn"},
                            {"factor", 4.0},
                            {"original_max_position_embeddings", 64}};
  ExpectFrequencies(MustParse(config).rope,
                    {1, 0.237170815, 0.049999997, 0.00790569466, 0.00249999994,
                     0.000790569466, 0.000250000012, 7.90569466e-05},
                    1.13862944);
}

TEST(ConfigTest, YarnUsesTheMscaleAndBetaFieldsOfTheConfig) {
  json config = With(SmallLlama(), "rope_theta", 1e6);
  config["rope_scaling"] = {{"rope_type", "yarn"},
                            {"factor", 40.0},
                            {"original_max_position_embeddings", 4096},
                            {"mscale", 0.707},
                            {"mscale_all_dim", 1.2},
                            {"beta_fast", 16},
                            {"beta_slow", 2}};
  ExpectFrequencies(
      MustParse(config).rope,
      {1, 0.177827939, 0.0316227786, 0.00288199936, 2.49999994e-05,
       4.44569832e-06, 7.90569402e-07, 1.40585328e-07},
      0.873940458);
}

TEST(ConfigTest,
     YarnWithoutTruncationDoesNotRoundTheEndsOfTheInterpolatedRange) {
  json config = SmallLlama();
  config["rope_scaling"] = {{"rope_type", "yarn"},
                            {"factor", 8.0},
                            {"original_max_position_embeddings", 32},
                            {"truncate", false},
                            {"attention_factor", 0.9}};
  ExpectFrequencies(MustParse(config).rope,
                    {1, 0.120533988, 0.0125000002, 0.00395284733, 0.00124999997,
                     0.000395284733, 0.000125000006, 3.95284733e-05},
                    0.9);
}

TEST(ConfigTest, YarnAllowsPositionsUpToTheExtendedContextLength) {
  json config = With(SmallLlama(), "max_position_embeddings", 64);
  config["rope_scaling"] = {{"type", "yarn"},
                            {"factor", 4.0},
                            {"original_max_position_embeddings", 64}};
  EXPECT_EQ(MustParse(config).max_position_embeddings, 256);
}

struct BadConfig {
  const char* name;
  const char* field;
  json value;
  absl::StatusCode code;
  const char* message;
};

class BadConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigTest, TheErrorForAnInvalidModelConfigStatesTheReason) {
  const BadConfig& bad = GetParam();
  EXPECT_THAT(Parse(With(SmallLlama(), bad.field, bad.value)),
              StatusIs(bad.code, AllOf(HasSubstr("config.json"),
                                       HasSubstr(bad.message))));
}

constexpr absl::StatusCode kWrong = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kNotServed = absl::StatusCode::kUnimplemented;

INSTANTIATE_TEST_SUITE_P(
    All, BadConfigTest,
    ::testing::Values(
        BadConfig{"NoLayers", "num_hidden_layers", 0, kWrong, "1 to 1024"},
        BadConfig{"HugeLayers", "num_hidden_layers", 1 << 30, kWrong, "1024"},
        BadConfig{"NegativeHidden", "hidden_size", -64, kWrong, "have -64"},
        BadConfig{"HugeHidden", "hidden_size", int64_t{1} << 62, kWrong,
                  "hidden_size"},
        BadConfig{"TextHidden", "hidden_size", "64", kWrong, "an integer"},
        BadConfig{"HiddenNotDivisible", "hidden_size", 66, kWrong,
                  "multiple of num_attention_heads 4"},
        BadConfig{"KvHeadsNotDivisor", "num_key_value_heads", 3, kWrong,
                  "divisor of num_attention_heads 4"},
        BadConfig{"OddHeadDim", "head_dim", 15, kWrong, "even"},
        BadConfig{"HugeVocab", "vocab_size", int64_t{1} << 40, kWrong,
                  "vocab_size"},
        BadConfig{"ZeroEps", "rms_norm_eps", 0, kWrong, "rms_norm_eps"},
        BadConfig{"ThetaOne", "rope_theta", 1.0, kWrong, "rope_theta"},
        BadConfig{"EosOutOfVocab", "eos_token_id", 100, kWrong, "0 to 99"},
        BadConfig{"EosListOfText", "eos_token_id", {"a"}, kWrong, "token ids"},
        BadConfig{"BosNegative", "bos_token_id", -2, kWrong,
                  "bos_token_id: want 0 to 99, or -1 for none, have -2"},
        BadConfig{"TwoArchitectures",
                  "architectures",
                  {"a", "b"},
                  kWrong,
                  "one name"},
        BadConfig{"Gelu", "hidden_act", "gelu", kNotServed, "\"gelu\""},
        BadConfig{"SharedExpert",
                  "architectures",
                  {"Qwen2MoeForCausalLM"},
                  kNotServed,
                  "experts that all tokens share"},
        BadConfig{"QkNormFlag", "use_qk_norm", true, kNotServed, "QK-norm"},
        BadConfig{"PartialRotary", "partial_rotary_factor", 0.5, kNotServed,
                  "want 1, have 0.5"},
        BadConfig{"LlamaWindow", "sliding_window", 8, kNotServed,
                  "sliding_window"},
        BadConfig{"LayerTypes",
                  "layer_types",
                  {"full_attention", "sliding_attention", "full_attention"},
                  kWrong,
                  "layer 1"},
        BadConfig{"LayerTypesTooFew",
                  "layer_types",
                  {"full_attention"},
                  kWrong,
                  "list of 3"},
        BadConfig{"WindowInUse", "sliding_window", 8, kNotServed,
                  "want null, or use_sliding_window false"},
        BadConfig{"ResidualMultiplier", "residual_multiplier", 0.22, kNotServed,
                  "want 1 or no such field, have 0.22"},
        BadConfig{"AttentionMultiplier", "attention_multiplier", 1, kNotServed,
                  "want 0.25 or no such field, have 1"},
        BadConfig{"SoftCap", "final_logit_softcapping", 30, kNotServed,
                  "final_logit_softcapping"},
        BadConfig{"Quantized",
                  "quantization_config",
                  {{"quant_method", "awq"}},
                  kNotServed,
                  "weights that are quantized by \"awq\""},
        BadConfig{"QuantizedByNoMethod",
                  "quantization_config",
                  {{"bits", 4}},
                  kNotServed,
                  "quant_method: is missing in {\"bits\":4}"},
        BadConfig{"QuantizationText", "quantization_config", "awq", kWrong,
                  "want an object"},
        BadConfig{"RopeScalingNumber", "rope_scaling", 4, kWrong,
                  "want an object"},
        BadConfig{"DynamicRope",
                  "rope_scaling",
                  {{"type", "dynamic"}, {"factor", 2}},
                  kNotServed,
                  "dynamic"},
        BadConfig{"UnknownRope",
                  "rope_scaling",
                  {{"rope_type", "spiral"}},
                  kNotServed,
                  "spiral"},
        BadConfig{"RopeTypesDisagree",
                  "rope_scaling",
                  {{"rope_type", "yarn"}, {"type", "linear"}},
                  kWrong,
                  "disagree"},
        BadConfig{"LinearNoFactor",
                  "rope_scaling",
                  {{"type", "linear"}},
                  kWrong,
                  "factor: is missing"},
        BadConfig{"ShrinkingFactor",
                  "rope_scaling",
                  {{"type", "linear"}, {"factor", 0.0}},
                  kWrong,
                  "factor"},
        BadConfig{"Llama3Borders",
                  "rope_scaling",
                  {{"rope_type", "llama3"},
                   {"factor", 8},
                   {"low_freq_factor", 4},
                   {"high_freq_factor", 4},
                   {"original_max_position_embeddings", 64}},
                  kWrong,
                  "more than low_freq_factor"},
        BadConfig{"RopePerLayerType",
                  "rope_parameters",
                  {{"full_attention", {{"rope_type", "default"}}}},
                  kNotServed,
                  "per layer type"}),
    [](const auto& test) { return test.param.name; });

TEST(ConfigTest, EosIdsOfTheGenerationConfigReplaceEosIdsOfTheModelConfig) {
  DecoderSpec spec = MustParse(With(SmallLlama(), "eos_token_id", 2));
  KVASIR_ASSERT_OK(ParseGenerationConfig(
      R"({"eos_token_id":[5,6],"temperature":0.6,"top_p":0.9,"top_k":20,)"
      R"("do_sample":true})",
      "generation_config.json", &spec));
  EXPECT_EQ(spec.eos_token_ids, (std::vector<int32_t>{5, 6}));
  EXPECT_THAT(ParseGenerationConfig(R"({"top_p":"x"})", "g.json", &spec),
              StatusIs(kWrong, HasSubstr("g.json: top_p")));
}

TEST(ConfigTest,
     TheErrorForASamplingDefaultOutOfRangeStatesItsNameValueAndLimit) {
  DecoderSpec spec = MustParse(SmallLlama());
  for (const auto& [text, want] : std::map<std::string, std::string>{
           {R"({"temperature":-5})",
            "temperature: want 0 to 3.40282e+38, have -5"},
           {R"({"top_p":1.5})", "top_p: want 0 to 1, have 1.5"},
           {R"({"top_k":-2})", "top_k: want -1 to 2147483647, have -2"},
           {R"({"min_p":-0.1})", "min_p: want 0 to 1, have -0.1"},
           {R"({"repetition_penalty":0})",
            "repetition_penalty: want 0.01 to 100, have 0"},
           {R"({"max_new_tokens":-1})",
            "max_new_tokens: want 0 to 2147483647, have -1"}}) {
    EXPECT_THAT(ParseGenerationConfig(text, "g.json", &spec),
                StatusIs(kWrong, HasSubstr("g.json: " + want)));
  }
  KVASIR_EXPECT_OK(ParseGenerationConfig(
      R"({"temperature":0,"top_k":-1,"top_p":null,"max_new_tokens":0})",
      "g.json", &spec));
}

TEST(ConfigTest, TheConfigOfEveryGoldenModelIsAccepted) {
  int num_models = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(GoldenFolder() + "/models")) {
    KVASIR_EXPECT_OK(LoadModelConfig(entry.path().string()));
    ++num_models;
  }
  EXPECT_GE(num_models, 16);
}

TEST(ConfigTest, TheErrorForEveryUnsupportedGoldenConfigNamesTheReason) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::string text,
      ReadSmallFile(GoldenFolder() + "/refused/refused.json", 1 << 16));
  KVASIR_ASSERT_OK_AND_ASSIGN(const json words, ParseJson(text, "refused"));
  EXPECT_GE(words.size(), 10u);
  for (const auto& [name, word] : words.items()) {
    const absl::Status status =
        LoadModelConfig(absl::StrCat(GoldenFolder(), "/refused/", name))
            .status();
    EXPECT_FALSE(status.ok()) << name;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(word.get<std::string>()))
        << name;
  }
}

}  // namespace
}  // namespace kvasir::model
