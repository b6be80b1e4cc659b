// Tests the fields of each family, both as transformers 4 and as transformers 5
// writes them.
#include "model/shapes/family_config.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_matchers.h"
#include "model/files/file.h"
#include "model/shapes/config.h"
#include "model/shapes/test_configs.h"
#include "model/shapes/tp_dealt.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kWrong = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kNotServed = absl::StatusCode::kUnimplemented;

json Small(const char* architecture, const char* model_type) {
  return With(With(SmallLlama(), "architectures", {architecture}), "model_type",
              model_type);
}
json SmallQwen3() { return Small("Qwen3ForCausalLM", "qwen3"); }
json SmallMixtral() { return Small("MixtralForCausalLM", "mixtral"); }
json SmallQwen3Moe() { return Small("Qwen3MoeForCausalLM", "qwen3_moe"); }
json SmallOlmo2() { return Small("Olmo2ForCausalLM", "olmo2"); }
json SmallPhi3() { return Small("Phi3ForCausalLM", "phi3"); }
json SmallGemma3() { return Small("Gemma3ForCausalLM", "gemma3_text"); }
json SmallSmolLm3() { return Small("SmolLM3ForCausalLM", "smollm3"); }

// Returns for each layer whether RoPE rotates its keys.
std::vector<bool> Rotates(const DecoderSpec& spec) {
  std::vector<bool> rotates;
  for (const LayerSpec& layer : spec.layers) rotates.push_back(layer.rope);
  return rotates;
}
std::vector<int64_t> WindowsOf(const DecoderSpec& spec) {
  std::vector<int64_t> windows;
  for (const LayerSpec& layer : spec.layers) {
    windows.push_back(layer.sliding_window);
  }
  return windows;
}

TEST(FamilyConfigTest, Qwen3NormalizesQueriesAndKeysAndHasHeadsOf128ByDefault) {
  const DecoderSpec spec = MustParse(SmallQwen3());
  EXPECT_EQ(spec.qk_norm, QkNorm::kHeads);
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_FALSE(spec.qkv_bias || spec.o_bias || spec.mlp_bias);
  EXPECT_EQ(MustParse(With(SmallQwen3(), "head_dim", 24)).head_dim, 24);
  const DecoderSpec biased =
      MustParse(With(SmallQwen3(), "attention_bias", true));
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && !biased.mlp_bias);
  EXPECT_THAT(Parse(With(SmallQwen3(), "mlp_bias", true)),
              StatusIs(kNotServed, HasSubstr("mlp_bias")));
  EXPECT_EQ(MustParse(SmallLlama()).qk_norm, QkNorm::kNone);
}

TEST(FamilyConfigTest, ThePublishedConfigOfQwen3IsRead) {
  const DecoderSpec spec = MustParse(json::parse(R"({
    "architectures":["Qwen3ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"bos_token_id":151643,"eos_token_id":151645,
    "head_dim":128,"hidden_act":"silu","hidden_size":1024,
    "initializer_range":0.02,"intermediate_size":3072,
    "max_position_embeddings":40960,"max_window_layers":28,
    "model_type":"qwen3","num_attention_heads":16,"num_hidden_layers":28,
    "num_key_value_heads":8,"rms_norm_eps":1e-06,"rope_scaling":null,
    "rope_theta":1000000,"sliding_window":null,"tie_word_embeddings":true,
    "torch_dtype":"bfloat16","use_cache":true,"use_sliding_window":false,
    "vocab_size":151936})"));
  EXPECT_EQ(spec.num_heads * spec.head_dim, 2048);
  EXPECT_EQ(spec.layers[27].sliding_window, 0);
  EXPECT_EQ(spec.eos_token_ids, std::vector<int32_t>{151645});
}

TEST(FamilyConfigTest, LayerTypesOverrideMaxWindowLayersOfQwen3) {
  json config = With(SmallQwen3(), "use_sliding_window", true);
  config["sliding_window"] = 9;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(0, 0, 0));
  config["max_window_layers"] = 2;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(0, 0, 9));
  config["layer_types"] = {"sliding_attention", "full_attention",
                           "full_attention"};
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(9, 0, 0));
  config["use_sliding_window"] = false;
  EXPECT_THAT(Parse(config),
              StatusIs(kWrong, HasSubstr("disagrees with sliding_window")));
}

