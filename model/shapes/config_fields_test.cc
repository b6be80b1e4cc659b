// Tests fields that may be in two places or in two files, and fields whose
// values do not affect the model.
#include <cmath>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "model/shapes/config.h"
#include "model/shapes/test_configs.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr absl::StatusCode kWrong = absl::StatusCode::kInvalidArgument;

// RoPE fields that are added to SmallLlama (head_dim 16, 256 positions) or
// to SmallNeox.
struct RopeFields {
  const char* name;
  const char* json;
  // The value that AutoConfig of transformers 5.24 reads. 0: the config is
  // refused with `message`.
  double theta;
  const char* message = "";
  bool neox = false;
};

class RopeFieldsTest : public ::testing::TestWithParam<RopeFields> {};

TEST_P(RopeFieldsTest,
       ThetaIsReadFromEachPlaceUnlessPlacesContradictEachOther) {
  const RopeFields& fields = GetParam();
  json config =
      fields.neox ? With(SmallNeox(), "rotary_pct", 1.0) : SmallLlama();
  config.update(json::parse(fields.json));
  const absl::StatusOr<DecoderSpec> spec = Parse(config);
  if (fields.theta == 0) {
    EXPECT_THAT(spec, StatusIs(kWrong, HasSubstr(fields.message)));
    return;
  }
  KVASIR_ASSERT_OK(spec);
  ASSERT_EQ(spec->rope.frequencies.size(), 8u);
  EXPECT_NEAR(spec->rope.frequencies[1] * std::pow(fields.theta, 0.125), 1,
              1e-12);
}

INSTANTIATE_TEST_SUITE_P(
    All, RopeFieldsTest,
    ::testing::Values(
        RopeFields{"None", "{}", 10000},
        RopeFields{"Root", R"({"rope_theta":500000})", 500000},
        RopeFields{
            "InScaling",
            R"({"rope_scaling":{"rope_type":"default","rope_theta":500000.0}})",
            500000},
        RopeFields{"InScalingWithoutType",
                   R"({"rope_scaling":{"rope_theta":500000}})", 500000},
        RopeFields{"InParameters",
                   R"({"rope_parameters":{"type":"default","rope_theta":7}})",
                   7},
        RopeFields{"BesideParameters",
                   R"({"rope_theta":7,"rope_parameters":)"
                   R"({"rope_type":"default"}})",
                   7},
        RopeFields{"InBothPlaces",
                   R"({"rope_theta":7,"rope_scaling":{"rope_theta":7.0}})", 7},
        RopeFields{"EmptyScaling",
                   R"({"rope_scaling":{},"rope_parameters":{"rope_theta":7}})",
                   7},
        RopeFields{"EmptyParameters",
                   R"({"rope_scaling":{"rope_theta":7},"rope_parameters":{}})",
                   7},
        RopeFields{"NullScaling",
                   R"({"rope_scaling":null,"rope_theta":null,)"
                   R"("rope_parameters":{"rope_theta":7}})",
                   7},
        // transformers 4 and 5 read different places, so these configs
        // are ambiguous.
        RopeFields{"RootAgainstScaling",
                   R"({"rope_theta":1000,"rope_scaling":{"rope_theta":500}})",
                   0,
                   "rope_scaling: rope_theta: 500 disagrees with config.json: "
                   "rope_theta 1000"},
        RopeFields{"RootAgainstParameters",
                   R"({"rope_theta":1000,)"
                   R"("rope_parameters":{"rope_theta":500}})",
                   0, "rope_parameters: rope_theta: 500 disagrees"},
        RopeFields{"ScalingAgainstParameters",
                   R"({"rope_scaling":{"rope_theta":1000},)"
                   R"("rope_parameters":{"rope_theta":500}})",
                   0,
                   "rope_parameters: {\"rope_theta\":500} disagrees with "
                   "rope_scaling {\"rope_theta\":1000}"},
        RopeFields{"ThetaOfParametersMissingInScaling",
                   R"({"rope_scaling":{"type":"linear","factor":2},)"
                   R"("rope_parameters":{"type":"linear","factor":2,)"
                   R"("rope_theta":500}})",
                   0, "keep one of the two"},
        RopeFields{"ThetaTooSmallInScaling",
                   R"({"rope_scaling":{"rope_theta":1}})", 0,
                   "rope_scaling: rope_theta: want 1.0001"},
        RopeFields{"NeoxBase", R"({"rotary_emb_base":7})", 7, "", true},
        RopeFields{"NeoxInScaling",
                   R"({"rope_scaling":{"rope_type":"default","rope_theta":7,)"
                   R"("partial_rotary_factor":1.0}})",
                   7, "", true},
        RopeFields{"NeoxAsTransformers4Saves",
                   R"({"rotary_emb_base":7,"rope_theta":7,)"
                   R"("partial_rotary_factor":1.0})",
                   7, "", true},
        RopeFields{"NeoxUnreadTheta", R"({"rope_theta":500})", 0,
                   "rope_theta: 500 disagrees with the default 10000", true},
        RopeFields{"NeoxUnreadPart", R"({"partial_rotary_factor":0.5})", 0,
                   "partial_rotary_factor: 0.5 disagrees with config.json: "
                   "rotary_pct 1",
                   true},
        RopeFields{"NeoxBaseAgainstScaling",
                   R"({"rotary_emb_base":7,"rope_scaling":{"rope_theta":8}})",
                   0, "rope_theta: 8 disagrees", true}),
    [](const auto& test) { return test.param.name; });

