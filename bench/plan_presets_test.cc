#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "base/status_matchers.h"
#include "bench/attention_layers.h"
#include "cache/layout/layout.h"
#include "gtest/gtest.h"
#include "model/shapes/shape_config.h"
#include "plan/plan.h"
#include "plan/presets.h"
#include "worker/program/served_plan.h"
#include "worker/ranks/rank.h"

namespace kvasir::bench {
namespace {

using ::kvasir::base::StatusIs;

model::ModelShape ShapeOf(const std::string& name) {
  absl::StatusOr<model::ModelShape> shape = model::FindShape(name);
  KVASIR_EXPECT_OK(shape);
  return *shape;
}

TEST(PlanPresetsTest,
     EveryPresetIsSupportedForEveryModelShapeThatIsBenchmarked) {
  for (const char* name :
       {"llama-2-7b", "llama-3-8b", "tinyllama-1.1b", "kvasir-tiny"}) {
    const auto spec = model::SpecOfShape(ShapeOf(name));
    KVASIR_ASSERT_OK(spec);
    for (const plan::PlanPreset& preset : plan::PlanPresets()) {
      const auto plan =
          plan::MakePresetPlan(preset.name, model::AttentionShapeOf(*spec));
      KVASIR_ASSERT_OK(plan) << name << " " << preset.name;
      KVASIR_EXPECT_OK(
          worker::ServePlan(*plan, model::AttentionShapeOf(*spec), {}))
          << name << " " << preset.name;
    }
  }
}

TEST(PlanPresetsTest, PresetsOfFewerBitsKeepMoreOfTheLatestTokensExact) {
  const std::map<std::string, uint32_t> windows = {{"rotated-4bit", 28},
                                                   {"rotated-3bit", 60},
                                                   {"rotated-k3v2", 124},
                                                   {"rotated-2bit", 124}};
  const auto spec = model::SpecOfShape(ShapeOf("llama-3-8b"));
  KVASIR_ASSERT_OK(spec);
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    const auto plan =
        plan::MakePresetPlan(preset.name, model::AttentionShapeOf(*spec));
    KVASIR_ASSERT_OK(plan) << preset.name;
    const auto window = windows.find(preset.name);
    const bool rotated = window != windows.end();
    for (const kvasir::v1::LayerPlan& layer : plan->layers()) {
      EXPECT_EQ(layer.exact_sinks(), rotated ? 4u : 0u) << preset.name;
      for (const uint32_t exact :
           {layer.key().exact_window(), layer.value().exact_window()}) {
        EXPECT_EQ(exact, rotated ? window->second : 0u) << preset.name;
      }
    }
  }
}

// Values of 2 bits change many models, but the short text of the plan check
// hardly shows it: a large part of its tokens is exact.
TEST(PlanPresetsTest, AutoMayChooseAllPresetsOfAnyCheckpointButThoseOfTwoBits) {
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    const bool two_bits =
        preset.name == "rotated-2bit" || preset.name == "rotated-k3v2";
    EXPECT_EQ(preset.auto_may_choose, preset.any_checkpoint && !two_bits)
        << preset.name;
  }
}

TEST(PlanPresetsTest, ASequenceOf768TokensIsNotLargerWith3BitsThanWith4) {
  for (const char* name : {"llama-3-8b", "smollm2-135m"}) {
    const auto spec = model::SpecOfShape(ShapeOf(name));
    KVASIR_ASSERT_OK(spec);
    const auto bytes = [&](const std::string& preset) {
      const plan::AttentionShape shape = model::AttentionShapeOf(*spec);
      const auto plan = plan::MakePresetPlan(preset, shape);
      KVASIR_EXPECT_OK(plan);
      const auto layout =
          cache::PageLayout::Create(*plan, shape, {.page_tokens = 64});
      KVASIR_EXPECT_OK(layout);
      return layout->BytesAtLength(768, 512);
    };
    EXPECT_LE(bytes("rotated-3bit"), bytes("rotated-4bit")) << name;
  }
}

