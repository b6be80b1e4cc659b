#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

PartSpec Numbers(std::vector<int64_t> widths, DType dtype = DType::kBf16) {
  PartSpec part;
  part.widths = std::move(widths);
  part.dtype = dtype;
  return part;
}
PartSpec Codes(std::vector<int64_t> widths, std::vector<int> bits,
               int64_t run_width = 0) {
  PartSpec part = Numbers(std::move(widths));
  part.bits = std::move(bits);
  part.run_width = run_width;
  return part;
}
PartSpec Fixed(PartSpec part) {
  part.fixed_ranges = true;
  return part;
}
// The last channels have 0 bits.
PartSpec Unstored(PartSpec part, int64_t channels) {
  part.fixed_ranges = true;
  part.unstored = channels;
  return part;
}
PartSpec Levels(PartSpec part) {
  part.levels = true;
  return part;
}
PartSpec Ranges(PartSpec part, DType param_dtype) {
  part.param_dtype = param_dtype;
  return part;
}
PartSpec Groups(PartSpec part, std::vector<int32_t> group_of_head) {
  part.group_of_head = std::move(group_of_head);
  return part;
}
PartSpec Rebuilt(PartSpec part, RebuildSpec rebuild) {
  part.rebuild = rebuild;
  return part;
}

PartSpec Lifted(PartSpec part, int64_t dims) {
  part.lift_dims = dims;
  return part;
}

LatentSpec Exact(const char* name, int64_t key, int64_t value,
                 LatentSpec spec) {
  spec.name = name;
  spec.key_exact = key;
  spec.value_exact = value;
  return spec;
}

LatentSpec WithSinks(const char* name, int64_t sinks, LatentSpec spec) {
  spec.name = name;
  spec.sinks = sinks;
  return spec;
}

