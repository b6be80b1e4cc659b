// Tests which plans ServePlan refuses. Also checks that a rank can be created
// for each plan that it accepts.
#include "worker/program/served_plan.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "google/protobuf/util/json_util.h"
#include "model/shapes/shape_config.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::string name;
  int64_t head_dim = 8;
  int64_t kv_heads = 4;
  int64_t query_heads = 4;
  std::string key;
  std::string value;
  uint32_t exact_window = 0;  // the exact window of keys and of values
  std::string refusal;        // empty if the plan is served
};

constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";

// A low_rank part with one latent for all heads.
std::string Joint(int64_t heads, int64_t rank, const std::string& rest) {
  std::string list;
  for (int64_t head = 0; head < heads; ++head) {
    absl::StrAppend(&list, head > 0 ? "," : "", head);
  }
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[)", list,
                      R"(],"rank":)", rank, "}]},", rest, "}");
}

// Codes of 4 bits with a range per token for every `group` channels.
std::string Codes(int64_t group) {
  return absl::StrCat(R"("codec":{"bits":{"schedule":[4]},"per_token":{)",
                      R"("group":)", group, R"(},"param_dtype":"F16"})");
}

const std::string kRebuilt =
    R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",)";
const std::string kFolded = R"("uses":[{"fold":{}}],"stored":"NO_ROPE",)";
const std::string kLifted = R"("uses":[{"at_runtime":{}}],"stored":"NO_ROPE",)";

std::vector<Case> Cases() {
  const std::string basis =
      R"({"full":{},"stored":"NO_ROPE","codec":{"bits":{"schedule":[4]},)"
      R"("channel_static":{},"basis_static":{}}})";
  return {
      {.name = "AsManyRunsOfCodesAsAllowed",
       .head_dim = 256,
       .key = kFullKey,
       .value = Joint(4, 1024, kFolded + Codes(4))},
      {.name = "OneRunOfCodesTooMany",
       .head_dim = 264,
       .key = kFullKey,
       .value = Joint(4, 1028, kFolded + Codes(4)),
       .refusal =
           "layer 1 value part 0: 257 runs of codes in a latent; this build "
           "serves at most 256"},
      {.name = "WidestLatentWithExactRows",
       .head_dim = 256,
       .kv_heads = 32,
       .query_heads = 32,
       .key = Joint(32, 96, kRebuilt + Codes(8)),
       .value = basis,
       .exact_window = 8},
      {.name = "LatentTooWide",
       .head_dim = 264,
       .kv_heads = 32,
       .query_heads = 32,
       .key = kFullKey,
       .value = basis,
       .refusal = "layer 1 value part 0: 8448 numbers in a latent; this build "
                  "serves at most 8192"},
      {.name = "HeadsTooWideToRebuild",
       .head_dim = 264,
       .key = Joint(4, 16, kRebuilt + Codes(8)),
       .value = kFullValue,
       .refusal = "layer 1 key part 0: 264 numbers in a rebuilt key; this "
                  "build serves at most 256"},
      // A kernel that lifts these values for prompts fits into 256 KiB of
      // scratch memory, but not if it also reads exact rows. So this plan is
      // served without prompt lifts.
      {.name = "LiftsTogetherWithExactRows",
       .head_dim = 256,
       .kv_heads = 2,
       .query_heads = 32,
       .key = Joint(2, 88, kRebuilt + Codes(8)),
       .value = Joint(2, 512, kLifted + Codes(8)),
       .exact_window = 8},
      {.name = "LiftsThatFillTheScratchMemory",
       .head_dim = 256,
       .kv_heads = 2,
       .query_heads = 32,
       .key = Joint(2, 88, kRebuilt + Codes(8)),
       .value = Joint(2, 512, kLifted + Codes(8))},
  };
}

Case CaseNamed(const std::string& name) {
  for (const Case& each : Cases()) {
    if (each.name == name) return each;
  }
  ADD_FAILURE() << name;
  return {};
}

class ServedPlanTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& each = GetParam();
    shape_.head_dim = each.head_dim;
    shape_.num_kv_heads = each.kv_heads;
    shape_.num_query_heads = each.query_heads;
    KVASIR_ASSERT_OK_AND_ASSIGN(spec_, model::SpecOfShape(shape_));
    plan_ =
        plan::FullRankPlan(model::AttentionShapeOf(spec_), kvasir::v1::BF16);
    const std::string json =
        absl::StrCat(R"({"key":{"parts":[)", each.key,
                     R"(]},"value":{"parts":[)", each.value, "]}}");
    kvasir::v1::LayerPlan* const layer = plan_.mutable_layers(1);
    layer->Clear();
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(json, layer).ok());
    if (each.exact_window > 0) {
      layer->mutable_key()->set_exact_window(each.exact_window);
      layer->mutable_value()->set_exact_window(each.exact_window);
    }
    KVASIR_ASSERT_OK(plan::ValidatePlan(plan_, model::AttentionShapeOf(spec_)));
  }

  absl::StatusOr<std::shared_ptr<const ServedPlan>> ServedHere() const {
    return ServePlan(plan_, model::AttentionShapeOf(spec_), {});
  }

  model::ModelShape shape_ = TinyShape();
  model::DecoderSpec spec_;
  kvasir::v1::KvPlan plan_;
};