TEST(ConfigTest, TwoRopeObjectsThatMeanTheSameAreAccepted) {
  struct Pair {
    const char* scaling;
    const char* parameters;
  };
  // `scaling` states no rope_theta, so the root's value of 7000 applies to it.
  for (const auto& [scaling, parameters] : std::vector<Pair>{
           {R"({"type":"linear","factor":4})",
            R"({"rope_type":"linear","factor":4.0,"rope_theta":7000.0})"},
           {R"({"rope_type":"llama3","factor":8,"low_freq_factor":1,)"
            R"("high_freq_factor":4,"original_max_position_embeddings":64})",
            R"({"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,)"
            R"("high_freq_factor":4.0,"original_max_position_embeddings":64,)"
            R"("rope_theta":7000,"type":"llama3"})"},
           {R"({"rope_type":"yarn","factor":4,)"
            R"("original_max_position_embeddings":64})",
            R"({"rope_type":"yarn","factor":4,"beta_fast":32,"beta_slow":1.0,)"
            R"("truncate":true,"attention_factor":null,"rope_theta":7000,)"
            R"("original_max_position_embeddings":64})"},
           {R"({"rope_type":"default","factor":4})",
            R"({"rope_theta":7e3})"}}) {
    json config = With(SmallLlama(), "rope_theta", 7000);
    config["rope_scaling"] = json::parse(scaling);
    const DecoderSpec one = MustParse(config);
    config["rope_parameters"] = json::parse(parameters);
    const DecoderSpec both = MustParse(config);
    EXPECT_EQ(one.rope, both.rope) << scaling;
    EXPECT_EQ(one.max_position_embeddings, both.max_position_embeddings);
    config["rope_parameters"]["rope_type"] = "linear";
    config["rope_parameters"].erase("type");
    config["rope_parameters"]["factor"] = 3;
    EXPECT_THAT(Parse(config),
                StatusIs(kWrong, HasSubstr("disagrees with rope_scaling")))
        << scaling;
  }
}

TEST(ConfigTest, AnOriginalContextOutsideTheRopeObjectMustEqualTheOneInside) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0}};
  // If the field is missing, transformers 5 uses max_position_embeddings.
  json config = With(SmallLlama(), "rope_scaling", llama3);
  const RopeSpec without = MustParse(config).rope;
  config["rope_scaling"]["original_max_position_embeddings"] = 256;
  EXPECT_EQ(MustParse(config).rope, without);
  config["original_max_position_embeddings"] = 256;
  EXPECT_EQ(MustParse(config).rope, without);
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  for (const json& scaling : {llama3, yarn}) {
    config["rope_scaling"] = scaling;
    config["original_max_position_embeddings"] = 32;
    EXPECT_THAT(Parse(config),
                StatusIs(kWrong, HasSubstr("original_max_position_embeddings: "
                                           "32 disagrees")));
  }
}

TEST(ConfigTest, FieldsWithValuesThatChangeNothingAreAccepted) {
  json config = SmallLlama();
  config.update(json::parse(R"({"sliding_window":8,"use_sliding_window":false,
    "residual_multiplier":1.0,"embedding_multiplier":1,"logits_scaling":1.0,
    "attention_multiplier":0.25,"attn_logit_softcapping":0.0,
    "final_logit_softcapping":null,"quantization_config":{},
    "bos_token_id":-1,"eos_token_id":-1})"));
  const DecoderSpec spec = MustParse(config);
  EXPECT_EQ(spec.layers[0].sliding_window, 0);
  EXPECT_FALSE(spec.bos_token_id.has_value());
  EXPECT_TRUE(spec.eos_token_ids.empty());
  config["head_dim"] = 128;
  config["attention_multiplier"] = 0.0883883;  // 1 / sqrt(128), rounded
  KVASIR_EXPECT_OK(Parse(config));
}