// name, Hq, Hkv, keys, values, P, window, causal, first position
std::vector<LatentSpec> StoredSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  return {
      {"codes_4", 8, 2, {Codes({64}, {4})}, {Codes({64}, {4})}},
      {"codes_8", 4, 4, {Codes({32}, {8})}, {Codes({96}, {8})}, 32},
      {"codes_8_ragged", 4, 2, {Codes({40}, {8})}, {Codes({24}, {8})}, 32},
      {"codes_3", 4, 2, {Codes({96}, {3})}, {Codes({24}, {3})}, 64},
      {"codes_2_and_1", 4, 2, {Codes({160}, {2}, 32)}, {Codes({8}, {1})}},
      {"few_bits_few_rows",
       6,
       1,
       {Codes({96}, {3, 2, 1}, 32), Fixed(Codes({64}, {1}))},
       {Codes({64}, {3}), Codes({96}, {2, 1, 4}, 32), Fixed(Codes({64}, {3}))},
       64},
      {"codes_5_and_6", 6, 2, {Codes({96}, {5})}, {Codes({64}, {6})}},
      {"falling_bits",
       6,
       2,
       {Fixed(Codes({112}, {6, 5, 4, 3, 2, 1}, 16))},
       {Fixed(Codes({136}, {8, 6, 5, 4, 3, 2}, 24))},
       64},
      {"planes_in_turn",
       6,
       2,
       {Fixed(Codes({320}, {6, 3, 5, 2, 4, 1}, 8))},
       {Fixed(Codes({320}, {3, 6, 5, 3}, 32))}},
      {"unstored",
       4,
       2,
       {Unstored(Codes({160}, {6, 4}, 32), 40)},
       {Unstored(Codes({300}, {5, 2}, 64), 141)}},
      {"levels_4",
       6,
       2,
       {Levels(Codes({64}, {4}))},
       {Levels(Codes({64}, {4}))}},
      {"levels_of_few_bits",
       6,
       2,
       {Levels(Codes({96}, {3})), Levels(Codes({40}, {1}))},
       {Levels(Codes({96}, {2})), Levels(Codes({64}, {3})),
        Ranges(Levels(Codes({33}, {4})), DType::kF32)},
       64},
      {"narrow_runs", 4, 2, {Codes({300}, {4}, 7)}, {Codes({160}, {2}, 24)}},
      {"one_channel_runs",
       2,
       1,
       {Codes({24}, {4, 1}, 1)},
       {Codes({24}, {3}, 1)}},
      {"schedules",
       4,
       2,
       {Codes({160}, schedule, 32)},
       {Codes({300}, schedule, 60)},
       64},
      {"odd_schedules",
       4,
       2,
       {Codes({35}, schedule, 7)},
       {Codes({33}, {1, 3, 2}, 11)},
       32},
      {"bf16_ranges",
       4,
       2,
       {Ranges(Codes({64}, {4}, 32), DType::kBf16)},
       {Ranges(Codes({64}, {4}, 16), DType::kBf16)}},
      {"f32_ranges",
       4,
       2,
       {Ranges(Codes({64}, {3}, 32), DType::kF32)},
       {Ranges(Codes({64}, {2}), DType::kF32)}},
      {"static_ranges",
       4,
       2,
       {Fixed(Codes({64}, {4}))},
       {Fixed(Codes({96}, schedule, 24))}},
      {"static_wide",
       2,
       2,
       {Fixed(Codes({600}, {2}))},
       {Fixed(Codes({300}, {8}))}},
      // Of all heads and of one: registers of a slot half full, full, and two.
      {"narrow_static_runs",
       9,
       3,
       {Fixed(Codes({64}, {6, 5, 3, 2, 1, 4}, 8))},
       {Groups(Unstored(Codes({192}, {6, 5, 4, 3, 2}, 8), 24), {0, 0, 0})},
       64},
      {"narrow_static_runs_of_a_head",
       24,
       3,
       {Fixed(Codes({64}, {5, 3, 2, 1}, 8))},
       {Fixed(Codes({64}, {6, 5, 4, 3}, 8)), Fixed(Codes({120}, {5, 3}, 8))},
       64},
      {"odd_static_runs",
       6,
       2,
       {Fixed(Codes({75}, {6, 3, 1, 5}, 7))},
       {Fixed(Codes({107}, {5, 1, 3, 6, 2}, 9)), Fixed(Codes({40}, {3, 5}, 1)),
        Fixed(Codes({200}, {2, 6, 1}, 25))}},
      {"groups",
       8,
       4,
       {Groups(Numbers({96, 24}), {0, 0, 1, 1})},
       {Groups(Codes({160, 8}, {4}, 32), {0, 1, 1, 0})}},
      {"all_heads",
       8,
       4,
       {Groups(Numbers({300}), {0, 0, 0, 0})},
       {Groups(Numbers({160}), {0, 0, 0, 0})}},
      {"keys_alone_values_shared",
       8,
       4,
       {Codes({24}, {4})},
       {Groups(Codes({96}, {3}), {0, 0, 1, 1})}},
      {"groups_in_no_order",
       4,
       4,
       {Groups(Codes({40}, {8}), {1, 0, 1, 0})},
       {Groups(Numbers({33}), {0, 1, 2, 0})}},
      {"wide",
       4,
       2,
       {Groups(Numbers({640}), {0, 0})},
       {Groups(Codes({520}, {4}, 64), {0, 0})}},
      {"two_parts",
       4,
       2,
       {Numbers({24}), Codes({40}, {4})},
       {Numbers({24}, DType::kF32), Codes({40}, {8}, 20)}},
      {"parts_of_unlike_groups",
       4,
       4,
       {Groups(Fixed(Codes({40}, {3})), {0, 0, 1, 1}), Numbers({8})},
       {Numbers({32}, DType::kF16)}},
      {"window", 4, 2, {Codes({64}, {4})}, {Codes({64}, {8})}, 16, 50},
      {"not_causal",
       4,
       2,
       {Codes({64}, {4})},
       {Codes({64}, {2})},
       16,
       0,
       false},
      {"many_heads", 70, 1, {Codes({16}, {4})}, {Codes({16}, {4})}},
      {"rebuilt",
       4,
       2,
       {Rebuilt(Groups(Numbers({160}), {0, 0}), {32, 16})},
       {Groups(Numbers({96}), {0, 0})}},
      {"rebuilt_partly_turned",
       6,
       2,
       {Rebuilt(Numbers({24}), {40, 8, true})},
       {Numbers({40})},
       32},
      {"rebuilt_unturned",
       4,
       2,
       {Rebuilt(Numbers({24}, DType::kF32), {20, 0, true})},
       {Numbers({24})}},
      {"rebuilt_far",
       4,
       2,
       {Rebuilt(Numbers({24}), {32, 16, false, false, false, 1.25f})},
       {Numbers({24})},
       16,
       0,
       true,
       131040},
      {"rebuilt_codes",
       4,
       2,
       {Rebuilt(Groups(Codes({96}, {4}, 32), {0, 0}), {32, 16, true})},
       {Codes({32}, {4})},
       16,
       0,
       true,
       500},
      {"rebuilt_wide_run",
       4,
       2,
       {Rebuilt(Codes({160}, {3}), {24, 12})},
       {Codes({32}, {4})}},
      {"rebuilt_many_runs",
       4,
       2,
       {Rebuilt(Codes({300}, {2, 4}, 4), {24, 12})},
       {Codes({32}, {4})}},
      {"rebuilt_static",
       4,
       2,
       {Rebuilt(Fixed(Codes({160}, schedule, 20)), {32, 16, true})},
       {Fixed(Codes({32}, {4}))}},
      {"rebuilt_head_of_256",
       2,
       1,
       {Rebuilt(Numbers({40}), {256, 128})},
       {Numbers({256})}},
      {"turned_as_stored",
       4,
       2,
       {Rebuilt(Numbers({32}), {32, 16, true, true})},
       {Numbers({32})}},
      {"turned_codes",
       4,
       2,
       {Rebuilt(Codes({40}, {4, 8}, 20), {40, 12, false, true, true})},
       {Numbers({32})}},
      {"turned_static",
       4,
       4,
       {Rebuilt(Fixed(Codes({40}, {4})), {40, 20, false, true, true})},
       {Numbers({32})}},
      {"rebuilt_beside_absorbed",
       4,
       2,
       {Numbers({24}), Rebuilt(Groups(Codes({40}, {8}), {0, 0}), {16, 8})},
       {Groups(Codes({40}, {4}), {0, 0})}},
  };
}