std::vector<bool> HasExperts(const DecoderSpec& spec) {
  std::vector<bool> experts;
  for (const LayerSpec& layer : spec.layers) experts.push_back(layer.experts);
  return experts;
}

TEST(FamilyConfigTest, EveryLayerOfMixtralHasExperts) {
  json config = SmallMixtral();
  config.erase("rms_norm_eps");
  config.erase("num_key_value_heads");
  config["num_attention_heads"] = 8;
  const DecoderSpec spec = MustParse(config);
  EXPECT_EQ(spec.experts, (ExpertsSpec{8, 2, 96, true}));
  EXPECT_THAT(HasExperts(spec), ElementsAre(true, true, true));
  EXPECT_EQ(spec.norm_eps, 1e-5);
  EXPECT_EQ(spec.num_kv_heads, 8);
  EXPECT_NEAR(spec.rope.frequencies[1] * std::pow(1e6, 0.25), 1, 1e-12);
  EXPECT_THAT(WindowsOf(spec), ElementsAre(0, 0, 0));
  config["num_local_experts"] = 5;
  config["num_experts_per_tok"] = 5;
  config["sliding_window"] = 7;
  EXPECT_EQ(MustParse(config).experts, (ExpertsSpec{5, 5, 96, true}));
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(7, 7, 7));
  config["sliding_window"] = nullptr;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(0, 0, 0));
}

TEST(FamilyConfigTest,
     Qwen3MoeReadsWhichLayersHaveExpertsFromTheStepAndTheMlpOnlyLayers) {
  json config = With(SmallQwen3Moe(), "num_hidden_layers", 5);
  DecoderSpec spec = MustParse(config);
  EXPECT_EQ(spec.experts, (ExpertsSpec{128, 8, 768, false}));
  EXPECT_EQ(spec.qk_norm, QkNorm::kHeads);
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_THAT(HasExperts(spec), ElementsAre(true, true, true, true, true));
  EXPECT_EQ(spec.mlp_features(), 128 * 768);
  EXPECT_EQ(spec.used_mlp_features(), 8 * 768);
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3, 0};
  config["norm_topk_prob"] = true;
  config["moe_intermediate_size"] = 10;
  config["num_experts"] = 9;
  spec = MustParse(config);
  EXPECT_EQ(spec.experts, (ExpertsSpec{9, 8, 10, true}));
  EXPECT_THAT(HasExperts(spec), ElementsAre(false, true, false, false, false));
  EXPECT_EQ(spec.mlp_features(), 96);
  config["num_local_experts"] = 9;
  EXPECT_EQ(MustParse(config).experts, spec.experts);
  config.erase("num_experts");
  EXPECT_EQ(MustParse(config).experts, spec.experts);
  config["use_sliding_window"] = true;
  config["sliding_window"] = 6;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(6, 6, 6, 6, 6));
}

TEST(FamilyConfigTest, InvalidFieldsOfExpertsAreRefused) {
  const auto refused = [](const json& config, const char* name,
                          const json& value, const char* text) {
    EXPECT_THAT(Parse(With(config, name, value)),
                StatusIs(kWrong, HasSubstr(text)));
  };
  refused(SmallMixtral(), "num_local_experts", 0, "want 1 to 1024, have 0");
  refused(SmallMixtral(), "num_local_experts", 1025, "want 1 to 1024");
  refused(SmallMixtral(), "num_experts_per_tok", 9, "want 1 to 8, have 9");
  refused(SmallMixtral(), "num_local_experts", 1,
          "num_experts_per_tok: want 1 to 1, have 2");
  refused(SmallQwen3Moe(), "num_experts", -1, "want 1 to 1024, have -1");
  refused(With(SmallQwen3Moe(), "num_experts", 16), "num_local_experts", 17,
          "num_experts: is 16, but num_local_experts is 17");
  refused(SmallQwen3Moe(), "moe_intermediate_size", 0, "want 1");
  refused(With(SmallMixtral(), "num_local_experts", 1024), "num_hidden_layers",
          65, "may have 65536 experts, but 65 layers have 1024 each");
  refused(SmallQwen3Moe(), "decoder_sparse_step", 0, "want 1");
  for (const json& list :
       {json(1), json::array({3}), json::array({-1}), json::array({"0"})}) {
    refused(SmallQwen3Moe(), "mlp_only_layers", list,
            "mlp_only_layers: want a list of layers, 0 to 2");
  }
}

