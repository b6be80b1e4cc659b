// Tests the opening of checkpoints with a kv_plan.json, in small folders that
// the tests write.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "google/protobuf/util/json_util.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using kvasir::v1::KvPlan;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A model with two layers, M = 24, and 4 query heads and 2 KV heads of
// 6 dimensions.
constexpr char kConfig[] =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama",
        "hidden_size":24,"intermediate_size":20,"num_attention_heads":4,
        "num_hidden_layers":2,"num_key_value_heads":2,"vocab_size":30,
        "max_position_embeddings":64,"rms_norm_eps":1e-6,"hidden_act":"silu",
        "rope_theta":10000.0,"tie_word_embeddings":true})";

// Layer 0 is not compressed. Layer 1 stores low-rank keys, which are rebuilt at
// run time and have static ranges, and low-rank values, which are folded into
// the output projection.
constexpr char kPlan[] =
    R"({"schema_version":1,"layers":[
  {"key":{"parts":[{"full":{},"stored":"POST_ROPE","codec":{"dtype":"F32"}}]},
   "value":{"parts":[{"full":{},"stored":"NO_ROPE","codec":{"dtype":"F32"}}]}},
  {"key":{"parts":[{"low_rank":{"groups":[{"heads":[0,1],"rank":5}]},
     "uses":[{"reconstruct":{}}],"stored":"PRE_ROPE","latent_bias":true,
     "codec":{"bits":{"schedule":[4]},"channel_static":{}}}]},
   "value":{"parts":[{"low_rank":{"groups":[{"heads":[0,1],"rank":4}]},
     "uses":[{"fold":{}}],"stored":"NO_ROPE","codec":{"dtype":"F32"}}]}}]})";

KvPlan Plan() {
  KvPlan plan;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(kPlan, &plan).ok());
  return plan;
}

// Resolves the plan as a server does when it starts.
plan::ResolvedPlan Resolved(const KvPlan& plan, const DecoderSpec& spec) {
  auto resolved = plan::ResolvePlan(plan, AttentionShapeOf(spec));
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return resolved.ok() ? *std::move(resolved) : plan::ResolvedPlan();
}

class CheckpointPlanTest : public ::testing::Test {
 protected:
  CheckpointPlanTest() {
    folder_.Write("config.json", kConfig);
    folder_.Write("kv_plan.json", kPlan);
    const auto spec = LoadModelConfig(folder_.path());
    EXPECT_TRUE(spec.ok()) << spec.status();
    if (!spec.ok()) return;
    spec_ = *spec;
    for (const RequiredTensor& tensor : Required()) {
      shapes_[tensor.name] = tensor.shape;
    }
  }

  // Writes the tensors. All their bytes are zero, except for the first byte of
  // the tensor `spoiled`.
  void Write(const std::string& spoiled = "",
             const std::string& dtype = "F32") {
    const int64_t number_bytes = dtype == "F32" ? 4 : 2;
    std::vector<std::string> entries;
    int64_t end = 0;
    int64_t spoiled_at = -1;
    for (const auto& [name, shape] : shapes_) {
      const int64_t begin = end;
      if (name == spoiled) spoiled_at = begin;
      int64_t size = number_bytes;
      for (const int64_t length : shape) size *= length;
      end += size;
      entries.push_back(
          absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                       absl::StrJoin(shape, ","), "],\"data_offsets\":[", begin,
                       ",", end, "]}"));
    }
    const std::string header =
        absl::StrCat("{", absl::StrJoin(entries, ","), "}");
    const auto length = static_cast<uint64_t>(header.size());
    std::ofstream out(folder_.File("model.safetensors"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    std::string data(static_cast<size_t>(end), '\0');
    if (spoiled_at >= 0) data[static_cast<size_t>(spoiled_at)] = 1;
    out << header << data;
  }

  absl::Status Check() {
    Write();
    const auto checkpoint = Checkpoint::Open(folder_.path());
    if (!checkpoint.ok()) return checkpoint.status();
    return checkpoint->CheckTensors(Resolved(Plan(), spec_));
  }

  std::vector<RequiredTensor> Required() {
    auto tensors = RequiredTensors(spec_, Resolved(Plan(), spec_));
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return tensors.ok() ? *std::move(tensors) : std::vector<RequiredTensor>();
  }

  std::string Name(const std::string& part) {
    return absl::StrCat("model.layers.1.self_attn.", part);
  }

  const base::TempFolder folder_;
  DecoderSpec spec_;
  std::map<std::string, std::vector<int64_t>> shapes_;
};

TEST_F(CheckpointPlanTest, AnArtifactWhoseTensorsMatchItsPlanIsAccepted) {
  KVASIR_EXPECT_OK(Check());
}

TEST_F(CheckpointPlanTest,
       TheErrorForAnArtifactWithoutItsPlanNamesAMissingTensor) {
  std::filesystem::remove(folder_.File("kv_plan.json"));
  Write();
  EXPECT_THAT(Checkpoint::Open(folder_.path()),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("layers.1.self_attn.k_proj.weight is "
                                 "missing")));
}