// Values lifted: every codec, ragged dims, beside absorbed ones, exact rows.
std::vector<LatentSpec> LiftedSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  std::vector<LatentSpec> specs = {
      {"lifted",
       8,
       4,
       {Rebuilt(Groups(Numbers({40}), {0, 0, 1, 1}), {16, 8})},
       {Lifted(Groups(Numbers({136, 24}), {0, 0, 1, 1}), 16)}},
      {"lifted_alone",
       4,
       2,
       {Numbers({24})},
       {Lifted(Numbers({33}, DType::kF32), 37)},
       32},
      {"lifted_codes",
       4,
       2,
       {Codes({64}, {4})},
       {Lifted(Groups(Codes({96}, {4}, 32), {0, 0}), 40)}},
      {"lifted_codes_8", 4, 1, {Numbers({24})}, {Lifted(Codes({40}, {8}), 5)}},
      {"lifted_wide_run",
       4,
       2,
       {Numbers({24})},
       {Lifted(Codes({300}, {3}), 16)}},
      {"lifted_schedule",
       4,
       2,
       {Codes({35}, schedule, 7)},
       {Lifted(Codes({160}, schedule, 20), 24)},
       64},
      {"lifted_many_runs",
       4,
       2,
       {Numbers({24})},
       {Lifted(Codes({67}, {1, 2}, 3), 33)}},
      {"lifted_static",
       4,
       2,
       {Fixed(Codes({40}, schedule, 20))},
       {Lifted(Groups(Fixed(Codes({160}, {4, 2}, 80)), {0, 0}), 16)}},
      {"lifted_head_of_256",
       2,
       1,
       {Rebuilt(Numbers({24}), {256, 128})},
       {Lifted(Codes({24}, {3}), 256)}},
      {"lifted_beside_absorbed",
       4,
       4,
       {Numbers({24}),
        Rebuilt(Groups(Codes({40}, {8}), {0, 1, 1, 0}), {16, 8})},
       {Groups(Codes({40}, {4}), {0, 0, 1, 1}),
        Lifted(Groups(Numbers({24}), {0, 1, 0, 1}), 17),
        Lifted(Fixed(Codes({24}, {1})), 16)}},
      {"lifted_not_causal",
       4,
       2,
       {Codes({64}, {4})},
       {Lifted(Codes({64}, {2}), 24)},
       16,
       30,
       false}};
  for (size_t i : {0, 2, 5, 7, 9}) {
    static const char* const kNames[] = {"exact_lifted",
                                         "",
                                         "exact_lifted_codes",
                                         "",
                                         "",
                                         "exact_lifted_schedule",
                                         "",
                                         "exact_lifted_static",
                                         "",
                                         "exact_lifted_beside_absorbed"};
    specs.push_back(
        Exact(kNames[i], 70, 30 + 5 * static_cast<int64_t>(i), specs[i]));
  }
  return specs;
}

// Exact windows of 1, 7, 64 and more slots than there are, of both sides or
// one.
std::vector<LatentSpec> ExactSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  const LatentSpec codes = {"", 8, 2, {Codes({64}, {4})}, {Codes({96}, {3})}};
  const LatentSpec fixed = {
      "", 4, 2, {Fixed(Codes({64}, {4}))}, {Fixed(Codes({96}, schedule, 24))}};
  const LatentSpec rebuilt = {
      "",
      4,
      2,
      {Rebuilt(Groups(Codes({96}, {4}, 32), {0, 0}), {32, 16, true})},
      {Codes({32}, {8})},
      16,
      0,
      true,
      500};
  LatentSpec narrow = codes;
  narrow.window = 50;
  LatentSpec ahead = codes;
  ahead.causal = false;
  return {
      Exact("exact_1", 1, 1, codes),
      Exact("exact_7", 7, 7, codes),
      Exact("exact_64", 64, 64, codes),
      Exact("exact_all", 5000, 5000, codes),
      Exact("exact_unlike", 100, 3, codes),
      Exact("exact_keys", 64, 0, codes),
      Exact("exact_values", 0, 64, codes),
      Exact("exact_behind_a_window", 20, 80, narrow),
      Exact("exact_not_causal", 9, 30, ahead),
      Exact("exact_static", 64, 64, fixed),
      Exact("exact_static_1", 1, 1, fixed),
      Exact("exact_static_all", 5000, 5000, fixed),
      Exact("exact_static_unlike", 3, 700, fixed),
      Exact("exact_rebuilt", 64, 7, rebuilt),
      Exact("exact_rebuilt_all", 5000, 7, rebuilt),
      Exact("exact_rebuilt_static", 70, 70,
            {"",
             4,
             2,
             {Rebuilt(Fixed(Codes({160}, schedule, 20)), {32, 16, true})},
             {Fixed(Codes({32}, {4}))}}),
      Exact("exact_turned", 70, 70,
            {"",
             4,
             2,
             {Rebuilt(Codes({40}, {4, 8}, 20), {40, 12, false, true, true})},
             {Numbers({32}), Codes({40}, {2})}}),
      Exact("exact_parts", 30, 65,
            {"",
             4,
             4,
             {Groups(Fixed(Codes({40}, {3})), {0, 0, 1, 1}),
              Rebuilt(Groups(Codes({24}, {8}), {0, 1, 1, 0}), {16, 8}),
              Numbers({8}, DType::kF32)},
             {Groups(Codes({33, 24}, {1, 3, 2}, 11), {0, 1, 2, 0}),
              Fixed(Codes({40}, {8}, 20))}}),
      Exact("exact_wide", 64, 64,
            {"",
             4,
             2,
             {Groups(Fixed(Codes({640}, {2})), {0, 0})},
             {Groups(Codes({520}, {4}, 64), {0, 0})}}),
      Exact("exact_many_heads", 64, 64,
            {"", 70, 1, {Codes({16}, {4})}, {Codes({16}, {4})}}),
  };
}

