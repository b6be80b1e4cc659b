#include "cache/layout/cache_id.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

using kvasir::v1::BF16;
using kvasir::v1::F16;
using kvasir::v1::KvPlan;

struct Case {
  KvPlan plan;
  CacheIdentity identity;
};

Case Base() {
  Case c;
  c.identity.shape.num_kv_heads = 2;
  c.identity.shape.head_dim = 8;
  c.identity.shape.rotary_dim = 8;
  c.identity.shape.layers.resize(2);
  c.identity.page_tokens = 64;
  c.identity.rope.frequencies = {1, 0.5, 0.25, 0.125};
  c.identity.tensor_fingerprint = "abc";
  c.plan = plan::FullRankPlan(c.identity.shape, BF16);
  return c;
}

std::string IdAfter(const std::function<void(Case&)>& change) {
  Case c = Base();
  change(c);
  return CacheId(c.plan, c.identity);
}

TEST(CacheIdTest, EqualModelsAndPlansGiveEqualCacheIds) {
  EXPECT_EQ(IdAfter([](Case&) {}), IdAfter([](Case&) {}));
  EXPECT_EQ(IdAfter([](Case&) {}).size(), 32u);
}

TEST(CacheIdTest,
     EverySettingThatAffectsTheStoredKeysOrValuesChangesTheCacheId) {
  const std::vector<std::function<void(Case&)>> changes = {
      [](Case&) {},
      [](Case& c) {
        c.plan.mutable_layers(1)
            ->mutable_value()
            ->mutable_parts(0)
            ->mutable_codec()
            ->set_dtype(F16);
      },
      [](Case& c) { c.identity.key_bias_left_out = true; },
      [](Case& c) {
        c.plan.mutable_layers(0)->mutable_key()->mutable_parts(0)->set_stored(
            kvasir::v1::PRE_ROPE);
      },
      [](Case& c) { c.plan.mutable_layers(0)->add_joint()->set_mean(true); },
      [](Case& c) { c.plan.mutable_layers(1)->add_joint()->set_mean(true); },
      [](Case& c) { c.plan.mutable_layers(1)->add_joint(); },
      [](Case& c) { c.identity.page_tokens = 32; },
      [](Case& c) { c.identity.rope.frequencies[3] = 0.126; },
      [](Case& c) { c.identity.rope.frequencies.pop_back(); },
      [](Case& c) { c.identity.rope.attention_factor = 1.1; },
      [](Case& c) { c.identity.rope.interleaved = true; },
      [](Case& c) { c.identity.shape.layers[1].sliding_window = 128; },
      [](Case& c) { c.identity.tensor_fingerprint = "abd"; },
      [](Case& c) { c.identity.key_means = "tokens"; },
  };
  std::set<std::string> ids;
  for (const auto& change : changes) ids.insert(IdAfter(change));
  EXPECT_EQ(ids.size(), changes.size());
}

TEST(CacheIdTest, SettingsThatARequestMayOverrideDoNotChangeTheCacheId) {
  const std::string base = IdAfter([](Case&) {});
  EXPECT_EQ(base, IdAfter([](Case& c) {
              c.plan.mutable_layers(0)->mutable_eviction()->set_budget(128);
              c.plan.mutable_layers(0)->mutable_selection()->set_budget(64);
              c.plan.set_method("by another name");
            }));
}

std::string FormatIdOf(const PageFormat& format, plan::TpShard shard = {},
                       int64_t head_dim = 8,
                       const std::function<void(KvPlan&)>& change = {}) {
  plan::AttentionShape shape;
  shape.num_kv_heads = 2;
  shape.head_dim = head_dim;
  shape.layers.resize(2);
  KvPlan plan = plan::FullRankPlan(shape, BF16);
  if (change) change(plan);
  const auto layout = PageLayout::Create(plan, shape, format, shard);
  EXPECT_TRUE(layout.ok());
  return PageFormatId(*layout);
}

std::string FormatIdOfKeyCodes(uint32_t bits, bool per_token,
                               uint32_t exact_window = 0) {
  return FormatIdOf({}, {}, 8, [=](KvPlan& plan) {
    for (auto& layer : *plan.mutable_layers()) {
      auto* codec = layer.mutable_key()->mutable_parts(0)->mutable_codec();
      codec->clear_dtype();
      codec->mutable_bits()->add_schedule(bits);
      if (per_token) {
        codec->mutable_per_token();
        codec->set_param_dtype(F16);
      } else {
        codec->mutable_channel_static();
      }
      layer.mutable_key()->set_exact_window(exact_window);
    }
  });
}

TEST(PageFormatIdTest, PageFormatIdEqualsARecordedValue) {
  EXPECT_EQ(FormatIdOf({}), "14b308bcc3cfd85e0148469cc64ee784");
}

TEST(PageFormatIdTest, AChangedLayoutChangesThePageFormatId) {
  const std::set<std::string> ids = {
      FormatIdOf({}),
      FormatIdOf({.page_tokens = 32}),
      FormatIdOf({.page_tokens = 128}),
      FormatIdOf({.granule_bytes = 16}),
      FormatIdOf({.granule_bytes = 32}),
      FormatIdOf({}, {.rank = 0, .size = 2}),
      FormatIdOf({}, {.rank = 1, .size = 2}),
      FormatIdOf({}, {}, 16),
      FormatIdOfKeyCodes(4, false),
      FormatIdOfKeyCodes(4, true),
      FormatIdOfKeyCodes(3, true),
      FormatIdOfKeyCodes(4, true, 70),
      FormatIdOfKeyCodes(4, true, 90),
      FormatIdOf({}, {}, 8,
                 [](KvPlan& plan) {
                   auto* eviction = plan.mutable_layers(0)->mutable_eviction();
                   eviction->set_budget(128);
                   eviction->set_recent(32);
                   eviction->set_every_tokens(16);
                   eviction->set_positions(kvasir::v1::Eviction::ORIGINAL);
                 }),
  };
  EXPECT_EQ(ids.size(), 14u);
  EXPECT_EQ(FormatIdOf({.page_tokens = 64}), FormatIdOf({}));
}

}  // namespace
}  // namespace kvasir::cache
