// Tests paged_attention with a key bias: keys are stored without it, and
// attention adds it to the scores.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

LatentSpec Biased(const char* name, LatentSpec spec) {
  spec.name = name;
  spec.key_bias = true;
  return spec;
}
LatentSpec Pairs(const char* name, int64_t tile, int64_t exact) {
  LatentSpec spec = Biased(name, SpecOf({Codes({64}, {4})}, {Numbers({24})}));
  spec.bias_tile_pairs = tile;
  spec.bias_exact_pairs = exact;
  return spec;
}
LatentSpec InUnits(const char* name, float unit) {
  LatentSpec spec = Pairs(name, 11, 4);
  spec.bias_unit = unit;
  return spec;
}
LatentSpec At(const char* name, int64_t (*position_of)(int64_t),
              LatentSpec spec) {
  spec.name = name;
  spec.position_of = position_of;
  return spec;
}
// Positions of slots after an eviction. Compacted: the remaining slots are in
// short runs. Sparse: each remaining slot is in a tile of its own.
int64_t Compacted(int64_t slot) { return slot * 3 + slot / 5 * 40; }
int64_t Sparse(int64_t slot) { return slot * 131 + 7; }

LatentSpec Evicting(const char* name, LatentSpec spec) {
  spec.name = name;
  spec.unit_of_head.assign(static_cast<size_t>(spec.num_kv_heads), 0);
  for (size_t j = 1; j < spec.unit_of_head.size(); j += 2) {
    spec.unit_of_head[j] = 1;
  }
  spec.stored_positions = true;
  return spec;
}

std::vector<LatentSpec> BiasedSpecs() {
  const PartSpec rotated = Levels(Codes({64}, {4}));
  LatentSpec grouped = SpecOf({rotated}, {rotated});
  grouped.num_heads = 12;
  LatentSpec many = SpecOf({rotated}, {rotated});
  many.num_heads = 16;
  many.num_kv_heads = 8;
  many.page_tokens = 64;
  LatentSpec sliding = grouped;
  sliding.window = 50;
  LatentSpec ahead = grouped;
  ahead.causal = false;
  LatentSpec later = grouped;
  later.first_position = 5'000'000'000;
  const LatentSpec exact = WithSinks("", 4, Exact("", 28, 28, grouped));
  return {Biased("levels", grouped),
          Biased("codes_8", SpecOf({Codes({40}, {8})}, {Codes({24}, {8})})),
          Biased("many_heads", many),
          Biased("sliding", sliding),
          Biased("not_causal", ahead),
          Biased("far_positions", later),
          Biased("exact_rows", exact),
          Pairs("no_tile_pairs", 0, 4),
          Pairs("no_exact_pairs", 7, 0),
          Pairs("one_pair_each", 1, 1),
          Pairs("most_pairs", 128, 8),
          InUnits("in_units", 4.0f),
          At("compacted", Compacted, Biased("", exact)),
          At("sparse", Sparse, Biased("", many)),
          Evicting("evicting", Biased("", exact)),
          Evicting("evicting_compacted", At("", Compacted, Biased("", many)))};
}

class KeyBiasAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(KeyBiasAttentionTest,
       AllBackEndsGiveTheSameBitsAndAreCloseToExactAttention) {
  LatentCache cache(GetParam(), {1, 65, 701}, 1);
  const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 40, 25}, {2, 700, 1}};
  WriteAll(cache, asks);
  AttentionStreams& streams = SharedStreams();
  const std::vector<float> truth = CheckedReference(cache, asks, 5e-5);
  ExpectBits(cache, asks, truth, {&streams.one, &streams.three, &streams.many});
}