// Sinks alone and with windows: fewer than a block, more, and more than there
// are slots; nearer to the window than a block, and behind a sliding one.
std::vector<LatentSpec> SinkSpecs() {
  std::vector<LatentSpec> specs;
  const std::vector<LatentSpec> exact = ExactSpecs();
  const auto add = [&](const std::string& from, const char* name,
                       int64_t sinks) {
    const auto spec =
        std::find_if(exact.begin(), exact.end(),
                     [&](const LatentSpec& each) { return from == each.name; });
    specs.push_back(WithSinks(name, sinks, *spec));
  };
  const auto alone = [&](const char* name, int64_t sinks) {
    LatentSpec& spec = specs.back();
    specs.push_back(WithSinks(name, sinks, Exact(name, 0, 0, spec)));
  };
  add("exact_7", "sinks_4", 4);
  alone("sinks_alone", 4);
  alone("sinks_70_alone", 70);
  alone("sinks_all_alone", 5000);
  add("exact_64", "sinks_1", 1);
  add("exact_64", "sinks_64", 64);
  add("exact_unlike", "sinks_100_unlike", 100);
  add("exact_keys", "sinks_window_of_keys", 3);
  add("exact_values", "sinks_window_of_values", 3);
  add("exact_all", "sinks_in_the_window", 9);
  add("exact_behind_a_window", "sinks_behind_a_window", 8);
  add("exact_not_causal", "sinks_not_causal", 5);
  add("exact_static", "sinks_static", 4);
  alone("sinks_static_alone", 4);
  add("exact_static_unlike", "sinks_static_unlike", 130);
  add("exact_rebuilt", "sinks_rebuilt", 4);
  alone("sinks_rebuilt_alone", 20);
  add("exact_rebuilt_static", "sinks_rebuilt_static", 33);
  add("exact_turned", "sinks_turned", 2);
  add("exact_parts", "sinks_parts", 65);
  add("exact_wide", "sinks_wide", 4);
  add("exact_many_heads", "sinks_many_heads", 4);
  const auto keep = [&](const char* name, int64_t sinks, int64_t window,
                        const PartSpec& key, const PartSpec& value) {
    specs.push_back(WithSinks(
        name, sinks, Exact(name, window, window, {"", 4, 2, {key}, {value}})));
  };
  const PartSpec few = Unstored(Codes({96}, {6, 5, 2}, 24), 24);
  keep("sinks_unstored", 4, 30, few, few);
  keep("sinks_unstored_alone", 4, 0, Rebuilt(few, {32, 16, true}), few);
  keep("sinks_levels", 4, 30, Levels(Codes({64}, {4})),
       Levels(Codes({64}, {3})));
  keep("sinks_levels_alone", 70, 0, Levels(Codes({64}, {4})),
       Levels(Codes({64}, {4})));
  for (const LatentSpec& lifted : LiftedSpecs()) {
    if (lifted.name == std::string("exact_lifted_codes")) {
      specs.push_back(WithSinks("sinks_lifted_codes", 5, lifted));
      alone("sinks_lifted_codes_alone", 5);
    } else if (lifted.name == std::string("exact_lifted_static")) {
      specs.push_back(WithSinks("sinks_lifted_static", 40, lifted));
    }
  }
  return specs;
}

std::vector<LatentSpec> Specs() {
  std::vector<LatentSpec> specs = StoredSpecs();
  for (LatentSpec& spec : ExactSpecs()) specs.push_back(std::move(spec));
  for (LatentSpec& spec : SinkSpecs()) specs.push_back(std::move(spec));
  for (LatentSpec& spec : LiftedSpecs()) specs.push_back(std::move(spec));
  return specs;
}

// Streams of all cases: their memory takes longer to make than most cases.
struct Streams {
  TestStream reference{1, CpuBackend::kReference, size_t{2} << 20};
  TestStream one{1, CpuBackend::kSimd, size_t{2} << 20};
  TestStream three{3, CpuBackend::kSimd, size_t{6} << 20};
  // More threads than units: long contexts are taken split by split.
  TestStream many{16, CpuBackend::kSimd, size_t{24} << 20};
};
Streams& SharedStreams() {
  static Streams streams;
  return streams;
}

class LatentAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(LatentAttentionTest, AllBackEndsGiveTheDefinitionAndTheSameBits) {
  // The longest crosses a split; rebuilt keys and lifted values take the
  // reference long.
  bool rebuilds = false;
  for (const auto* parts : {&GetParam().keys, &GetParam().values}) {
    for (const PartSpec& part : *parts) {
      rebuilds = rebuilds || part.rebuild.dims > 0 || part.lift_dims > 0;
    }
  }
  const int64_t longest = rebuilds ? 520 : 1000;
  LatentCache cache(GetParam(), {1, 65, longest + 1}, 1);
  const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 62, 3}, {2, longest, 1}};
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
  }
  Streams& streams = SharedStreams();
  const std::vector<float> truth = cache.Attend(streams.reference, asks);
  std::vector<double> expected;
  for (const LatentAsk& ask : asks) {
    const std::vector<double> rows = cache.Expected(ask);
    expected.insert(expected.end(), rows.begin(), rows.end());
  }
  // float32 chains of some hundred products, of which scales and minima of
  // opposite sign leave a tenth; angles exact to 1e-7.
  EXPECT_LT(WorstError(cache.Params(), expected, truth), 5e-5);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(truth, cache.Attend(streams.one, asks)));
    EXPECT_TRUE(SameBits(truth, cache.Attend(streams.three, asks)));
    EXPECT_TRUE(SameBits(truth, cache.Attend(streams.many, asks)));
  });
  const bool sees_all = GetParam().window == 0;
  cache.on_launch = [&](const PagedAttentionArgs& params) {
    const auto takes_splits = [&](int threads) {
      const AttentionGrid grid(params, threads);
      return TakesSplits(grid, grid.sequences());
    };
    EXPECT_FALSE(takes_splits(1));
    EXPECT_FALSE(takes_splits(3));
    EXPECT_EQ(sees_all, takes_splits(16));
  };
  cache.Attend(streams.one, asks);
}