TEST(FamilyConfigTest, EveryFourthLayerOfSmolLm3DoesNotRotateByDefault) {
  json config = With(SmallSmolLm3(), "num_hidden_layers", 5);
  const DecoderSpec spec = MustParse(config);
  EXPECT_THAT(Rotates(spec), ElementsAre(true, true, true, false, true));
  EXPECT_NEAR(spec.rope.frequencies[1] * std::pow(2e6, 0.125), 1, 1e-12);
  EXPECT_TRUE(spec.tied_head);
  config["no_rope_layer_interval"] = 2;
  EXPECT_THAT(Rotates(MustParse(config)),
              ElementsAre(true, false, true, false, true));
  config["no_rope_layers"] = {0, 1, 1, 1, 1};
  EXPECT_THAT(Rotates(MustParse(config)),
              ElementsAre(false, true, true, true, true));
}

TEST(FamilyConfigTest, AListOfNoRopeLayersThatDoesNotFitTheLayersIsRefused) {
  for (const json& list : {json::array({1, 0}), json::array({1, 0, 2}),
                           json::array({1, 0, "1"}), json(3)}) {
    EXPECT_THAT(Parse(With(SmallSmolLm3(), "no_rope_layers", list)),
                StatusIs(kWrong, HasSubstr("want a list of 3 numbers 0 or 1")));
  }
  EXPECT_THAT(Parse(With(SmallSmolLm3(), "no_rope_layer_interval", 0)),
              StatusIs(kWrong, HasSubstr("no_rope_layer_interval: want 1")));
}

TEST(FamilyConfigTest, InSmolLm3OnlyLayersWithoutRopeHaveWindowsByDefault) {
  json config = With(SmallSmolLm3(), "no_rope_layers", {0, 1, 0});
  config["sliding_window"] = 7;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(0, 0, 0));
  config["use_sliding_window"] = true;
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(7, 0, 7));
  config["layer_types"] = {"full_attention", "sliding_attention",
                           "full_attention"};
  EXPECT_THAT(WindowsOf(MustParse(config)), ElementsAre(0, 7, 0));
}

TEST(FamilyConfigTest, Olmo2NormalizesTheOutputsOfAttentionAndMlp) {
  const DecoderSpec spec = MustParse(SmallOlmo2());
  EXPECT_EQ(spec.qk_norm, QkNorm::kAllHeads);
  EXPECT_TRUE(spec.norm_outputs && !spec.norm_inputs);
  EXPECT_FALSE(spec.qkv_bias);
  EXPECT_THAT(Parse(With(SmallOlmo2(), "mlp_bias", true)),
              StatusIs(kNotServed, HasSubstr("mlp_bias")));
}

TEST(FamilyConfigTest,
     AModelThatNormalizesAllHeadsTogetherCannotBeSplitAmongRanks) {
  const plan::TpDealt dealt = TpDealtOf(MustParse(SmallOlmo2()));
  KVASIR_EXPECT_OK(plan::CheckTpSize(dealt, 1));
  EXPECT_THAT(plan::CheckTpSize(dealt, 2),
              StatusIs(kNotServed,
                       HasSubstr("cannot be divided among 2 tensor-parallel "
                                 "ranks, because the norm of queries and keys "
                                 "(QK-norm) sums over all heads; possible "
                                 "numbers of ranks: 1")));
  KVASIR_EXPECT_OK(plan::CheckTpSize(TpDealtOf(MustParse(SmallQwen3())), 2));
}