TEST_P(KeyBiasAttentionTest, ChunksAndBatchesDoNotChangeTheBitsOfARow) {
  constexpr int64_t kTokens = 140;
  // Without causal attention, rows see all slots of their chunk, so their bits
  // depend on it.
  if (!GetParam().causal) return;
  LatentCache whole(GetParam(), {kTokens, 40}, 2);
  whole.Write(0, 0, kTokens);
  AttentionStreams& streams = SharedStreams();
  const std::vector<float> expected =
      whole.Attend(streams.one, {{0, 0, kTokens}});
  const auto row = static_cast<int64_t>(expected.size()) / kTokens;
  for (const int64_t chunk : {1, 7, 64, 139}) {
    LatentCache chunked(GetParam(), {kTokens, 40}, 2);
    chunked.Write(1, 0, 40);
    std::vector<float> rows;
    for (int64_t t = 0; t < kTokens; t += chunk) {
      const int64_t count = std::min(chunk, kTokens - t);
      chunked.Write(0, t, t + count);
      const std::vector<float> got =
          chunked.Attend(streams.three, {{1, 30, 10}, {0, t, count}});
      rows.insert(rows.end(), got.begin() + 10 * row, got.end());
    }
    EXPECT_TRUE(SameBits(expected, rows)) << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, KeyBiasAttentionTest,
                         ::testing::ValuesIn(BiasedSpecs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

TEST(KeyBiasPositionsTest,
     PositionsThatEqualTheSlotNumbersGiveTheSameBitsAsNoPositions) {
  LatentSpec spec = BiasedSpecs()[0];
  const auto attend = [&](int64_t page_tokens) {
    spec.page_tokens = page_tokens;
    LatentCache cache(spec, {200}, 4);
    cache.Write(0, 0, 200);
    return cache.Attend(SharedStreams().one, {{0, 150, 50}});
  };
  const std::vector<float> slots = attend(16);
  EXPECT_TRUE(SameBits(slots, attend(64)));
  spec.position_of = [](int64_t position) { return position; };
  EXPECT_TRUE(SameBits(slots, attend(16)));
  spec.position_of = Compacted;
  EXPECT_FALSE(SameBits(slots, attend(16)));
}

TEST(KeyBiasMassTest, AttentionMassIsComputedFromScoresWithTheKeyBias) {
  LatentSpec spec = Evicting("", Biased("", Mixed()));
  spec.keys = {Levels(Codes({64}, {4}))};
  spec.adds_mass = true;
  const LatentAsk ask = {.sequence = 0, .start = 60, .count = 30};
  std::vector<float> first;
  for (const int64_t room : {0, 1 << 16}) {
    spec.kept_weights = room;
    LatentCache cache(spec, {90}, 1);
    WriteAll(cache, {ask});
    cache.Attend(SharedStreams().three, {ask});
    const std::vector<float> mass = cache.Mass(0, 90);
    if (first.empty()) first = mass;
    EXPECT_TRUE(SameBits(first, mass));
    const std::vector<double> expected = cache.ExpectedMass(ask, 90);
    for (size_t i = 0; i < mass.size(); ++i) {
      EXPECT_NEAR(static_cast<double>(mass[i]), expected[i],
                  5e-5 * std::max(1.0, expected[i]));
    }
  }
}

TEST(KeyBiasRefusalTest, TheErrorNamesTheInvalidField) {
  LatentSpec spec = BiasedSpecs()[0];
  LatentCache cache(spec, {16}, 6);
  const PagedAttentionArgs good = cache.Params();
  KVASIR_EXPECT_OK(Attend(good));
  PagedAttentionArgs params = good;
  AttentionKeyBias bias = *good.key_bias;
  params.key_bias = &bias;
  bias.tile_pairs = 129;
  ExpectRefusal(params,
                "tile_pairs of the key bias: must be 0 to 128, but is 129");
  bias = *good.key_bias;
  bias.exact_pairs = 9;
  ExpectRefusal(params,
                "exact_pairs of the key bias: must be 0 to 8, but is 9");
  bias = *good.key_bias;
  bias.tile_pairs = 100;
  ExpectRefusal(params, "q_row_stride: must be at least ");
  bias = *good.key_bias;
  AttentionKeyPartArgs key = good.keys[0];
  params.keys = &key;
  const int32_t shared[2] = {0, 0};
  key.group_of_head = shared;
  ExpectRefusal(params,
                "a key bias needs a group of keys for each KV head, but KV "
                "head 1 shares group 0");
}

}  // namespace
}  // namespace kvasir::kernels