INSTANTIATE_TEST_SUITE_P(Specs, LatentAttentionTest,
                         ::testing::ValuesIn(Specs()), [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

// Codes and numbers, groups, rebuilt keys; enough heads that a whole prompt is
// cut by head and a short one is not.
LatentSpec Mixed() {
  LatentSpec spec;
  spec.num_heads = 16;
  spec.num_kv_heads = 4;
  spec.keys = {Rebuilt(Groups(Codes({40}, {4}, 20), {0, 0, 1, 1}), {16, 8}),
               Codes({24}, {3})};
  spec.values = {Groups(Codes({96}, {4}, 48), {0, 0, 1, 1})};
  return spec;
}

LatentSpec MixedExact(int64_t key, int64_t value) {
  LatentSpec spec = Exact("", key, value, Mixed());
  spec.values.push_back(Fixed(Codes({24}, {2})));
  return spec;
}

struct Chunks {
  LatentSpec spec;
  int64_t tokens;
};

class LatentChunkingTest : public ::testing::TestWithParam<Chunks> {};

TEST_P(LatentChunkingTest, ChunksBatchAndThreadsDoNotChangeARow) {
  const LatentSpec& spec = GetParam().spec;
  const int64_t chunk = GetParam().tokens;
  constexpr int64_t kTokens = 140;
  LatentCache whole(spec, {kTokens, 40}, 2);
  whole.Write(0, 0, kTokens);
  Streams& streams = SharedStreams();
  const std::vector<float> expected =
      whole.Attend(streams.one, {{0, 0, kTokens}});
  LatentCache chunked(spec, {kTokens, 40}, 2);
  chunked.Write(1, 0, 40);
  const size_t row = expected.size() / kTokens;
  for (int64_t t = 0; t < kTokens; t += chunk) {
    const int64_t count = std::min(chunk, kTokens - t);
    // Written only now: what lies ahead is NaN.
    chunked.Write(0, t, t + count);
    const std::vector<float> got =
        chunked.Attend(streams.three, {{1, 30, 10}, {0, t, count}});
    const auto same = [&](size_t from, size_t to) {
      return SameBits({got.begin() + static_cast<int64_t>(10 * row), got.end()},
                      {expected.begin() + static_cast<int64_t>(from * row),
                       expected.begin() + static_cast<int64_t>(to * row)});
    };
    ASSERT_TRUE(same(static_cast<size_t>(t), static_cast<size_t>(t + count)))
        << t;
  }
}

std::vector<Chunks> ChunksOf(const LatentSpec& spec) {
  return {{spec, 1}, {spec, 7}, {spec, 64}, {spec, 139}};
}
INSTANTIATE_TEST_SUITE_P(Stored, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(Mixed())));
INSTANTIATE_TEST_SUITE_P(Exact, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(MixedExact(30, 45))));
INSTANTIATE_TEST_SUITE_P(ExactOwn, LatentChunkingTest,
                         ::testing::ValuesIn(ChunksOf(MixedExact(1, 1))));
INSTANTIATE_TEST_SUITE_P(
    Sinks, LatentChunkingTest,
    ::testing::ValuesIn(ChunksOf(WithSinks("", 9, MixedExact(30, 0)))));
INSTANTIATE_TEST_SUITE_P(
    SinksAlone, LatentChunkingTest,
    ::testing::ValuesIn(ChunksOf(WithSinks("", 66, MixedExact(0, 0)))));

// Heads whose latents are read together.
class LatentSetsTest : public ::testing::TestWithParam<LatentSpec> {
 protected:
  // Units that each sequence's token is cut into.
  static std::vector<int64_t> UnitsOf(LatentCache& cache, TestStream& test,
                                      const std::vector<LatentAsk>& asks,
                                      int threads, std::vector<float>* out) {
    std::vector<int64_t> units;
    cache.on_launch = [&](const PagedAttentionArgs& params) {
      const AttentionGrid grid(params, threads);
      for (int64_t i = 0; i < params.num_sequences; ++i) {
        units.push_back(grid.CutOf(params.sequences[i]).units());
      }
    };
    *out = cache.Attend(test, asks);
    cache.on_launch = nullptr;
    return units;
  }
  // Heads of a group of keys; no group of values joins more in these tests.
  static int64_t ClustersOf(const LatentSpec& spec) {
    const std::vector<int32_t>& groups = spec.keys[0].group_of_head;
    return groups.empty() ? spec.num_kv_heads
                          : *std::max_element(groups.begin(), groups.end()) + 1;
  }
};

TEST_P(LatentSetsTest, AreMadeOfManySequencesAndDoNotChangeBits) {
  const std::vector<int64_t> contexts = {1,  64,  65, 600, 17, 128,
                                         40, 200, 63, 3,   90, 513};
  LatentCache cache(GetParam(), contexts, 7);
  std::vector<LatentAsk> asks;
  for (size_t s = 0; s < contexts.size(); ++s) {
    const auto sequence = static_cast<int64_t>(s);
    cache.Write(sequence, 0, contexts[s]);
    asks.push_back({sequence, contexts[s] - 1, 1});
  }
  Streams& streams = SharedStreams();
  std::vector<float> together;
  const std::vector<int64_t> units =
      UnitsOf(cache, streams.one, asks, 1, &together);
  // 1784 slots: a unit is a quarter of them at most.
  for (size_t s = 0; s < asks.size(); ++s) {
    EXPECT_EQ(units[s] > 1, contexts[s] > 446) << contexts[s];
  }
  std::vector<float> by_three;
  UnitsOf(cache, streams.three, asks, 3, &by_three);
  EXPECT_TRUE(SameBits(together, by_three));
  const size_t row = together.size() / asks.size();
  for (size_t s = 0; s < asks.size(); ++s) {
    std::vector<float> alone;
    // One sequence has too few heads for sixteen threads to share.
    EXPECT_EQ(UnitsOf(cache, streams.many, {asks[s]}, 16, &alone)[0],
              ClustersOf(GetParam()));
    EXPECT_TRUE(
        SameBits({together.begin() + static_cast<int64_t>(s * row),
                  together.begin() + static_cast<int64_t>((s + 1) * row)},
                 alone))
        << s;
  }
}

