#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

// Returns the tested ways to divide KV heads into units of eviction: all heads
// in one unit, and alternating heads in two units.
std::vector<std::vector<int32_t>> UnitsOf(int64_t num_kv_heads) {
  const auto count = static_cast<size_t>(num_kv_heads);
  std::vector<std::vector<int32_t>> units = {std::vector<int32_t>(count, 0)};
  if (count == 1) return units;
  units.push_back(units[0]);
  for (size_t j = 1; j < count; j += 2) units[1][j] = 1;
  return units;
}

double WorstOf(const std::vector<double>& expected,
               const std::vector<float>& got) {
  EXPECT_EQ(expected.size(), got.size());
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double off = expected[i] - static_cast<double>(got[i]);
    error += off * off;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

class AttentionMassTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(AttentionMassTest,
       AllBackEndsComputeTheMassOfASlotAsTheSumOfItsAttentionWeights) {
  LatentSpec spec = GetParam();
  spec.adds_mass = true;
  bool rebuilds = false;
  for (const auto* parts : {&spec.keys, &spec.values}) {
    for (const PartSpec& part : *parts) {
      rebuilds = rebuilds || part.rebuild.dims > 0 || part.lift_dims > 0;
    }
  }
  const std::vector<std::vector<int32_t>> units = UnitsOf(spec.num_kv_heads);
  for (const std::vector<int32_t>& unit_of_head : units) {
    // The last way to divide heads is tested with many threads and with a
    // context that is longer than a split (512 slots). If keys are rebuilt or
    // values lifted, the context is only one slot longer, because the reference
    // is slow then.
    const bool splits = unit_of_head == units.back();
    const int64_t longest = !splits ? 70 : rebuilds ? 513 : 530;
    const std::vector<LatentAsk> asks = {
        {.sequence = 0, .start = 0, .count = 1},
        {.sequence = 1, .start = 40, .count = 25, .first_counted_row = 3},
        {.sequence = 2, .start = longest, .count = 1}};
    spec.unit_of_head = unit_of_head;
    spec.stored_positions = true;
    LatentCache cache(spec, {1, 65, longest + 1}, 1);
    WriteAll(cache, asks);
    AttentionStreams& streams = SharedStreams();
    const std::vector<float> out = CheckedReference(cache, asks, 5e-5);
    std::vector<std::vector<float>> truth;
    for (const LatentAsk& ask : asks) {
      const int64_t tokens = ask.start + ask.count;
      truth.push_back(cache.Mass(ask.sequence, tokens));
      EXPECT_LT(WorstOf(cache.ExpectedMass(ask, tokens), truth.back()),
                Tolerance(cache.Params()))
          << ask.sequence;
    }
    // Without room to keep attention weights, keys are scored twice. With room
    // they are scored once, which must give the same bits.
    for (const int64_t room : {0, 1 << 17}) {
      LatentSpec like = spec;
      like.kept_weights = room;
      LatentCache other(like, {1, 65, longest + 1}, 1);
      WriteAll(other, asks);
      const auto expect_same = [&](TestStream& stream) {
        other.ClearMass();
        EXPECT_TRUE(SameBits(out, other.Attend(stream, asks)));
        for (size_t i = 0; i < asks.size(); ++i) {
          EXPECT_TRUE(SameBits(
              truth[i],
              other.Mass(asks[i].sequence, asks[i].start + asks[i].count)))
              << i << " room " << room;
        }
      };
      ForEachSimdTarget(
          [&] { expect_same(splits ? streams.many : streams.one); });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, AttentionMassTest, ::testing::ValuesIn(Specs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

struct Chunks {
  LatentSpec spec;
  std::vector<int32_t> unit_of_head;
};

class AttentionMassChunkingTest : public ::testing::TestWithParam<Chunks> {};

// The mass does not depend on how a prompt is chunked, on the batch, on the
// number of threads or on whether weights are kept. This holds even if the
// first rows of the prompt add no mass.
TEST_P(AttentionMassChunkingTest, ChunkSizesDoNotChangeTheBitsOfTheMass) {
  constexpr int64_t kTokens = 140;
  constexpr int64_t kFirstCounted = 11;
  LatentSpec spec = GetParam().spec;
  spec.unit_of_head = GetParam().unit_of_head;
  spec.adds_mass = true;
  spec.kept_weights = 1 << 16;
  LatentCache whole(spec, {kTokens, 40}, 2);
  whole.Write(0, 0, kTokens);
  AttentionStreams& streams = SharedStreams();
  whole.Attend(streams.one, {{.sequence = 0,
                              .start = 0,
                              .count = kTokens,
                              .first_counted_row = kFirstCounted}});
  const std::vector<float> expected = whole.Mass(0, kTokens);
  for (const int64_t chunk : {1, 7, 64, 139}) {
    LatentCache chunked(spec, {kTokens, 40}, 2);
    chunked.Write(1, 0, 40);
    for (int64_t t = 0; t < kTokens; t += chunk) {
      const int64_t count = std::min(chunk, kTokens - t);
      chunked.Write(0, t, t + count);
      chunked.Attend(streams.three, {{.sequence = 1, .start = 30, .count = 10},
                                     {.sequence = 0,
                                      .start = t,
                                      .count = count,
                                      .first_counted_row = std::clamp<int64_t>(
                                          kFirstCounted - t, 0, count)}});
    }
    EXPECT_TRUE(SameBits(expected, chunked.Mass(0, kTokens))) << chunk;
  }
}

std::vector<Chunks> AllChunks() {
  std::vector<Chunks> all;
  LatentSpec window = Mixed();
  window.window = 50;
  LatentSpec lifted = Mixed();
  lifted.values = {Lifted(Groups(Codes({96}, {4}, 48), {0, 0, 1, 1}), 32)};
  LatentSpec wide = Mixed();
  wide.num_heads = 200;
  wide.keys = {Codes({24}, {3})};
  LatentSpec pages = Mixed();
  pages.page_tokens = 128;
  for (auto* parts : {&pages.keys, &pages.values}) {
    for (PartSpec& part : *parts) part.tile_slots = 64;
  }
  for (const LatentSpec& spec :
       {Mixed(), pages, MixedExact(30, 45), WithSinks("", 9, MixedExact(30, 0)),
        window, lifted, wide}) {
    all.push_back({spec, {0, 0, 0, 0}});
    all.push_back({spec, {0, 0, 1, 1}});
    all.push_back({spec, {1, 0, 0, 1}});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, AttentionMassChunkingTest,
                         ::testing::ValuesIn(AllChunks()));

TEST(AttentionMassRulesTest, RowsBeforeTheFirstCountedRowAddNoAttentionMass) {
  LatentSpec spec = Mixed();
  spec.unit_of_head = {0, 0, 1, 1};
  spec.adds_mass = true;
  LatentCache cache(spec, {50}, 2);
  cache.Write(0, 0, 50);
  cache.Attend(
      SharedStreams().one,
      {{.sequence = 0, .start = 10, .count = 40, .first_counted_row = 40}});
  const std::vector<float> mass = cache.Mass(0, 50);
  EXPECT_EQ(std::count(mass.begin(), mass.end(), 0.0f), 100);
}

TEST(AttentionMassRulesTest,
     EachRowAddsATotalAttentionMassOfOneForEachQueryHead) {
  LatentSpec spec = Mixed();
  spec.unit_of_head = {0, 0, 1, 1};
  spec.adds_mass = true;
  LatentCache cache(spec, {90}, 2);
  cache.Write(0, 0, 90);
  cache.Attend(SharedStreams().one,
               {{.sequence = 0, .start = 80, .count = 10}});
  double sum = 0;
  for (const float mass : cache.Mass(0, 90)) sum += static_cast<double>(mass);
  EXPECT_NEAR(sum, 10 * 16, 1e-3);
}

TEST(AttentionMassRulesTest,
     AttentionWeightsOfDecodedTokensAreKeptInMemoryIfTheyFit) {
  const auto one = [](int64_t slots) {
    return AttentionSequence{.num_rows = 1, .first_slot = slots - 1};
  };
  std::vector<AttentionSequence> sequences = {one(65), one(1000), one(64),
                                              one(1)};
  sequences[3].first_counted_row = 1;
  sequences.push_back({.num_rows = 2, .first_slot = 7});
  const int64_t block = KeptBlockFloats(4);
  EXPECT_EQ(block, 4 * 65 + 12);
  PlaceWeights(4, 3 * block, 16, absl::MakeSpan(sequences));
  EXPECT_EQ(sequences[0].weights_at, 0);
  EXPECT_EQ(sequences[1].weights_at, -1);
  EXPECT_EQ(sequences[2].weights_at, 2 * block);
  EXPECT_EQ(sequences[3].weights_at, -1);
  EXPECT_EQ(sequences[4].weights_at, -1);
}

TEST(AttentionMassRulesTest, InvalidAttentionMassParametersAreRefused) {
  LatentSpec spec = Mixed();
  spec.unit_of_head = {0, 0, 1, 1};
  spec.adds_mass = true;
  LatentCache cache(spec, {50}, 2);
  cache.Write(0, 0, 50);
  std::vector<float> q(50 * 4096);
  std::vector<float> out(50 * 4096);
  AttentionSequence sequence = {.num_rows = 3, .first_slot = 5};
  const auto refuses = [&](auto change, const char* text) {
    PagedAttentionArgs params = cache.Params();
    params.q = q.data();
    params.out = out.data();
    params.sequences = &sequence;
    params.num_sequences = 1;
    change(params);
    ExpectRefusal(params, text);
  };
  const std::vector<int32_t> beyond = {0, 0, 1, 2};
  refuses([&](auto& p) { p.unit_of_head = beyond.data(); },
          "unit_of_head of a KV head: must be 0 to 1, but is 2");
  refuses([](auto& p) { p.unit_of_head = nullptr; },
          "unit_of_head of a KV head: must be 0 to 1, but is -1");
  refuses([](auto& p) { p.metadata.num_units = 0; },
          "units of slot metadata for attention mass: must be at least 1, but "
          "is 0");
  refuses([](auto& p) { p.mass.most_rows = 2; },
          "rows of a step that adds attention mass: must be 0 to 2, but is 3");
  sequence.num_rows = 1;
  sequence.weights_at = 16;
  refuses([](auto& p) { p.mass.most_weights = 1000; },
          "floats of kept attention weights: must be 0 to 1000, but is 1056");
}

}  // namespace
}  // namespace kvasir::kernels