json LongRope() {
  return {{"type", "longrope"},
          {"short_factor", {1, 1.5, 1, 1, 1, 1, 1, 2}},
          {"long_factor", {1, 1, 1, 1, 1, 1, 1, 4}}};
}

TEST(FamilyConfigTest, TheServedLengthDeterminesTheFrequenciesOfLongRope) {
  json config = With(SmallPhi3(), "rope_scaling", LongRope());
  config["original_max_position_embeddings"] = 64;
  const DecoderSpec spec = MustParse(config);
  const double slowest = std::pow(10000.0, -14.0 / 16);
  EXPECT_NEAR(spec.rope.frequencies[1] * 1.5, std::pow(10000.0, -2.0 / 16),
              1e-12);
  EXPECT_NEAR(spec.rope.frequencies[7] * 2, slowest, 1e-12);
  EXPECT_NEAR(spec.rope.attention_factor,
              std::sqrt(1 + std::log(256.0 / 64) / std::log(64.0)), 1e-12);
  RopeSpec rope = spec.rope;
  ChooseRope(64, &rope);
  EXPECT_EQ(rope.frequencies, spec.rope.frequencies);
  EXPECT_TRUE(rope.long_frequencies.empty());
  rope = spec.rope;
  ChooseRope(65, &rope);
  EXPECT_NEAR(rope.frequencies[7] * 4, slowest, 1e-12);
  for (const char* name : {"su", "yarn"}) {
    config["rope_scaling"]["type"] = name;
    EXPECT_EQ(MustParse(config).rope, spec.rope) << name;
  }
  json moved = SmallPhi3();
  moved["rope_parameters"] = LongRope();
  moved["rope_parameters"]["original_max_position_embeddings"] = 64;
  EXPECT_EQ(MustParse(moved).rope, spec.rope);
  moved["original_max_position_embeddings"] = 32;
  EXPECT_THAT(Parse(moved), StatusIs(kWrong, HasSubstr("disagrees")));
}

TEST(FamilyConfigTest, LongRopeFactorsThatDoNotFitThePairsAreRefused) {
  json config = With(SmallPhi3(), "rope_scaling", LongRope());
  config["rope_scaling"]["long_factor"] = {1, 2};
  EXPECT_THAT(Parse(config),
              StatusIs(kWrong, HasSubstr("long_factor: want a list of 8 "
                                         "factors, have [1,2]")));
  config["rope_scaling"] = LongRope();
  config["rope_scaling"]["short_factor"][3] = 0;
  EXPECT_THAT(Parse(config), StatusIs(kWrong, HasSubstr("short_factor: want "
                                                        "factors from")));
  config = With(SmallLlama(), "rope_scaling", LongRope());
  EXPECT_THAT(Parse(config), StatusIs(kNotServed, HasSubstr("longrope")));
}

TEST(FamilyConfigTest, PartialRotaryFactorSetsTheRotatedDimsOfPhi3) {
  EXPECT_EQ(MustParse(SmallPhi3()).rope.rotary_dim, 16);
  EXPECT_EQ(MustParse(With(SmallPhi3(), "partial_rotary_factor", 0.75))
                .rope.rotary_dim,
            12);
  EXPECT_THAT(Parse(With(SmallPhi3(), "partial_rotary_factor", 0.7)),
              StatusIs(kNotServed, HasSubstr("have 0.7: 11 dims")));
}

TEST(FamilyConfigTest, Gemma3HasTwoRopeBasesAndFourNormsInALayer) {
  json config = With(SmallGemma3(), "num_hidden_layers", 7);
  config["head_dim"] = 16;
  config["sliding_window"] = 9;
  const DecoderSpec spec = MustParse(config);
  EXPECT_THAT(WindowsOf(spec), ElementsAre(9, 9, 9, 9, 9, 0, 9));
  EXPECT_NEAR(spec.rope_of(5).frequencies[1] * std::pow(1e6, 0.125), 1, 1e-12);
  EXPECT_NEAR(spec.rope_of(6).frequencies[1] * std::pow(1e4, 0.125), 1, 1e-12);
  EXPECT_EQ(spec.qk_norm, QkNorm::kHeads);
  EXPECT_TRUE(spec.norm_inputs && spec.norm_outputs && spec.tied_head);
  EXPECT_EQ(spec.norm_weight_offset, 1);
  EXPECT_EQ(spec.embedding_scale, 8);     // sqrt(64)
  EXPECT_EQ(spec.score_scale, 1.0 / 16);  // 256^-0.5
  EXPECT_EQ(spec.mlp, MlpKind::kGatedGeluTanh);
  EXPECT_EQ(MustParse(SmallGemma3()).head_dim, 256);
}