LatentSpec OfHeads(int64_t kv_heads, int64_t each, PartSpec key,
                   PartSpec value) {
  LatentSpec spec;
  spec.num_heads = kv_heads * each;
  spec.num_kv_heads = kv_heads;
  spec.keys = {std::move(key)};
  spec.values = {std::move(value)};
  spec.page_tokens = 64;
  return spec;
}
LatentSpec Sliding(LatentSpec spec) {
  spec.window = 70;
  return spec;
}
LatentSpec WithWindows(LatentSpec spec) {
  spec.key_exact = 20;
  spec.value_exact = 30;
  return spec;
}
INSTANTIATE_TEST_SUITE_P(
    All, LatentSetsTest,
    ::testing::Values(
        OfHeads(7, 1, Numbers({64}), Numbers({64})),
        OfHeads(5, 4, Numbers({96}, DType::kF16), Numbers({40}, DType::kF32)),
        OfHeads(8, 2, Codes({64}, {4}), Codes({64}, {4})),
        OfHeads(3, 8, Codes({64, 32}, {3, 8}), Codes({24}, {2})),
        OfHeads(6, 1, Groups(Numbers({64}), {0, 0, 1, 1, 2, 2}), Numbers({32})),
        WithWindows(OfHeads(5, 2, Codes({32}, {4}), Codes({32}, {8})))));

// Rows of prompts, of a few tokens and of one in one launch: some sequences are
// read by sets, others by clusters.
TEST(LatentSetsOfSequencesTest, RowsOfAllKindsInOneLaunchKeepTheirBits) {
  const LatentSpec dense = OfHeads(8, 2, Numbers({64}), Numbers({64}));
  for (const LatentSpec& spec :
       {dense, Sliding(dense),
        OfHeads(8, 2, Codes({64}, {4}), Codes({48}, {8}))}) {
    LatentCache cache(spec, {200, 300, 130, 90, 64, 129}, 8);
    const std::vector<LatentAsk> asks = {{0, 199, 1}, {1, 100, 200},
                                         {2, 126, 4}, {3, 88, 2},
                                         {4, 63, 1},  {5, 120, 9}};
    for (const LatentAsk& ask : asks) {
      cache.Write(ask.sequence, 0, ask.start + ask.count);
    }
    Streams& streams = SharedStreams();
    std::set<int64_t> slices;
    cache.on_launch = [&](const PagedAttentionArgs& params) {
      const AttentionGrid grid(params, 1);
      for (int64_t i = 0; i < params.num_sequences; ++i) {
        slices.insert(grid.CutOf(params.sequences[i]).num_slices);
      }
    };
    const std::vector<float> together = cache.Attend(streams.one, asks);
    EXPECT_GT(slices.size(), 1u);
    cache.on_launch = nullptr;
    EXPECT_TRUE(SameBits(together, cache.Attend(streams.three, asks)));
    std::vector<float> one_by_one;
    for (const LatentAsk& ask : asks) {
      const std::vector<float> alone = cache.Attend(streams.many, {ask});
      one_by_one.insert(one_by_one.end(), alone.begin(), alone.end());
    }
    EXPECT_TRUE(SameBits(together, one_by_one));
  }
}

// For grids alone: no page is written.
LatentSpec TablesOf(int64_t kv_heads, int64_t each) {
  LatentSpec spec;
  spec.num_heads = kv_heads * each;
  spec.num_kv_heads = kv_heads;
  spec.page_tokens = 64;
  spec.tables_only = true;
  return spec;
}

TEST(LatentSetsOfSequencesTest, ALongOneAmongShortOnesIsSharedByThreads) {
  LatentCache cache(TablesOf(32, 1), {1}, 4);
  PagedAttentionArgs params = cache.Params();
  std::vector<AttentionSequence> sequences(8,
                                           {.num_rows = 1, .first_slot = 1023});
  params.sequences = sequences.data();
  params.num_sequences = 8;
  const auto units = [&](int threads) {
    const AttentionGrid grid(params, threads);
    std::vector<int64_t> of;
    for (const AttentionSequence& sequence : sequences) {
      of.push_back(grid.CutOf(sequence).units());
    }
    return of;
  };
  // All heads of each sequence: four units for each of two threads.
  EXPECT_EQ(units(2), std::vector<int64_t>(8, 1));
  EXPECT_EQ(units(16), std::vector<int64_t>(8, 8));
  EXPECT_EQ(units(64), std::vector<int64_t>(8, 32));
  // Nine tenths of the work are one sequence's.
  sequences[3].first_slot = 65535;
  EXPECT_EQ(units(2), (std::vector<int64_t>{1, 1, 1, 8, 1, 1, 1, 1}));
  // A prompt's rows share what was read, head by head.
  sequences[3] = {.num_rows = 512, .first_slot = 0};
  EXPECT_EQ(units(2)[3], 32 * 512 / kAbsorbedRows);
  // In small pages nothing lies side by side; larger ones have tiles.
  params.page_tokens = 32;
  EXPECT_EQ(units(2)[0], 32);
  params.page_tokens = 128;
  EXPECT_EQ(units(2)[0], 1);
}

TEST(LatentSetsOfSequencesTest, ClustersThatAreNoPowerOfTwoAreOneSetIfTheyFit) {
  LatentCache cache(TablesOf(6, 10), {1}, 4);
  PagedAttentionArgs params = cache.Params();
  const std::vector<AttentionSequence> sequences(
      8, {.num_rows = 1, .first_slot = 1023});
  params.sequences = sequences.data();
  params.num_sequences = 8;
  EXPECT_EQ(AttentionGrid(params, 1).CutOf(sequences[0]).units(), 1);
  EXPECT_EQ(AttentionGrid(params, 8).CutOf(sequences[0]).units(), 6);
}

class LatentPagesTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(LatentPagesTest, PageSizeDoesNotChangeBits) {
  std::vector<float> first;
  for (const int64_t page_tokens : {5, 16, 32, 64}) {
    LatentSpec spec = GetParam();
    spec.page_tokens = page_tokens;
    spec.exact_page_rows = 3 * page_tokens - 8;
    LatentCache cache(spec, {1100}, 3);
    cache.Write(0, 0, 1100);
    TestStream test(2);
    const auto out = cache.Attend(test, {{0, 1092, 8}});
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << page_tokens;
  }
}

