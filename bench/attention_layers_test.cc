#include "bench/attention_layers.h"

#include <bit>
#include <cmath>
#include <set>

#include "base/status_matchers.h"
#include "base/thread_pool.h"
#include "bench/random_latents.h"
#include "gtest/gtest.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/ranks/rank.h"

namespace kvasir::bench {
namespace {

using ::kvasir::base::StatusIs;

constexpr int64_t kPageTokens = 16;

AttentionLayers::Options OptionsOf(const std::string& plan) {
  AttentionLayers::Options options;
  options.shape = model::FindShape("kvasir-tiny").value();
  options.plan = plan;
  options.page_tokens = kPageTokens;
  options.slots = 200;
  options.num_arenas = 2;
  return options;
}

class AttentionLayersTest : public ::testing::Test {
 protected:
  base::ThreadPool pool_{2};
  kernels::CpuDevice device_{&pool_};
};

TEST_F(AttentionLayersTest, EveryPlanPresetRunsDecodeAndPrefillLaunches) {
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    const auto layers = AttentionLayers::Create(OptionsOf(preset.name), &pool_);
    KVASIR_ASSERT_OK(layers) << preset.name;
    for (const LaunchShape& launch :
         {LaunchShape{.batch = 3, .context = 50, .new_tokens = 1},
          LaunchShape{.batch = 1, .context = 70, .new_tokens = 20}}) {
      for (int run = 0; run < 3; ++run) {
        const auto time = (*layers)->Run(launch);
        KVASIR_ASSERT_OK(time) << preset.name;
        EXPECT_GT(time->attention_seconds, 0.0);
        EXPECT_GT(time->layer_seconds, time->attention_seconds);
      }
    }
  }
}

TEST_F(AttentionLayersTest,
       TheReportedBytesPerSlotEqualThoseOfTheCacheLayoutForOneLayer) {
  for (const char* plan : {"dense-bf16", "palu-50-g4-3bit"}) {
    const auto layers = AttentionLayers::Create(OptionsOf(plan), &pool_);
    KVASIR_ASSERT_OK(layers);
    const auto bytes_per_slot_only = AttentionLayers::BytesPerSlot(
        model::FindShape("kvasir-tiny").value(), plan, kPageTokens);
    KVASIR_ASSERT_OK(bytes_per_slot_only);
    EXPECT_EQ((*layers)->bytes_per_slot(), *bytes_per_slot_only);
    EXPECT_EQ((*layers)->num_arenas(), 2);
    EXPECT_DOUBLE_EQ((*layers)->layout().marginal_payload_bytes_per_token(),
                     2 * *bytes_per_slot_only);
  }
}

TEST_F(AttentionLayersTest, SeveralAttentionLayersObjectsCanShareTheirWeights) {
  AttentionLayers::Options options = OptionsOf("rap-50");
  options.device = &device_;
  auto first = AttentionLayers::Create(options, &pool_);
  KVASIR_ASSERT_OK(first);
  options.weights = (*first)->weights();
  const auto second = AttentionLayers::Create(options, &pool_);
  KVASIR_ASSERT_OK(second);
  EXPECT_EQ((*second)->weights(), (*first)->weights());
  first->reset();
  KVASIR_EXPECT_OK(
      (*second)->Run({.batch = 1, .context = 70, .new_tokens = 20}));
}

TEST_F(AttentionLayersTest,
       LaunchesThatAreInvalidOrNeedTooManyPagesAreRefused) {
  const auto layers = AttentionLayers::Create(OptionsOf("dense-bf16"), &pool_);
  KVASIR_ASSERT_OK(layers);
  // An arena has 13 pages of 16 slots, but four sequences of 50 tokens need 16
  // pages.
  EXPECT_THAT((*layers)->Run({.batch = 4, .context = 50, .new_tokens = 1}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("at most 13 pages in all")));
  EXPECT_THAT((*layers)->Run({.batch = 1, .context = 5, .new_tokens = 6}),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
}

TEST_F(AttentionLayersTest,
       PagesFilledWithRandomLatentsHoldDifferentFiniteNumbers) {
  const auto spec = model::SpecOfShape(model::FindShape("kvasir-tiny").value());
  KVASIR_ASSERT_OK(spec);
  const auto plan =
      plan::MakePresetPlan("dense-bf16", model::AttentionShapeOf(*spec));
  KVASIR_ASSERT_OK(plan);
  const auto resolved =
      plan::ResolvePlan(*plan, model::AttentionShapeOf(*spec));
  KVASIR_ASSERT_OK(resolved);
  const auto layout =
      cache::PageLayout::Create(*resolved, {.page_tokens = kPageTokens});
  KVASIR_ASSERT_OK(layout);
  constexpr int64_t kPages = 5;
  const auto arenas = worker::KvArenas::Create(*resolved, *layout, {kPages},
                                               &device_.allocator());
  KVASIR_ASSERT_OK(arenas);
  const worker::KvArenas::Layer& layer = arenas->layers().front();
  KVASIR_ASSERT_OK(
      FillWithRandomLatents(layer, kPages, kPageTokens, 7, device_));
  std::set<float> seen;
  for (const auto* side : {&layer.key, &layer.value}) {
    const auto part =
        std::bit_cast<kernels::LatentPartArgs>(side->front().latents);
    for (int64_t g = 0; g < part.num_groups; ++g) {
      for (int64_t slot = 0; slot < kPages * kPageTokens; ++slot) {
        const auto* numbers = reinterpret_cast<const kernels::Bf16*>(
            kernels::SlotAddress(part, part.groups[g].codes, slot / kPageTokens,
                                 slot % kPageTokens));
        for (int64_t c = 0; c < part.groups[g].width; ++c) {
          const float number = kernels::ToFloat(numbers[c]);
          ASSERT_TRUE(std::isfinite(number));
          seen.insert(number);
        }
      }
    }
  }
  EXPECT_GT(seen.size(), 100u);
}

}  // namespace
}  // namespace kvasir::bench