TEST(FamilyConfigTest, TheOldAndTheNewFormOfAGemma3ConfigGiveTheSameModel) {
  json old_form = With(SmallGemma3(), "rope_theta", 5000.0);
  old_form["rope_local_base_freq"] = 300.0;
  old_form["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  old_form["sliding_window_pattern"] = 2;
  json new_form = SmallGemma3();
  new_form["rope_parameters"] = {
      {"full_attention",
       {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 5000.0}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 300.0}}}};
  new_form["layer_types"] = {"sliding_attention", "full_attention",
                             "sliding_attention"};
  const DecoderSpec spec = MustParse(old_form);
  const DecoderSpec other = MustParse(new_form);
  EXPECT_EQ(spec.rope, other.rope);
  EXPECT_EQ(spec.window_rope, other.window_rope);
  EXPECT_NE(spec.rope, *spec.window_rope);
  EXPECT_EQ(WindowsOf(spec), WindowsOf(other));
}

TEST(FamilyConfigTest,
     Gemma2CapsScoresAndLogitsAndHasAWindowInEverySecondLayer) {
  json config = Small("Gemma2ForCausalLM", "gemma2");
  config["sliding_window"] = 9;
  DecoderSpec spec = MustParse(config);
  EXPECT_THAT(WindowsOf(spec), ElementsAre(9, 0, 9));
  EXPECT_EQ(spec.score_cap, 50);
  EXPECT_EQ(spec.logit_cap, 30);
  EXPECT_EQ(spec.qk_norm, QkNorm::kNone);
  EXPECT_FALSE(spec.window_rope.has_value());
  EXPECT_TRUE(spec.norm_inputs && spec.norm_outputs && spec.tied_head);
  config["attn_logit_softcapping"] = nullptr;
  config["final_logit_softcapping"] = 20;
  spec = MustParse(config);
  EXPECT_EQ(spec.score_cap, 0);
  EXPECT_EQ(spec.logit_cap, 20);
  EXPECT_THAT(Parse(With(config, "final_logit_softcapping", -1)),
              StatusIs(kWrong, HasSubstr("final_logit_softcapping: want")));
}

TEST(FamilyConfigTest, ErrorsForUnsupportedFieldsOfGemma3NameTheFields) {
  for (const auto& [field, value] :
       std::map<std::string, json>{{"attn_logit_softcapping", 50.0},
                                   {"final_logit_softcapping", 30.0},
                                   {"use_bidirectional_attention", true},
                                   {"hidden_activation", "silu"}}) {
    EXPECT_THAT(Parse(With(SmallGemma3(), field.c_str(), value)),
                StatusIs(kNotServed, HasSubstr(field)));
  }
  EXPECT_THAT(Parse(With(SmallGemma3(), "sliding_window", nullptr)),
              StatusIs(kWrong, HasSubstr("sliding_window")));
  EXPECT_THAT(Parse(Small("Gemma3ForConditionalGeneration", "gemma3")),
              StatusIs(kNotServed, HasSubstr("images")));
}

