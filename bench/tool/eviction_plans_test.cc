#include "bench/tool/eviction_plans.h"

#include "base/status_matchers.h"
#include "google/protobuf/util/message_differencer.h"
#include "plan/presets.h"

namespace kvasir::cli {
namespace {

using google::protobuf::util::MessageDifferencer;
using kvasir::v1::KvPlan;

plan::AttentionShape Shape() {
  plan::AttentionShape shape;
  shape.num_kv_heads = 2;
  shape.head_dim = 32;
  shape.rotary_dim = 32;
  shape.layers.resize(3);
  return shape;
}

KvPlan Preset(const char* name) {
  auto plan = plan::MakePresetPlan(name, Shape());
  KVASIR_EXPECT_OK(plan);
  return *std::move(plan);
}

// What a plan's file said of eviction stayed in the cache that evicting was
// compared with; and it kept rotated keys where the other's were rotated when
// they were read.
TEST(EvictionPlansTest, BothCachesAreTheSameButForTheEviction) {
  plan::EvictionSettings of_file;
  of_file.budget = {.tokens = 32};
  KvPlan from_file = Preset("dense-8bit");
  KVASIR_ASSERT_OK(plan::ApplyEviction(of_file, Shape(), &from_file));
  for (const bool rolling : {false, true}) {
    plan::EvictionSettings settings;
    settings.budget = {.tokens = 64};
    settings.rolling = rolling;
    for (const EvictionUnit unit :
         {EvictionUnit::kLayer, EvictionUnit::kKvHead}) {
      KVASIR_ASSERT_OK_AND_ASSIGN(
          const KvPlan evicting,
          EvictingPlan(settings, unit, Shape(), from_file));
      const KvPlan plain = WithoutEviction(evicting);
      for (int l = 0; l < plain.layers_size(); ++l) {
        EXPECT_FALSE(plain.layers(l).has_eviction());
        const kvasir::v1::LayerPlan& own = evicting.layers(l);
        EXPECT_EQ(own.eviction().budget(), 64);
        EXPECT_EQ(own.eviction().units_size(),
                  unit == EvictionUnit::kLayer ? 1 : 2);
        EXPECT_TRUE(
            MessageDifferencer::Equals(plain.layers(l).key(), own.key()));
        EXPECT_EQ(own.key().parts(0).stored(),
                  rolling ? kvasir::v1::PRE_ROPE : kvasir::v1::POST_ROPE);
      }
    }
  }
}

TEST(EvictionPlansTest, BitsAreTheFewestOfAllLayersAndSides) {
  EXPECT_EQ(FewestBits(Preset("dense-bf16")), 16);
  KvPlan plan = Preset("dense-8bit");
  EXPECT_EQ(FewestBits(plan), 8);
  auto* const value = plan.mutable_layers(2)->mutable_value()->mutable_parts(0);
  auto* const bits = value->mutable_codec()->mutable_bits();
  bits->clear_schedule();
  bits->add_schedule(6);
  EXPECT_EQ(FewestBits(plan), 6);
  *plan.mutable_layers(1)->add_joint() = *value;
  auto* const joint = plan.mutable_layers(1)->mutable_joint(0);
  auto* const of_joint = joint->mutable_codec()->mutable_bits();
  of_joint->clear_schedule();
  of_joint->add_runs()->set_bits(5);
  of_joint->add_runs()->set_bits(0);  // stores nothing
  EXPECT_EQ(FewestBits(plan), 5);
}

}  // namespace
}  // namespace kvasir::cli