TEST_P(ServedPlanTest, ServePlanAcceptsAPlanIfAndOnlyIfARankCanBeCreatedForIt) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const auto source,
      RandomSource::Create(shape_, spec_, Resolved(plan_, spec_), 1,
                           kernels::DType::kBf16));
  RankOptions options = TinyOptions();
  options.kv_cache_bytes = 64 << 20;
  const absl::Status started =
      Rank::Create(spec_, plan_, source.get(), options).status();
  EXPECT_EQ(ServedHere().status(), started);
  if (GetParam().refusal.empty()) {
    KVASIR_EXPECT_OK(started);
  } else {
    EXPECT_THAT(started, base::StatusIs(absl::StatusCode::kUnimplemented,
                                        HasSubstr(GetParam().refusal)));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ServedPlanTest, ::testing::ValuesIn(Cases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

class LiftLimitTest : public ServedPlanTest {};

TEST_P(LiftLimitTest,
       PromptsAreNotLiftedIfThePlansExactRowsFillTheScratchMemory) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto served, ServedHere());
  EXPECT_EQ(served->program(1).value.prompt_lift.has_value(),
            GetParam().exact_window == 0);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, LiftLimitTest,
    ::testing::Values(CaseNamed("LiftsThatFillTheScratchMemory"),
                      CaseNamed("LiftsTogetherWithExactRows")),
    [](const auto& parameter) { return parameter.param.name; });

// A plan that is not served, for layer 1 of the tiny model (4 KV heads of 8
// dims, which are 4 rotation pairs).
struct NotServed {
  std::string name;
  std::string layer;
  std::string says;
};

std::string Keys(const std::string& parts, const std::string& rest = "") {
  return absl::StrCat(R"({"key":{"parts":[)", parts, R"(]},"value":{"parts":[)",
                      kFullValue, "]}", rest, "}");
}

std::vector<NotServed> NotServedCases() {
  const std::string numbers = R"("codec":{"dtype":"BF16"})";
  return {
      {"Anchored",
       Keys(Joint(4, 8,
                  R"("uses":[{"anchored":{"block":16,"order":1}}],
                           "stored":"PRE_ROPE",)" +
                      numbers)),
       "layer 1 key: the plan asks for ANCHORED keys in part 0"},
      {"BasisOfTheSequence",
       Keys(R"({"full":{},"stored":"PRE_ROPE","codec":{"dtype":"F16",
               "basis_sequence":{}}})"),
       "layer 1 key: the plan asks for a basis made for each sequence in part "
       "0"},
      {"RangesOfTheSequence",
       absl::StrCat(R"({"key":{"parts":[)", kFullKey,
                    R"(]},"value":{"parts":[{"full":{},"stored":"NO_ROPE",
                       "codec":{"bits":{"schedule":[4]},"channel_sequence":{},
                       "param_dtype":"F16"}}]}})"),
       "layer 1 value: the plan asks for ranges made for each sequence in part "
       "0"},
      {"PreRopeGroupsOfDifferentWidths",
       Keys(R"({"rope_low_rank":{"groups":[{"heads":[0,1],"pairs":[0],
               "rank_per_pair":[2]},{"heads":[2,3],"pairs":[3],
               "rank_per_pair":[1]}]},"uses":[{"at_runtime":{}}],
               "stored":"PRE_ROPE",)" +
            numbers + "}"),
       "layer 1 key: the plan asks for a rope_low_rank space stored PRE_ROPE "
       "with groups of different widths (4, 2 channels) in part 0"},
      {"LowRankKeysStoredAfterRope",
       Keys(Joint(
           4, 8,
           R"("uses":[{"at_runtime":{}}],"stored":"POST_ROPE",)" + numbers)),
       "low_rank space of keys stored POST_ROPE"},
      {"Selection", Keys(kFullKey, R"(,"selection":{"chunk_slots":8,"budget":64,
                         "landmark_codec":{"dtype":"BF16"}})"),
       "layer 1: the plan asks for selection"},
  };
}

class NotServedTest : public ::testing::TestWithParam<NotServed> {};

TEST_P(NotServedTest,
       TheErrorForAnUnsupportedPlanNamesTheLayerTheSideAndThePart) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(TinyShape()));
  const plan::AttentionShape shape = model::AttentionShapeOf(spec);
  kvasir::v1::KvPlan plan = plan::FullRankPlan(shape, kvasir::v1::BF16);
  plan.mutable_layers(1)->Clear();
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(
                  GetParam().layer, plan.mutable_layers(1))
                  .ok());
  KVASIR_ASSERT_OK(plan::ValidatePlan(plan, shape));
  EXPECT_THAT(ServePlan(plan, shape, {}),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr(GetParam().says)));
}

INSTANTIATE_TEST_SUITE_P(Cases, NotServedTest,
                         ::testing::ValuesIn(NotServedCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

TEST(StartTest,
     CreatingARankResolvesThePlanOnceAndMakesEachAttentionProgramOnce) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::DecoderSpec spec,
                              model::SpecOfShape(TinyShape()));
  const kvasir::v1::KvPlan alike =
      plan::FullRankPlan(model::AttentionShapeOf(spec), kvasir::v1::BF16);
  kvasir::v1::KvPlan unlike = alike;
  unlike.mutable_layers(1)
      ->mutable_value()
      ->mutable_parts(0)
      ->mutable_codec()
      ->set_dtype(kvasir::v1::F32);
  for (const auto& [plan, programs] :
       {std::pair{alike, 1}, std::pair{unlike, 2}}) {
    RandomSource source(TinyShape(), 1, kernels::DType::kBf16);
    const int64_t resolved = plan::NumResolvedPlans();
    const int64_t made = NumAttentionPrograms();
    KVASIR_ASSERT_OK(Rank::Create(spec, plan, &source, TinyOptions()).status());
    EXPECT_EQ(plan::NumResolvedPlans(), resolved + 1);
    EXPECT_EQ(NumAttentionPrograms(), made + programs);
  }
}

}  // namespace
}  // namespace kvasir::worker