// Llama 3.2 and 3.3: configs that transformers 4 and 5 have written.
TEST(FamilyConfigTest, TheOldAndTheNewFormOfALlama3ConfigGiveTheSameModel) {
  json old_form = json::parse(R"({
    "architectures":["LlamaForCausalLM"],"model_type":"llama",
    "attention_bias":false,"bos_token_id":128000,
    "eos_token_id":[128001,128008,128009],"head_dim":64,"hidden_act":"silu",
    "hidden_size":2048,"intermediate_size":8192,
    "max_position_embeddings":131072,"mlp_bias":false,
    "num_attention_heads":32,"num_hidden_layers":16,"num_key_value_heads":8,
    "pretraining_tp":1,"rms_norm_eps":1e-05,"tie_word_embeddings":true,
    "vocab_size":128256})");
  json new_form = old_form;
  old_form["torch_dtype"] = "bfloat16";
  old_form["rope_theta"] = 500000.0;
  old_form["rope_scaling"] = {{"factor", 32.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 8192},
                              {"rope_type", "llama3"}};
  new_form["dtype"] = "bfloat16";
  new_form["rope_parameters"] = old_form["rope_scaling"];
  new_form["rope_parameters"]["rope_theta"] = 500000.0;
  const DecoderSpec spec = MustParse(old_form);
  EXPECT_EQ(spec.rope, MustParse(new_form).rope);
  EXPECT_EQ(spec.eos_token_ids, (std::vector<int32_t>{128001, 128008, 128009}));
  EXPECT_TRUE(spec.tied_head);
}

// The heads of Mistral-Nemo are narrower than hidden_size / heads, and those of
// Mistral-Small are wider.
TEST(FamilyConfigTest, HeadDimOfMistralNemoAndMistralSmallIsReadFromTheConfig) {
  json config = json::parse(R"({
    "architectures":["MistralForCausalLM"],"model_type":"mistral",
    "attention_dropout":0.0,"bos_token_id":1,"eos_token_id":2,
    "head_dim":128,"hidden_act":"silu","hidden_size":5120,
    "initializer_range":0.02,"intermediate_size":14336,
    "max_position_embeddings":131072,"num_attention_heads":32,
    "num_hidden_layers":40,"num_key_value_heads":8,"rms_norm_eps":1e-05,
    "rope_theta":1000000.0,"sliding_window":null,
    "tie_word_embeddings":false,"torch_dtype":"bfloat16","use_cache":true,
    "vocab_size":131072})");
  const DecoderSpec spec = MustParse(config);
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_EQ(spec.rope.rotary_dim, 128);
  EXPECT_EQ(spec.layers[0].sliding_window, 0);
  config.erase("rope_theta");
  config.erase("torch_dtype");
  config["dtype"] = "bfloat16";
  config["rope_parameters"] = {{"rope_type", "default"},
                               {"rope_theta", 1000000.0}};
  EXPECT_EQ(MustParse(config).rope, spec.rope);
}

// Returns a small configuration of the family.
json SmallConfigOf(const FamilyNames& names) {
  for (const json& own : {SmallNeox(), SmallOpt()}) {
    if (own["model_type"] == std::string(names.model_type)) return own;
  }
  return Small(std::string(names.architecture).c_str(),
               std::string(names.model_type).c_str());
}

TEST(ModelsPageTest, ModelsPageListsEveryFamilyWithItsPlans) {
  const char* const source = std::getenv("KVASIR_SOURCE_DIR");
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const std::string page,
      ReadSmallFile(
          std::string(source == nullptr ? "." : source) + "/docs/models.md",
          1 << 20));
  std::map<std::string, std::string> plans;  // by architecture
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    const std::vector<std::string> cells = absl::StrSplit(line, '|');
    if (cells.size() != 7 || !absl::StrContains(cells[2], "ForCausalLM")) {
      continue;
    }
    plans[std::string(absl::StripAsciiWhitespace(cells[2]))] =
        std::string(absl::StripAsciiWhitespace(cells[5]));
  }
  EXPECT_EQ(plans.size(), kFamilies.size());
  for (const FamilyNames& names : kFamilies) {
    const std::string key = "`" + std::string(names.architecture) + "`";
    ASSERT_TRUE(plans.contains(key)) << key;
    const DecoderSpec spec = MustParse(SmallConfigOf(names));
    EXPECT_EQ(plans[key], spec.qk_norm != QkNorm::kNone ? "whole keys"
                          : spec.score_cap != 0         ? "named"
                                                        : "all");
  }
}

}  // namespace
}  // namespace kvasir::model