TEST(ConfigTest, ANullFieldDiffersFromAMissingFieldWithADefault) {
  json config = With(SmallLlama(), "num_attention_heads", 64);
  config["hidden_size"] = 1024;
  config.erase("num_key_value_heads");
  struct Family {
    const char* architecture;
    int64_t missing;
  };
  for (const auto& [architecture, missing] :
       std::vector<Family>{{"LlamaForCausalLM", 64},
                           {"Qwen3ForCausalLM", 32},
                           {"SmolLM3ForCausalLM", 4},
                           {"MistralForCausalLM", 8},
                           {"Qwen2ForCausalLM", 32}}) {
    config["architectures"] = {architecture};
    EXPECT_EQ(MustParse(config).num_kv_heads, missing) << architecture;
    EXPECT_EQ(
        MustParse(With(config, "num_key_value_heads", nullptr)).num_kv_heads,
        64)
        << architecture;
  }
  config["use_sliding_window"] = true;
  config["max_window_layers"] = 0;
  EXPECT_EQ(MustParse(config).layers[0].sliding_window, 4096);
  EXPECT_EQ(MustParse(With(config, "sliding_window", nullptr))
                .layers[0]
                .sliding_window,
            0);
}

TEST(ConfigTest, AModelTypeThatContradictsTheArchitectureIsRefused) {
  EXPECT_THAT(
      Parse(With(SmallLlama(), "model_type", "mistral")),
      StatusIs(kWrong, HasSubstr("\"mistral\" is the type of "
                                 "MistralForCausalLM, but architectures "
                                 "names LlamaForCausalLM; want "
                                 "\"llama\"")));
  KVASIR_EXPECT_OK(Parse(With(SmallLlama(), "model_type", "llama")));
  KVASIR_EXPECT_OK(Parse(With(SmallLlama(), "model_type", "my-llama")));
}

TEST(ConfigTest, AMissingEosFieldMeansTheDefaultOfTheArchitecture) {
  struct Family {
    json config;
    std::vector<int32_t> eos;  // the ids that AutoConfig returns
  };
  const std::vector<Family> families = {
      {SmallLlama(), {2}},
      {With(SmallLlama(), "architectures", {"MistralForCausalLM"}), {2}},
      {With(SmallLlama(), "architectures", {"Qwen2ForCausalLM"}), {}},
      {With(SmallLlama(), "architectures", {"Qwen3ForCausalLM"}), {}},
      {With(SmallLlama(), "architectures", {"SmolLM3ForCausalLM"}), {}},
      {SmallNeox(), {2}},
      {SmallOpt(), {2}}};
  for (const Family& family : families) {
    const std::string name = family.config["architectures"][0];
    const DecoderSpec spec = MustParse(family.config);
    EXPECT_EQ(spec.eos_token_ids, family.eos) << name;
    EXPECT_EQ(spec.eos_source,
              family.eos.empty() ? "config.json" : "the default of " + name);
    for (const json& none : {json(nullptr), json(-1), json::array({-1})}) {
      EXPECT_TRUE(MustParse(With(family.config, "eos_token_id", none))
                      .eos_token_ids.empty())
          << name << none;
    }
    EXPECT_TRUE(
        MustParse(With(family.config, "vocab_size", 2)).eos_token_ids.empty());
  }
}

TEST(ConfigTest, AGenerationConfigWithoutEosIdsKeepsTheEosIdsOfTheModelConfig) {
  for (const char* text :
       {"{}", R"({"eos_token_id":null})", R"({"eos_token_id":[]})"}) {
    DecoderSpec spec = MustParse(With(SmallLlama(), "eos_token_id", {7, -1}));
    KVASIR_ASSERT_OK(ParseGenerationConfig(text, "g.json", &spec));
    EXPECT_EQ(spec.eos_token_ids, std::vector<int32_t>{7}) << text;
    EXPECT_EQ(spec.eos_source, "config.json");
    KVASIR_ASSERT_OK(
        ParseGenerationConfig(R"({"eos_token_id":-1})", "g.json", &spec));
    EXPECT_TRUE(spec.eos_token_ids.empty());
    EXPECT_EQ(spec.eos_source, "g.json");
  }
}

}  // namespace
}  // namespace kvasir::model