TEST(PlanPresetsTest, PresetsStoreTheBytesThatTheirNamesState) {
  const model::ModelShape shape = ShapeOf("llama-3-8b");
  const auto bytes = [&](const std::string& plan) {
    const auto slot = AttentionLayers::BytesPerSlot(shape, plan, 64);
    KVASIR_EXPECT_OK(slot) << plan;
    return slot.value_or(0);
  };
  const double dense = bytes("dense-bf16");
  EXPECT_EQ(dense, 2 * 8 * 128 * 2);
  for (const char* half :
       {"rap-50", "commuting-50", "palu-50-g1", "palu-50-g2", "palu-50-g4"}) {
    EXPECT_EQ(bytes(half), dense / 2) << half;
  }
  // 2 sides * 8 heads * (32 bytes of codes + 4 bytes of scale and minimum).
  EXPECT_EQ(bytes("palu-50-g1-4bit"), 2 * 8 * (32 + 4));
  EXPECT_EQ(bytes("palu-50-g4-4bit"), 2 * 2 * (128 + 4));
  EXPECT_EQ(bytes("palu-50-g4-3bit"), 2 * 2 * (96 + 4));
  EXPECT_EQ(bytes("palu-50-g4-2bit"), 2 * 2 * (64 + 4));
  EXPECT_EQ(bytes("rap-50-4bit"), 2 * 8 * (32 + 4));
  EXPECT_EQ(bytes("dense-8bit"), 2 * 8 * (128 + 4));
  // 2 sides * 8 heads * (64 bytes of codes + 2 bytes for the vector's length).
  EXPECT_EQ(bytes("rotated-4bit"), 2 * 8 * (64 + 2));
  EXPECT_EQ(bytes("rotated-3bit"), 2 * 8 * (48 + 2));
  EXPECT_EQ(bytes("rotated-k3v2"), 8 * (48 + 2) + 8 * (32 + 2));
  EXPECT_EQ(bytes("rotated-2bit"), 2 * 8 * (32 + 2));
  // 1024 key channels of 3 bits on average, and 8 value heads with 64 bytes of
  // codes and 4 bytes of ranges.
  EXPECT_EQ(bytes("svdq-84442200"), 1024 * 3 / 8 + 8 * (64 + 4));
}

// Among the shapes are some with heads that RoPE rotates only partly, with
// learned positions, and with head sizes that are not a power of two.
TEST(PlanPresetsTest,
     PresetsMarkedForAnyCheckpointAreSupportedForUnusualModelShapes) {
  for (const char* name :
       {"pythia-160m", "opt-125m", "qwen2.5-0.5b", "smollm2-135m"}) {
    const auto spec = model::SpecOfShape(ShapeOf(name));
    KVASIR_ASSERT_OK(spec);
    for (const plan::PlanPreset& preset : plan::PlanPresets()) {
      if (!preset.any_checkpoint) continue;
      const auto plan =
          plan::MakePresetPlan(preset.name, model::AttentionShapeOf(*spec));
      KVASIR_ASSERT_OK(plan) << name << " " << preset.name;
      KVASIR_EXPECT_OK(
          worker::ServePlan(*plan, model::AttentionShapeOf(*spec), {}))
          << name << " " << preset.name;
    }
  }
}

TEST(PlanPresetsTest, TheErrorForAnUnknownNameListsTheUniquePresetNames) {
  std::set<std::string> names;
  for (const plan::PlanPreset& preset : plan::PlanPresets())
    names.insert(preset.name);
  EXPECT_EQ(names.size(), plan::PlanPresets().size());
  EXPECT_EQ(plan::PlanPresets().front().name, plan::kDensePreset);
  EXPECT_THAT(plan::FindPlanPreset("palu"),
              StatusIs(absl::StatusCode::kNotFound,
                       ::testing::HasSubstr("palu-50-g4-3bit")));
}

TEST(PlanPresetsTest,
     PresetsRefuseNumbersOfKvHeadsThatTheirGroupSizeDoesNotDivide) {
  const auto spec = model::SpecOfShape(ShapeOf("qwen2.5-0.5b"));  // 2 KV heads
  KVASIR_ASSERT_OK(spec);
  EXPECT_THAT(
      plan::MakePresetPlan("palu-50-g4", model::AttentionShapeOf(*spec)),
      StatusIs(absl::StatusCode::kInvalidArgument,
               ::testing::HasSubstr("multiple of 4, but the model has 2")));
  KVASIR_EXPECT_OK(
      plan::MakePresetPlan("palu-50-g2", model::AttentionShapeOf(*spec)));
}

TEST(PlanPresetsTest, RapPresetsRefuseModelsWithPartialRotaryEmbeddings) {
  const auto spec = model::SpecOfShape(ShapeOf("pythia-160m"));
  KVASIR_ASSERT_OK(spec);
  EXPECT_THAT(plan::MakePresetPlan("rap-50", model::AttentionShapeOf(*spec)),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
}

}  // namespace
}  // namespace kvasir::bench