LatentSpec InTiles(LatentSpec spec, int64_t slots, int64_t granule_bytes) {
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) {
      part.tile_slots = slots;
      part.granule_bytes = granule_bytes;
    }
  }
  return spec;
}

TEST_P(LatentPagesTest, TilesDoNotChangeBits) {
  std::vector<float> first;
  for (const int64_t tile_slots : {128, 64, 16, 4}) {
    LatentSpec spec = InTiles(GetParam(), tile_slots, 0);
    spec.page_tokens = 128;
    spec.exact_page_rows = 100;
    LatentCache cache(spec, {1100}, 3);
    cache.Write(0, 0, 1100);
    TestStream test(2);
    const auto out = cache.Attend(test, {{0, 1092, 8}});
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << tile_slots;
  }
}

TEST_P(LatentPagesTest, GranulesDoNotChangeBitsOfTheReference) {
  std::vector<float> first;
  for (const int64_t granule_bytes : {0, 4, 16}) {
    LatentSpec spec = InTiles(GetParam(), 8, granule_bytes);
    LatentCache cache(spec, {100}, 3);
    cache.Write(0, 0, 100);
    const auto test = TestStream::InGranules(granule_bytes);
    const auto out = cache.Attend(*test, {{0, 92, 8}});
    if (first.empty()) first = out;
    EXPECT_TRUE(SameBits(first, out)) << granule_bytes;
  }
}

INSTANTIATE_TEST_SUITE_P(All, LatentPagesTest,
                         ::testing::Values(Mixed(), MixedExact(64, 100),
                                           WithSinks("", 4, MixedExact(0, 0)),
                                           WithSinks("", 70,
                                                     MixedExact(9, 64))));

TEST(LatentPositionsTest, GivenPositionsAreThoseOfTheSlotsIfTheyAreTheSame) {
  LatentSpec spec;
  spec.keys = {Rebuilt(Numbers({24}), {16, 8})};
  TestStream test(1);
  const auto attend = [&] {
    LatentCache cache(spec, {80}, 4);
    cache.Write(0, 0, 80);
    return cache.Attend(test, {{0, 79, 1}});
  };
  const std::vector<float> slots = attend();
  spec.position_of = [](int64_t position) { return position; };
  EXPECT_TRUE(SameBits(slots, attend()));
  // The query does not turn with them.
  spec.first_position = 1;
  const std::vector<float> next = attend();
  EXPECT_FALSE(SameBits(slots, next));
  spec.first_position = 1000000;
  EXPECT_FALSE(SameBits(next, attend()));
}

// Bytes of workspace for one row behind `first_slot` tokens.
size_t WorkspaceBytes(LatentSpec spec, int64_t first_slot) {
  spec.tables_only = true;
  LatentCache cache(spec, {1}, 5);
  PagedAttentionArgs params = cache.Params();
  AttentionSequence sequence;
  sequence.num_rows = 1;
  sequence.first_slot = first_slot;
  params.sequences = &sequence;
  params.num_sequences = 1;
  TestStream test(1);
  Workspace counter = Workspace::Counting();
  KVASIR_EXPECT_OK(AttendOnDevice(test, params, counter));
  return counter.peak_bytes();
}

TEST(LatentWorkspaceTest, IsBoundedWhateverTheShapeAndTheContext) {
  std::vector<LatentSpec> specs = Specs();
  for (const int64_t width : {16, 128, 256, 512, 1024, 4096, 8192}) {
    const std::vector<int32_t> all(8, 0);
    LatentSpec spec;
    spec.num_heads = 64;
    spec.num_kv_heads = 8;
    spec.values = {Groups(Codes({width}, {4}, (width + 255) / 256 * 2), all)};
    for (const int64_t dims : {0, 64, 128, 256}) {
      const RebuildSpec rebuild = {dims, dims / 2, true};
      for (const PartSpec& keys :
           {Numbers({width}), Codes({width}, {4}, 64), Codes({width}, {3}),
            Fixed(Codes({width}, {2}, 128))}) {
        spec.keys = {Rebuilt(Groups(keys, all), rebuild)};
        specs.push_back(spec);
        if (dims > 0) {
          spec.keys.push_back(Numbers({dims}));
          specs.push_back(spec);
        }
      }
    }
  }
  const size_t num_stored = specs.size();
  for (size_t i = StoredSpecs().size(); i < num_stored; ++i) {
    specs.push_back(Exact(specs[i].name, 64, 64, specs[i]));
  }
  for (const LatentSpec& spec : specs) {
    const size_t bytes = WorkspaceBytes(spec, 1 << 10);
    EXPECT_GT(bytes, size_t{0}) << spec.name;
    const bool rebuilds =
        std::any_of(spec.keys.begin(), spec.keys.end(),
                    [](const PartSpec& part) { return part.rebuild.dims > 0; });
    const bool lifts =
        std::any_of(spec.values.begin(), spec.values.end(),
                    [](const PartSpec& part) { return part.lift_dims > 0; });
    EXPECT_LE(bytes,
              static_cast<size_t>(kAttentionScratchBytes +
                                  (rebuilds || lifts ? kRowStateBytes : 0)))
        << spec.name;
    EXPECT_EQ(bytes, WorkspaceBytes(spec, 1 << 16)) << spec.name;
  }
}

class LatentRefusalTest : public ::testing::Test {
 protected:
  absl::Status Try(const PagedAttentionArgs& params) {
    TestStream test;
    return AttendOnDevice(test, params, test.workspace());
  }
  void ExpectRefusal(const PagedAttentionArgs& params, const char* text) {
    EXPECT_THAT(Try(params), base::StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr(text)));
  }
};