TEST_F(CheckpointPlanTest, OpenChecksTheShapesOfTensorsThatNoPlanChanges) {
  shapes_["model.layers.1.mlp.up_proj.weight"] = {19, 24};
  Write();
  EXPECT_THAT(Checkpoint::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("mlp.up_proj.weight"),
                             HasSubstr("want shape [20, 24], have [19, 24]"))));
}

TEST_F(CheckpointPlanTest, EveryAttentionTensorIsCheckedByNameAndShape) {
  const auto good = shapes_;
  int changed = 0;
  for (const auto& [name, shape] : good) {
    if (!name.starts_with("model.layers.1.self_attn.")) continue;
    SCOPED_TRACE(name);
    ++changed;
    shapes_ = good;
    shapes_.erase(name);
    EXPECT_THAT(Check(), StatusIs(absl::StatusCode::kNotFound,
                                  AllOf(HasSubstr("layer 1"), HasSubstr(name),
                                        HasSubstr("is missing"))));
    shapes_ = good;
    ++shapes_[name][0];
    EXPECT_THAT(Check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                  AllOf(HasSubstr("layer 1"), HasSubstr(name),
                                        HasSubstr("want shape ["),
                                        HasSubstr("have ["))));
  }
  // The changed tensors: q_proj, k_proj.down (weight and bias), k_proj.up, the
  // two range tensors of the keys, v_proj.down and o_proj.
  EXPECT_EQ(changed, 8);
}

TEST_F(CheckpointPlanTest, ACompressingPlanWithUncompressedWeightsIsRefused) {
  shapes_.clear();
  for (const RequiredTensor& tensor : RequiredTensors(spec_)) {
    shapes_[tensor.name] = tensor.shape;
  }
  EXPECT_THAT(Check(), StatusIs(absl::StatusCode::kNotFound,
                                AllOf(HasSubstr("layer 1"),
                                      HasSubstr("k_proj.down.weight"),
                                      HasSubstr("[5, 24]"))));
}

TEST_F(CheckpointPlanTest, ATensorThatThePlanDoesNotUseIsRefused) {
  // A bias that the artifact has but nothing reads would change the outputs.
  for (const char* part : {"o_proj.bias", "k_proj.up.bias", "v_proj.weight"}) {
    SCOPED_TRACE(part);
    shapes_[Name(part)] = {24};
    EXPECT_THAT(Check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                  AllOf(HasSubstr("layer 1"), HasSubstr(part),
                                        HasSubstr("is not used by the plan"))));
    shapes_.erase(Name(part));
  }
  shapes_[Name("rotary_emb.inv_freq")] = {3};  // unrelated to the plan
  KVASIR_EXPECT_OK(Check());
  const std::string bias = "model.layers.0.self_attn.o_proj.bias";
  shapes_[bias] = {24};  // refused although layer 0 is not compressed
  EXPECT_THAT(Check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                AllOf(HasSubstr("layer 0"), HasSubstr(bias),
                                      HasSubstr("has no bias"))));
}