TEST_F(LatentRefusalTest, NamesWhatIsWrong) {
  LatentSpec spec;
  spec.keys = {Rebuilt(Codes({24}, {4}), {16, 8})};
  LatentCache cache(spec, {16}, 6);
  const PagedAttentionArgs good = cache.Params();
  KVASIR_EXPECT_OK(Try(good));

  PagedAttentionArgs params = good;
  params.num_heads = 3;
  ExpectRefusal(params, "3 query heads over 2 KV heads");
  params = good;
  params.num_value_parts = 0;
  ExpectRefusal(params, "value parts: want at least 1, have 0");
  params = good;
  params.q_row_stride = 63;
  ExpectRefusal(params, "q_row_stride: want at least 64, have 63");

  AttentionKeyPartArgs key = good.keys[0];
  params = good;
  params.keys = &key;
  LatentGroup groups[2] = {key.latents.groups[0], key.latents.groups[1]};
  key.latents.groups = groups;
  groups[1].width = 8193;
  ExpectRefusal(params, "width: want 1 to 8192, have 8193");
  groups[1] = groups[0];
  CodeRun run = {0, 24, 7};
  groups[1].runs = &run;
  ExpectRefusal(params, "run 0: want 1 to 6 or 8 bits, or a last run of 0");
  run = {0, 20, 4};
  ExpectRefusal(params, "runs of 20 channels in a latent of 24");
  groups[1] = groups[0];
  const int32_t beyond[2] = {0, 2};
  key.group_of_head = beyond;
  ExpectRefusal(params, "group of a head: want 0 to 1, have 2");

  key = good.keys[0];
  KeyRebuildArgs rebuild = *key.rebuild;
  key.rebuild = &rebuild;
  rebuild.dims = 257;
  ExpectRefusal(params, "dims of rebuilt keys: want 1 to 256, have 257");
  rebuild = *good.keys[0].rebuild;
  rebuild.up = nullptr;
  ExpectRefusal(params, "width of keys without a lift: want 16 to 16, have 24");
  rebuild = *good.keys[0].rebuild;
  rebuild.num_pairs = 9;
  ExpectRefusal(params, "pairs of rebuilt keys: want 0 to 8, have 9");
}

TEST_F(LatentRefusalTest, NamesWhatIsWrongOfALift) {
  LatentSpec spec;
  spec.values = {Lifted(Codes({24}, {4}), 16)};
  LatentCache cache(spec, {16}, 6);
  PagedAttentionArgs params = cache.Params();
  KVASIR_EXPECT_OK(Try(params));
  AttentionValuePartArgs value = params.values[0];
  params.values = &value;
  ValueLiftArgs lift = *value.lift;
  value.lift = &lift;
  lift.dims = 257;
  ExpectRefusal(params, "dims of lifted values: want 1 to 256, have 257");
  lift.dims = 22;
  ExpectRefusal(params, "out_row_stride: want at least 70, have 69");
  lift.dims = 16;
  lift.up = nullptr;
  ExpectRefusal(params, "lifts of a part of lifted values: want at least 1");
}

TEST_F(LatentRefusalTest, NamesWhatIsWrongOfAWindow) {
  LatentSpec spec;
  spec.key_exact = 8;
  spec.value_exact = 8;
  LatentCache cache(spec, {16}, 6);
  cache.Write(0, 0, 16);
  TestStream test;
  cache.Attend(test, {{0, 15, 1}});
  const PagedAttentionArgs good = cache.Params();
  KVASIR_EXPECT_OK(Try(good));

  PagedAttentionArgs params = good;
  params.key_exact.window = -1;
  ExpectRefusal(params, "exact window: want at least 0, have -1");
  params = good;
  params.value_exact.sinks = -1;
  ExpectRefusal(params, "sinks: want at least 0, have -1");
  params.value_exact.sinks = 3;  // with the window, a row too many
  ExpectRefusal(params, "pages of exact rows: want at least 4, have 3");
  params = good;
  params.key_exact.page_rows = 0;
  ExpectRefusal(params, "exact rows of a page: want at least 1, have 0");
  params = good;
  params.value_exact.num_pages = 2;
  ExpectRefusal(params, "pages of exact rows: want at least 3, have 2");
  params = good;
  params.value_exact.first_page = -1;
  ExpectRefusal(params, "first page of exact rows: want at least 0, have -1");

  AttentionValuePartArgs value = good.values[0];
  params = good;
  params.values = &value;
  value.exact = nullptr;
  ExpectRefusal(params, "parts with exact rows: want at least 1, have 0");
  ExactRowsArgs rows = *good.values[0].exact;
  value.exact = &rows;
  rows.fresh.num_groups = 1;
  ExpectRefusal(params, "groups of exact rows: want 2 to 2, have 1");
  rows = *good.values[0].exact;
  rows.fresh.dtype = DType::kF16;
  ExpectRefusal(params, "exact rows of two number types");
  rows = *good.values[0].exact;
  rows.fresh.tile_slots = 0;  // would be divided by
  ExpectRefusal(params, "tile_slots: want at least 1, have 0");
  rows = *good.values[0].exact;
  LatentGroup groups[2] = {rows.ring.groups[0], rows.ring.groups[1]};
  rows.ring.groups = groups;
  groups[1].width = 31;
  ExpectRefusal(params, "width of exact rows: want 32 to 32, have 31");
}

TEST_F(LatentRefusalTest, PartsThatAreTooWideTogether) {
  LatentSpec spec;
  spec.num_heads = 1;
  spec.num_kv_heads = 1;
  spec.values.assign(8, Numbers({8192}));
  LatentCache cache(spec, {16}, 7);
  ExpectRefusal(cache.Params(), "more scratch than 262144 bytes");
}

}  // namespace
}  // namespace kvasir::kernels