// If a plan keeps only some RoPE pairs of the keys, their tensors have the
// names of the base model, but not its shapes.
TEST_F(CheckpointPlanTest,
       ALayerThatKeepsOnlySomeRopePairsNeedsTensorsOfTheReducedShape) {
  KvPlan plan = Plan();
  kvasir::v1::SidePlan* key = plan.mutable_layers(1)->mutable_key();
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(
                  R"({"parts":[{"rope_pairs":{"per_head":[
                      {"pair_indices":[0,2]},{"pair_indices":[1,2]}]},
                      "uses":[{"fold":{}}],"stored":"POST_ROPE",
                      "codec":{"dtype":"F32"}}]})",
                  key)
                  .ok());
  *plan.mutable_layers(1)->mutable_value() = plan.layers(0).value();
  const auto check = [&] {
    Write();
    const auto checkpoint = Checkpoint::Open(folder_.path());
    return checkpoint.ok() ? checkpoint->CheckTensors(Resolved(plan, spec_))
                           : checkpoint.status();
  };
  const auto wanted = RequiredTensors(spec_, Resolved(plan, spec_));
  KVASIR_ASSERT_OK(wanted.status());
  shapes_.clear();
  for (const RequiredTensor& tensor : *wanted) {
    shapes_[tensor.name] = tensor.shape;
  }
  KVASIR_EXPECT_OK(check());
  for (const char* part : {"k_proj.bias", "k_proj.range.min"}) {
    shapes_[Name(part)] = {8};
    EXPECT_THAT(check(), StatusIs(absl::StatusCode::kInvalidArgument,
                                  AllOf(HasSubstr(part),
                                        HasSubstr("is not used by the plan"))));
    shapes_.erase(Name(part));
  }
}

TEST_F(CheckpointPlanTest,
       ABiasTensorIsRefusedIfTheConfigSaysThatTheModelHasNone) {
  std::filesystem::remove(folder_.File("kv_plan.json"));
  shapes_.clear();
  for (const RequiredTensor& tensor : RequiredTensors(spec_)) {
    shapes_[tensor.name] = tensor.shape;
  }
  Write();
  KVASIR_EXPECT_OK(Checkpoint::Open(folder_.path()));
  shapes_[Name("q_proj.bias")] = {24};
  Write();
  EXPECT_THAT(Checkpoint::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("layer 1"), HasSubstr("q_proj.bias"),
                             HasSubstr("has no bias"))));
}

TEST_F(CheckpointPlanTest,
       TensorsOfQuantizationRangesMayBeMissingIfTheCallerDoesNotNeedThem) {
  shapes_.erase(Name("k_proj.range.min"));
  Write();
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  KVASIR_EXPECT_OK(
      checkpoint.CheckTensors(Resolved(Plan(), spec_), /*with_ranges=*/false));
  EXPECT_THAT(checkpoint.CheckTensors(Resolved(Plan(), spec_)),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("k_proj.range.min is missing")));
}

TEST_F(CheckpointPlanTest, TensorsOfQuantizationRangesMustHaveTypeF32) {
  Write("", "BF16");
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  EXPECT_THAT(
      checkpoint.CheckTensors(Resolved(Plan(), spec_)),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("k_proj.range.min"),
                     HasSubstr("has the type BF16, but must have F32"))));
}

TEST_F(CheckpointPlanTest, APlanWithFewerLayersThanTheModelIsRefused) {
  KvPlan plan = Plan();
  plan.mutable_layers()->RemoveLast();
  DecoderSpec fewer = spec_;
  fewer.layers.pop_back();
  Write();
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  EXPECT_THAT(
      checkpoint.CheckTensors(Resolved(plan, fewer)),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("the plan's number of layers is 1, but the model's is 2")));
}

TEST_F(CheckpointPlanTest, WeightsIdDependsOnTheTensorsOfThePlan) {
  const auto id = [this]() -> absl::StatusOr<std::string> {
    auto checkpoint = Checkpoint::Open(folder_.path());
    if (!checkpoint.ok()) return checkpoint.status();
    WeightsIdBuilder builder;
    std::vector<std::byte> buffer(1 << 16);
    for (const auto& [name, shape] : shapes_) {
      auto entry = checkpoint->Tensor(name);
      if (!entry.ok()) return entry.status();
      TensorStream stream(*entry, buffer);
      for (;;) {
        auto block = stream.Next();
        if (!block.ok()) return block.status();
        if (block->num_rows == 0) break;
      }
      builder.Add(name, stream.info(), stream.tiles());
    }
    return builder.Finish(spec_);
  };
  Write();
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string first, id());
  Write(Name("v_proj.down.weight"));
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string second, id());
  EXPECT_NE(first, second);
  spec_.layers[1].rope = false;
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string third, id());
  EXPECT_NE(second, third);
  for (bool* flag :
       {&spec_.tied_head, &spec_.qkv_bias, &spec_.o_bias, &spec_.mlp_bias}) {
    WeightsIdBuilder builder;
    const std::string before = builder.Finish(spec_);
    *flag = !*flag;
    EXPECT_NE(builder.Finish(spec_), before);
  }
}

}  // namespace
}  // namespace kvasir::model
