// Tests the attention kernels against a computation in float64, with several
// seeds, codecs, layouts and odd shapes.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/attention/cuda/device_attention.h"
#include "kernels/attention/cuda/mma_digits.h"
#include "kernels/attention/ops.h"
#include "kernels/emulation/testing/attention_launch.h"
#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();

// The page granule of the emulated device, in bytes. The caches of these tests
// use the same granule.
constexpr int64_t kGranule = 16;

// The norm of got - want divided by the norm of want. Columns that belong to no
// head are ignored.
double NormError(const std::vector<double>& want,
                 const std::vector<float>& got) {
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) continue;
    const double difference = static_cast<double>(got[i]) - want[i];
    error += difference * difference;
    norm += want[i] * want[i];
  }
  return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

struct Outcome {
  std::vector<float> got;
  // Relative errors compared with float64. `error` is the error of all numbers
  // together; `row_error` is the largest error of one head in one row.
  double error = 0.0;
  double row_error = 0.0;
  std::vector<SequenceItems> items;
  bool tensor_cores = false;
  int64_t prompt_items = 0;  // number of work items of the prefill kernel
};

struct Ask {
  LatentCache& cache;
  std::vector<LatentAsk> asks;
  DType dtype = DType::kF32;
  int64_t most_partials = 64;
  bool judged = true;  // false: the result is not compared with float64
  // Called before the launch, to overwrite exact rows for this launch only.
  std::function<void(const PagedAttentionArgs&)> spoil = nullptr;
  bool prompts_as_rows = false;
  int64_t slots_before = 0;  // see DeviceLaunch
};

Outcome Attend(EmulatedTest& test, const Ask& ask) {
  Outcome outcome;
  ask.cache.UseThreads(HostThreads());
  ask.cache.Launch(ask.asks, [&](const PagedAttentionArgs& args) {
    if (ask.spoil != nullptr) ask.spoil(args);
    DeviceLaunch launch(test, ask.cache, args, ask.asks, ask.dtype,
                        ask.slots_before);
    launch.shape().most_partials = ask.most_partials;
    launch.shape().prompts_as_rows = ask.prompts_as_rows;
    outcome.got = launch.Run();
    outcome.items = launch.Items();
    outcome.tensor_cores = launch.kernels().decode == "attention";
    if (!OnGpu() && outcome.items.back().first_item > 0) {
      EXPECT_NE(test.emulator().SyncSites("attention").empty(),
                outcome.tensor_cores);
    }
    outcome.prompt_items = outcome.items.back().first_prompt;
    if (!ask.judged) return;
    std::vector<double> expected;
    for (const LatentAsk& each : ask.asks) {
      const std::vector<double> rows = ask.cache.Expected(each);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    outcome.row_error = WorstError(args, expected, outcome.got);
    outcome.error = NormError(expected, outcome.got);
  });
  return outcome;
}

// True if the errors are within the tolerances. A row may have twice the
// relative error that all numbers together may have. If the values of a row
// nearly cancel, its norm is small, but its rounding errors are not.
bool IsRight(const Outcome& outcome, DType dtype) {
  return outcome.error <= ToleranceOf(dtype) &&
         outcome.row_error <= 2.0 * ToleranceOf(dtype);
}
void ExpectRight(const Outcome& outcome, DType dtype = DType::kF32) {
  EXPECT_TRUE(IsRight(outcome, dtype))
      << DTypeName(dtype) << ": " << outcome.error << " of all, "
      << outcome.row_error << " of the worst row";
}

LatentSpec InTiles(LatentSpec spec, int64_t tile_slots,
                   int64_t granule = kGranule) {
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) {
      part.tile_slots = tile_slots;
      part.granule_bytes = granule;
    }
  }
  return spec;
}
LatentSpec OfHeads(int64_t heads, int64_t kv_heads, PartSpec key,
                   PartSpec value) {
  LatentSpec spec;
  spec.num_heads = heads;
  spec.num_kv_heads = kv_heads;
  spec.keys = {std::move(key)};
  spec.values = {std::move(value)};
  spec.page_tokens = 64;
  // The prefill kernel loads queries 16 bytes at a time. With this gap, rows of
  // queries are multiples of 16 bytes.
  spec.query_gap = 8;
  return InTiles(spec, 0);
}

bool Lifts(const LatentSpec& spec) {
  const auto makes = [](const PartSpec& part) {
    return part.rebuild.dims > 0 || part.lift_dims > 0;
  };
  return std::any_of(spec.keys.begin(), spec.keys.end(), makes) ||
         std::any_of(spec.values.begin(), spec.values.end(), makes);
}

class EmulatedAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(EmulatedAttentionTest,
       AttentionEqualsItsDefinitionWithinTheToleranceOfTheNumberType) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    LatentSpec spec = GetParam();
    // Every second case stores slots in tiles of eight, the others store one
    // slot after the other.
    if (++seed % 2 == 0) spec = InTiles(spec, 8);
    LatentCache cache(spec, {1, 65, 600}, 1);
    const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 62, 3}, {2, 599, 1}};
    for (const LatentAsk& ask : asks) {
      cache.Write(ask.sequence, 0, ask.start + ask.count);
    }
    cache.RoundQueries(dtype);
    EmulatedTest test(seed);
    const Outcome outcome = Attend(test, {cache, asks, dtype});
    ExpectRight(outcome, dtype);
    EXPECT_LT(outcome.items[0].first_partial, 0);
    EXPECT_EQ(outcome.items[2].first_partial >= 0, spec.window == 0);
    EXPECT_FALSE(Lifts(spec) && outcome.tensor_cores);
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, EmulatedAttentionTest,
                         ::testing::ValuesIn(Specs()), [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

// Specs that the tensor-core kernels support. Numbers that are stored without
// codes have the type of activations.
std::vector<LatentSpec> TensorCoreSpecs() {
  const auto named = [](const char* name, LatentSpec spec) {
    spec.name = name;
    return spec;
  };
  LatentSpec parts = OfHeads(6, 2, Numbers({24}), Codes({96}, {4}, 32));
  parts.keys.push_back(Codes({32}, {8}));
  parts.keys.push_back(Levels(Codes({64}, {4})));
  parts.values.push_back(Numbers({40}));
  parts.values.push_back(Levels(Codes({32}, {4})));
  LatentSpec groups = OfHeads(8, 4, Groups(Numbers({96, 24}), {0, 0, 1, 1}),
                              Groups(Codes({64, 32}, {4}, 32), {0, 1, 1, 0}));
  // The query heads form two units, one of four heads and one of two.
  LatentSpec unlike = OfHeads(6, 3, Groups(Codes({64}, {8}, 16), {0, 0, 1}),
                              Groups(Numbers({24, 136}), {1, 1, 0}));
  LatentSpec window = OfHeads(4, 2, Codes({64}, {4}), Codes({64}, {8}));
  window.window = 50;
  LatentSpec ahead = OfHeads(4, 2, Numbers({64}), Codes({64}, {4}));
  ahead.causal = false;
  LatentSpec rows = InTiles(OfHeads(4, 2, Codes({64}, {8}), Numbers({64})), 0,
                            /*granule=*/0);
  LatentSpec small = OfHeads(4, 2, Codes({64}, {4}), Numbers({64}));
  small.page_tokens = 5;
  return {
      named("numbers", OfHeads(8, 2, Numbers({64}), Numbers({64}))),
      named("numbers_128", OfHeads(4, 1, Numbers({128}), Numbers({128}))),
      named("numbers_odd", OfHeads(5, 5, Numbers({8}), Numbers({72}))),
      named("numbers_wide", OfHeads(1, 1, Numbers({264}), Numbers({200}))),
      named("codes_4", OfHeads(8, 2, Codes({64}, {4}), Codes({64}, {4}))),
      named("codes_4_wide",
            OfHeads(2, 1, Codes({320}, {4}), Codes({288}, {4}))),
      named("codes_4_runs",
            OfHeads(4, 1, Codes({160}, {4}, 32), Codes({160}, {4}, 64))),
      named("codes_mixed", OfHeads(4, 1, Codes({160}, {4, 8, 4}, 32),
                                   Codes({128}, {8, 4, 4, 8}, 32))),
      named("codes_2", OfHeads(8, 2, Codes({128}, {2}), Codes({64}, {2}))),
      named("codes_2_wide",
            OfHeads(5, 1, Codes({320}, {2}), Codes({320}, {2}))),
      named("codes_2_mixed", OfHeads(4, 1, Codes({192}, {2, 8, 4}, 64),
                                     Codes({192}, {4, 2, 8}, 64))),
      named("codes_1", OfHeads(8, 2, Codes({64}, {1}), Codes({192}, {1}))),
      named("codes_3", OfHeads(8, 2, Codes({64}, {3}), Codes({128}, {3}))),
      named("codes_3_wide",
            OfHeads(5, 1, Codes({320}, {3}), Codes({320}, {3}))),
      named("codes_5_and_6",
            OfHeads(6, 2, Codes({96}, {5}), Codes({160}, {6}))),
      named("codes_6_runs",
            OfHeads(4, 1, Codes({192}, {6}, 96), Codes({192}, {5, 6}, 96))),
      named("codes_of_all_bits",
            OfHeads(4, 1, Codes({448}, {6, 3, 8, 5, 1, 4, 2}, 64),
                    Codes({448}, {1, 2, 5, 3, 8, 6, 4}, 64))),
      named("codes_8", OfHeads(8, 2, Codes({48}, {8}), Codes({48}, {8}))),
      named("codes_8_runs",
            OfHeads(16, 1, Codes({160}, {8}, 16), Codes({160}, {8}, 80))),
      named("levels",
            OfHeads(6, 2, Levels(Codes({64}, {4})), Levels(Codes({64}, {4})))),
      named("levels_3", OfHeads(6, 2, Levels(Codes({128}, {3})),
                                Levels(Codes({192}, {3})))),
      named("levels_3_and_2",
            OfHeads(8, 1, Levels(Codes({64}, {3})), Levels(Codes({128}, {2})))),
      named("levels_1",
            OfHeads(9, 1, Levels(Codes({128}, {1})), Levels(Codes({64}, {1})))),
      named("static",
            OfHeads(6, 2, Fixed(Codes({64}, {4})), Fixed(Codes({48}, {8})))),
      named("static_of_all_bits",
            OfHeads(4, 1, Fixed(Codes({448}, {8, 6, 5, 4, 3, 2, 1}, 64)),
                    Fixed(Codes({448}, {8, 6, 5, 4, 3, 2, 1}, 64)))),
      named("static_unstored",
            OfHeads(8, 2, Unstored(Codes({168}, {6, 4}, 64), 40),
                    Unstored(Codes({230}, {3, 2}, 64), 102))),
      named("parts", InTiles(parts, 0)),
      named("groups", groups),
      named("unlike_units", unlike),
      named("window", window),
      named("not_causal", ahead),
      named("slot_after_slot", rows),
      named("small_pages", small)};
}

// True if the prefill kernel supports the spec.
bool ServesPrompts(const LatentSpec& spec) {
  for (const auto* side : {&spec.keys, &spec.values}) {
    for (const PartSpec& part : *side) {
      if (part.fixed_ranges) return false;
      for (const int bits : part.bits) {
        if (bits != 4 && bits != 8) return false;
      }
    }
  }
  const std::string name = spec.name;
  return name != "codes_4_wide" && name != "parts";
}

class TensorCoreAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(TensorCoreAttentionTest,
       AttentionEqualsItsDefinitionWithinTheToleranceOfTheNumberType) {
  uint64_t seed = 0;
  for (const DType dtype : {DType::kF16, DType::kBf16}) {
    LatentSpec spec = GetParam();
    for (auto* side : {&spec.keys, &spec.values}) {
      for (PartSpec& part : *side) part.dtype = dtype;
    }
    LatentCache cache(spec, {1, 65, 600}, 1);
    const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 62, 3}, {2, 599, 1}};
    for (const LatentAsk& ask : asks) {
      cache.Write(ask.sequence, 0, ask.start + ask.count);
    }
    cache.RoundQueries(dtype);
    for (const int64_t most_partials : {0, 64}) {
      EmulatedTest test(++seed);
      const Outcome outcome = Attend(test, {cache, asks, dtype, most_partials});
      EXPECT_TRUE(outcome.tensor_cores);
      ExpectRight(outcome, dtype);
    }
  }
}

// Expects that attention gives the same bits if all pages begin more than 2^32
// bytes after the start of their arena. Returns how many items the prefill
// kernel had.
int64_t ExpectSameBitsFarFromTheStart(LatentSpec spec, DType dtype) {
  std::vector<Outcome> outcomes;
  for (int run = 0; run < 2; ++run) {
    LatentCache cache(spec, {69, 134}, 1);
    cache.Write(0, 0, 69);
    cache.Write(1, 0, 134);
    cache.RoundQueries(dtype);
    EmulatedTest test;
    outcomes.push_back(Attend(test, {.cache = cache,
                                     .asks = {{0, 68, 1}, {1, 100, 34}},
                                     .dtype = dtype,
                                     .judged = false}));
    const auto first_page_of = [](int64_t page_bytes) {
      return (int64_t{1} << 32) / page_bytes + 1;
    };
    for (const TestPart& part : cache.parts()) {
      spec.first_page =
          std::max(spec.first_page, first_page_of(part.part.page_bytes));
    }
    const PagedAttentionArgs params = cache.Params();
    for (const ExactSlots& exact : {params.key_exact, params.value_exact}) {
      if (exact.num_segments == 0) continue;
      spec.first_side_page = std::max(
          spec.first_side_page, first_page_of(exact.segments[0].page_bytes));
    }
  }
  EXPECT_TRUE(SameBits(outcomes[0].got, outcomes[1].got)) << DTypeName(dtype);
  return outcomes[1].prompt_items;
}
TEST_P(TensorCoreAttentionTest, PagesFarFromTheStartOfTheArenaGiveTheSameBits) {
  if (kThreadSanitizer) GTEST_SKIP() << "tests addresses, not threads";
  if (OnGpu()) GTEST_SKIP() << "arenas would take up to 40 GiB of its memory";
  EXPECT_EQ(ExpectSameBitsFarFromTheStart(GetParam(), DType::kF32), 0);
  EXPECT_EQ(ExpectSameBitsFarFromTheStart(GetParam(), DType::kBf16) > 0,
            ServesPrompts(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Specs, TensorCoreAttentionTest,
                         ::testing::ValuesIn(TensorCoreSpecs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

// Types of activations: float32 selects the plain kernel, bf16 the tensor-core
// kernel.
constexpr DType kBothKernels[] = {DType::kF32, DType::kBf16};
void ExpectRightByEither(const Outcome& outcome, DType dtype) {
  EXPECT_EQ(outcome.tensor_cores, dtype != DType::kF32);
  ExpectRight(outcome, dtype);
}
const LatentSpec kDense = OfHeads(8, 2, Numbers({40}), Numbers({72}));
const LatentSpec kFour = OfHeads(8, 2, Codes({64}, {4}), Codes({64}, {4}));

// Layers whose keys are stored without the bias of the key projection.
std::vector<LatentSpec> BiasedSpecs() {
  LatentSpec exact =
      OfHeads(6, 2, Levels(Codes({64}, {4})), Levels(Codes({64}, {4})));
  exact.sinks = 4;
  exact.key_exact = 28;
  exact.value_exact = 28;
  exact.exact_page_rows = 8;
  for (auto* side : {&exact.keys, &exact.values}) {
    for (PartSpec& part : *side) part.exact_alignment = 16;
  }
  LatentSpec window = OfHeads(4, 2, Codes({64}, {8}), Codes({64}, {8}));
  window.window = 50;
  LatentSpec many = OfHeads(24, 2, Codes({64}, {4}), Codes({64}, {4}));
  LatentSpec few_pairs = kFour;
  few_pairs.bias_tile_pairs = 0;
  few_pairs.bias_exact_pairs = 4;
  LatentSpec many_pairs = kFour;
  many_pairs.bias_tile_pairs = 40;
  many_pairs.bias_exact_pairs = 8;
  LatentSpec no_exact = kFour;
  no_exact.bias_exact_pairs = 0;
  LatentSpec in_units = kFour;
  in_units.bias_unit = 4.0f;
  std::vector<LatentSpec> specs = {
      kFour,     exact,
      window,    many,
      few_pairs, many_pairs,
      no_exact,  OfHeads(8, 2, Numbers({64}), Numbers({64})),
      in_units};
  for (LatentSpec& spec : specs) spec.key_bias = true;
  return specs;
}

TEST(KeyBiasCudaTest, EveryKernelAddsTheKeyBiasToTheScores) {
  uint64_t seed = 0;
  for (const LatentSpec& spec : BiasedSpecs()) {
    for (const DType dtype : kBothKernels) {
      LatentCache cache(spec, {1, 65, 600}, 1);
      const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 40, 25}, {2, 599, 1}};
      for (const LatentAsk& ask : asks) {
        cache.Write(ask.sequence, 0, ask.start + ask.count);
      }
      cache.RoundQueries(dtype);
      EmulatedTest test(++seed);
      const Outcome outcome = Attend(test, {cache, asks, dtype});
      SCOPED_TRACE(seed);
      ExpectRightByEither(outcome, dtype);
      EXPECT_EQ(outcome.prompt_items > 0, dtype != DType::kF32);
    }
  }
}

// In each unit of eviction, slots have other positions.
TEST(KeyBiasCudaTest, TheKeyBiasIsThatOfThePositionsStoredInSlots) {
  uint64_t seed = 0;
  for (LatentSpec spec : BiasedSpecs()) {
    spec.unit_of_head = {0, 1};
    spec.stored_positions = true;
    for (const DType dtype : kBothKernels) {
      LatentCache cache(spec, {1, 65, 600}, 1);
      const std::vector<LatentAsk> asks = {{0, 0, 1}, {1, 40, 25}, {2, 599, 1}};
      for (const LatentAsk& ask : asks) {
        cache.Write(ask.sequence, 0, ask.start + ask.count);
      }
      cache.RoundQueries(dtype);
      EmulatedTest test(++seed);
      const Outcome outcome = Attend(test, {cache, asks, dtype});
      SCOPED_TRACE(seed);
      EXPECT_FALSE(outcome.tensor_cores);
      ExpectRight(outcome, dtype);
    }
  }
}

TEST(KeyBiasCudaTest, TheBitsOfARowDoNotDependOnOtherRows) {
  constexpr int64_t kFirst = 506;
  constexpr int64_t kTokens = 522;
  for (const DType dtype : kBothKernels) {
    LatentCache cache(BiasedSpecs()[0], {kTokens, 40}, 2);
    cache.Write(0, 0, kTokens);
    cache.Write(1, 0, 40);
    cache.RoundQueries(dtype);
    EmulatedTest test(1);
    const Outcome whole =
        Attend(test, {cache, {{0, kFirst, kTokens - kFirst}}, dtype});
    const int64_t row =
        static_cast<int64_t>(whole.got.size()) / (kTokens - kFirst);
    for (const int64_t chunk : {1, 3, 16}) {
      std::vector<float> chunks;
      for (int64_t t = kFirst; t < kTokens; t += chunk) {
        const int64_t count = std::min(chunk, kTokens - t);
        EmulatedTest other(static_cast<uint64_t>(t));
        const Outcome part = Attend(
            other, {cache, {{1, 37, 3}, {0, t, count}}, dtype, 64, false});
        chunks.insert(chunks.end(), part.got.begin() + 3 * row, part.got.end());
      }
      EXPECT_TRUE(SameBits(whole.got, chunks)) << chunk;
    }
  }
}

TEST(KeyBiasCudaTest,
     DividingAPromptIntoChunksDoesNotChangeTheBitsOfTheOutput) {
  for (const size_t index : {0, 1}) {
    LatentCache cache(BiasedSpecs()[index], {170}, 2);
    cache.Write(0, 0, 170);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(1);
    const Outcome whole = Attend(test, {cache, {{0, 50, 120}}, DType::kBf16});
    ExpectRight(whole, DType::kBf16);
    for (const int64_t chunk : {20, 60}) {
      std::vector<float> chunks;
      for (int64_t t = 50; t < 170; t += chunk) {
        EmulatedTest other(static_cast<uint64_t>(t));
        const Outcome part =
            Attend(other, {cache, {{0, t, chunk}}, DType::kBf16, 64, false});
        EXPECT_GT(part.prompt_items, 0);
        chunks.insert(chunks.end(), part.got.begin(), part.got.end());
      }
      EXPECT_TRUE(SameBits(whole.got, chunks)) << index << " " << chunk;
    }
  }
}

TEST(AttentionCudaTest, AnyNumberOfQueryHeadsMayShareAKvHead) {
  const PartSpec levels = Levels(Codes({32}, {4}));
  for (const auto& [key, value] :
       {std::pair(Numbers({40}), Numbers({24})),
        std::pair(Codes({96}, {4}), Codes({16}, {8})),
        std::pair(Codes({48}, {8}), Codes({32}, {4})),
        std::pair(levels, levels)}) {
    for (const DType dtype : kBothKernels) {
      for (const int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 40}) {
        LatentCache cache(OfHeads(2 * heads, 2, key, value), {20}, 3);
        cache.Write(0, 0, 20);
        cache.RoundQueries(dtype);
        EmulatedTest test(static_cast<uint64_t>(heads));
        SCOPED_TRACE(heads);
        ExpectRightByEither(Attend(test, {cache, {{0, 11, 9}}, dtype}), dtype);
      }
    }
  }
}

// A row's result has the same bits if the row is computed by itself, in a batch
// or in a prompt. It also does not depend on how the row's context is split.
TEST(AttentionCudaTest, TheBitsOfARowDoNotDependOnOtherRows) {
  LatentSpec sliding = kDense;
  sliding.window = 70;
  for (const LatentSpec& spec : {kDense, kFour, sliding}) {
    for (const DType dtype : kBothKernels) {
      constexpr int64_t kFirst = 506;
      constexpr int64_t kTokens = 522;
      LatentCache cache(spec, {kTokens, 40}, 2);
      cache.Write(0, 0, kTokens);
      cache.Write(1, 0, 40);
      cache.RoundQueries(dtype);
      EmulatedTest test(1);
      // With this many rows, no context is split.
      const Outcome whole =
          Attend(test, {cache,
                        {{0, kFirst - 1, kTokens - kFirst + 1}},
                        dtype,
                        64,
                        true,
                        nullptr,
                        /*prompts_as_rows=*/true});
      ExpectRight(whole, dtype);
      EXPECT_LT(whole.items[0].first_partial, 0);
      const int64_t row =
          static_cast<int64_t>(whole.got.size()) / (kTokens - kFirst + 1);
      for (const int64_t chunk : {1, 3, 16}) {
        std::vector<float> chunks;
        for (int64_t t = kFirst; t < kTokens; t += chunk) {
          const int64_t count = std::min(chunk, kTokens - t);
          EmulatedTest other(static_cast<uint64_t>(t));
          const Outcome part = Attend(
              other, {cache, {{1, 37, 3}, {0, t, count}}, dtype, 64, false});
          chunks.insert(chunks.end(), part.got.begin() + 3 * row,
                        part.got.end());
        }
        EXPECT_TRUE(
            SameBits({whole.got.begin() + row, whole.got.end()}, chunks))
            << chunk;
      }
      for (const int64_t most_partials : {0, 8, 9}) {
        EmulatedTest other(9);
        const Outcome last = Attend(other, {cache,
                                            {{0, kTokens - 4, 4}, {1, 39, 1}},
                                            dtype,
                                            most_partials,
                                            false});
        EXPECT_EQ(last.items[0].first_partial >= 0, most_partials >= 8);
        EXPECT_TRUE(SameBits({whole.got.end() - 4 * row, whole.got.end()},
                             {last.got.begin(), last.got.begin() + 4 * row}))
            << most_partials;
      }
    }
  }
}

// ---- prompts

LatentSpec OfType(LatentSpec spec, DType dtype) {
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) part.dtype = dtype;
  }
  return spec;
}
EmulatorOptions WithShared(uint64_t seed, int64_t kib) {
  EmulatorOptions options;
  options.seed = seed;
  options.shared_bytes = kib << 10;
  return options;
}
// The largest shared memory of a CTA in KiB: kMuchRoom on an H100, kLessRoom on
// an A100.
constexpr int64_t kMuchRoom = 227;
constexpr int64_t kLessRoom = 163;

class PromptAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

// The prefill kernel must give the same bits however a prompt is cut into
// chunks. The decoding kernel, which runs if `prompts_as_rows` is set, must
// give these bits too. The rows of the prompt lie in two splits of the context.
TEST_P(PromptAttentionTest, ChunksOfAnySizeGiveTheBitsOfTheWholePrompt) {
  uint64_t seed = 0;
  for (const auto& [dtype, room] : {std::pair(DType::kBf16, kMuchRoom),
                                    std::pair(DType::kF16, kLessRoom)}) {
    const LatentSpec spec = OfType(GetParam(), dtype);
    constexpr int64_t kFirst = 503;
    constexpr int64_t kTokens = 543;
    // The pages of the first 384 slots are released, because the emulator is
    // faster with fewer slots.
    const int64_t dead_pages = 384 / spec.page_tokens;
    LatentCache cache(spec, {kTokens}, 1);
    cache.Write(0, 0, kTokens);
    cache.RoundQueries(dtype);
    const std::vector<LatentAsk> whole = {
        {0, kFirst, kTokens - kFirst, dead_pages}};
    EmulatedTest test(WithShared(++seed, room));
    const Outcome prompt = Attend(test, {cache, whole, dtype});
    ExpectRight(prompt, dtype);
    EXPECT_EQ(prompt.prompt_items > 0, ServesPrompts(spec));
    EmulatedTest as_rows(WithShared(++seed, room));
    const Outcome rows = Attend(as_rows, {cache, whole, dtype, 64, true,
                                          nullptr, /*prompts_as_rows=*/true});
    ExpectRight(rows, dtype);
    EXPECT_EQ(rows.prompt_items, 0);
    // Without a causal mask, a row in a chunk sees other slots than the same
    // row in the whole prompt, so results differ.
    if (!spec.causal) continue;
    // clang 14 cannot capture structured bindings by reference.
    const auto in_chunks = [&, dtype = dtype, room = room](int64_t tokens) {
      std::vector<LatentAsk> chunks;
      for (int64_t t = kFirst; t < kTokens; t += tokens) {
        chunks.push_back({0, t, tokens, dead_pages});
      }
      EmulatedTest other(WithShared(++seed, room));
      return Attend(other, {cache, chunks, dtype, 64, false});
    };
    EXPECT_TRUE(SameBits(prompt.got, in_chunks(20).got)) << DTypeName(dtype);
    EXPECT_TRUE(SameBits(rows.got, in_chunks(10).got)) << DTypeName(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, PromptAttentionTest,
                         ::testing::ValuesIn(TensorCoreSpecs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

// ---- exact rows next to codes that tensor cores read

LatentSpec WithExact(const char* name, int64_t sinks, int64_t key,
                     int64_t value, LatentSpec spec) {
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) part.exact_alignment = kGranule;
  }
  return WithSinks(name, sinks, Exact(name, key, value, std::move(spec)));
}
// Returns the spec with numbers and exact rows that have the type of
// activations.
LatentSpec ExactOfType(LatentSpec spec, DType dtype) {
  spec = OfType(std::move(spec), dtype);
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) part.exact_dtype = dtype;
  }
  return spec;
}

const PartSpec kLevels = Levels(Codes({64}, {4}));
std::vector<LatentSpec> ExactTensorCoreSpecs() {
  LatentSpec parts = OfHeads(6, 2, Numbers({24}), Codes({96}, {4}, 32));
  parts.keys.push_back(Codes({32}, {8}));
  parts.keys.push_back(Levels(Codes({64}, {4})));
  parts.values.push_back(Numbers({40}));
  parts.values.push_back(Levels(Codes({32}, {4})));
  LatentSpec groups = OfHeads(8, 4, Groups(Numbers({96, 24}), {0, 0, 1, 1}),
                              Groups(Codes({64, 32}, {4}, 32), {0, 1, 1, 0}));
  LatentSpec window = OfHeads(4, 2, Codes({64}, {4}), Codes({64}, {8}));
  window.window = 50;
  LatentSpec ahead = OfHeads(4, 2, Codes({64}, {4}), Codes({64}, {4}));
  ahead.causal = false;
  LatentSpec small = OfHeads(4, 2, Codes({64}, {4}), Numbers({64}));
  small.page_tokens = 5;
  const PartSpec levels = Levels(Codes({64}, {4}));
  LatentSpec evicted = OfHeads(6, 2, kLevels, kLevels);
  evicted.evicted = 1001;
  return {
      WithExact("levels", 4, 28, 28, OfHeads(6, 2, kLevels, kLevels)),
      WithExact(
          "levels_wide", 4, 28, 28,
          OfHeads(2, 1, Levels(Codes({128}, {4})), Levels(Codes({128}, {4})))),
      WithExact("evicted", 4, 28, 30, evicted),
      WithExact("codes_4_runs", 1, 70, 7,
                OfHeads(4, 1, Codes({160}, {4}, 32), Codes({160}, {4}, 64))),
      WithExact("codes_mixed", 2, 40, 9,
                OfHeads(4, 1, Codes({160}, {4, 8, 4}, 32),
                        Codes({128}, {8, 4, 4, 8}, 32))),
      WithExact("codes_2", 64, 100, 30,
                OfHeads(4, 1, Codes({192}, {2}, 64), Codes({320}, {2}))),
      WithExact("codes_of_many_bits", 2, 70, 9,
                OfHeads(4, 1, Codes({192}, {6, 3, 1}, 64),
                        Codes({192}, {1, 5, 3}, 64))),
      WithExact("static", 2, 70, 9,
                OfHeads(4, 1, Fixed(Codes({192}, {6, 3, 8}, 64)),
                        Unstored(Codes({128}, {3}, 64), 64))),
      WithExact(
          "levels_3", 4, 60, 60,
          OfHeads(6, 2, Levels(Codes({128}, {3})), Levels(Codes({128}, {3})))),
      WithExact(
          "levels_3_and_2", 4, 124, 124,
          OfHeads(9, 1, Levels(Codes({64}, {3})), Levels(Codes({64}, {2})))),
      WithExact("codes_4_of_keys", 0, 100, 0,
                OfHeads(8, 2, Codes({64}, {4}), Codes({64}, {4}))),
      WithExact("codes_8_of_values", 0, 0, 65,
                OfHeads(4, 2, Codes({48}, {8}), Codes({48}, {8}))),
      WithExact("codes_8_runs", 64, 1, 64,
                OfHeads(16, 1, Codes({160}, {8}, 16), Codes({160}, {8}, 80))),
      WithExact("numbers", 5, 9, 20,
                OfHeads(5, 5, Numbers({8}), Numbers({72}))),
      WithExact("parts", 65, 30, 65, InTiles(parts, 0)),
      WithExact("groups", 3, 30, 12, groups),
      WithExact("sinks_alone", 70, 0, 0,
                OfHeads(4, 2, Codes({64}, {8}), Codes({64}, {4}))),
      WithExact("all", 9, 5000, 5000, OfHeads(4, 2, kLevels, kLevels)),
      WithExact("behind_a_window", 8, 20, 80, window),
      WithExact("not_causal", 5, 9, 30, ahead),
      WithExact("not_causal_sinks", 5, 0, 0, ahead),
      WithExact("small_pages", 6, 30, 17, small)};
}

class ExactAttentionTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(ExactAttentionTest, PagesFarFromTheStartOfTheArenaGiveTheSameBits) {
  if (kThreadSanitizer) GTEST_SKIP() << "tests addresses, not threads";
  if (OnGpu()) GTEST_SKIP() << "arenas would take up to 40 GiB of its memory";
  const LatentSpec spec = ExactOfType(GetParam(), DType::kBf16);
  EXPECT_EQ(ExpectSameBitsFarFromTheStart(spec, DType::kBf16) > 0,
            ServesPrompts(spec));
}

// Checks the same as PromptAttentionTest, but for caches with exact rows.
TEST_P(ExactAttentionTest, ChunksOfAnySizeGiveTheBitsOfTheWholePrompt) {
  uint64_t seed = 0;
  for (const auto& [dtype, room] : {std::pair(DType::kBf16, kMuchRoom),
                                    std::pair(DType::kF16, kLessRoom)}) {
    const LatentSpec spec = ExactOfType(GetParam(), dtype);
    constexpr int64_t kFirst = 503;
    constexpr int64_t kTokens = 543;
    LatentCache cache(spec, {kTokens}, 1);
    // For some slots only the exact rows may be read, so the codes of these
    // slots are not written.
    cache.Write(0, spec.sinks,
                kTokens - std::min(spec.key_exact, spec.value_exact));
    cache.RoundQueries(dtype);
    const LatentAsk whole = {0, kFirst, kTokens - kFirst};
    EmulatedTest test(WithShared(++seed, room));
    const Outcome prompt = Attend(test, {cache, {whole}, dtype});
    ExpectRight(prompt, dtype);
    EXPECT_EQ(prompt.prompt_items > 0, ServesPrompts(spec));
    EmulatedTest as_rows(WithShared(++seed, room));
    const Outcome rows = Attend(
        as_rows,
        {cache, {whole}, dtype, 64, true, nullptr, /*prompts_as_rows=*/true});
    ExpectRight(rows, dtype);
    EXPECT_EQ(rows.prompt_items, 0);
    // Without a causal mask, a row in a chunk sees other slots than the same
    // row in the whole prompt, so results differ.
    if (!spec.causal) {
      EmulatedTest other(WithShared(++seed, room));
      const Outcome decoded = Attend(other, {cache, {{0, kFirst, 10}}, dtype});
      EXPECT_EQ(decoded.prompt_items, 0);
      ExpectRight(decoded, dtype);
      continue;
    }
    for (const int64_t chunk : {20, 8, 1}) {
      std::vector<float> chunks;
      for (int64_t t = kFirst; t < kTokens; t += chunk) {
        EmulatedTest other(WithShared(++seed, room));
        const Outcome part =
            Attend(other, {cache, {{0, t, chunk}}, dtype, 64, t == kFirst});
        EXPECT_TRUE(part.tensor_cores || part.prompt_items > 0);
        EXPECT_EQ(part.prompt_items > 0, chunk > 16 && ServesPrompts(spec));
        if (t == kFirst) ExpectRight(part, dtype);
        chunks.insert(chunks.end(), part.got.begin(), part.got.end());
      }
      EXPECT_TRUE(SameBits(chunk > 16 ? prompt.got : rows.got, chunks))
          << DTypeName(dtype) << " " << chunk;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, ExactAttentionTest,
                         ::testing::ValuesIn(ExactTensorCoreSpecs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

const LatentSpec kExact =
    WithExact("", 4, 28, 30, OfHeads(6, 2, kLevels, kLevels));

TEST(ExactAttentionTest, OneLaunchSupportsSequencesOfDifferentLengths) {
  // Each sequence has its own rings of exact rows.
  LatentCache cache(kExact, {40, 70, 22, 3, 600, 518, 1100}, 2);
  const std::vector<LatentAsk> asks = {{0, 0, 40},  {1, 69, 1},  {2, 5, 17},
                                       {3, 0, 3},   {4, 599, 1}, {5, 500, 18},
                                       {6, 1090, 5}};
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
  }
  cache.RoundQueries(DType::kBf16);
  std::vector<float> alone;
  for (const LatentAsk& ask : asks) {
    EmulatedTest one(2);
    const Outcome outcome =
        Attend(one, {cache, {ask}, DType::kBf16, 64, false});
    alone.insert(alone.end(), outcome.got.begin(), outcome.got.end());
  }
  for (const int64_t most_partials : {0, 64}) {
    EmulatedTest test(1);
    const Outcome all =
        Attend(test, {cache, asks, DType::kBf16, most_partials});
    ExpectRight(all, DType::kBf16);
    EXPECT_TRUE(all.tensor_cores);
    EXPECT_GT(all.prompt_items, 0);
    EXPECT_EQ(all.items[4].first_partial >= 0, most_partials > 0);
    EXPECT_TRUE(SameBits(all.got, alone)) << most_partials;
  }
}

TEST(ExactAttentionTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  LatentCache cache(kExact, {530, 70, 530}, 6);
  cache.Write(0, 0, 530);
  cache.Write(1, 0, 70);
  cache.Write(2, 0, 530);
  cache.RoundQueries(DType::kBf16);
  std::vector<float> first;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    const Outcome outcome =
        Attend(test, {cache,
                      {{0, 503, 20, 6}, {1, 50, 20}, {2, 528, 2, 6}},
                      DType::kBf16,
                      64,
                      seed == 1});
    if (seed == 1) ExpectRight(outcome, DType::kBf16);
    if (first.empty()) first = outcome.got;
    EXPECT_TRUE(SameBits(first, outcome.got)) << seed;
  }
}

// The plain kernel must run if the exact rows do not have the type of
// activations, or do not begin at a multiple of 16 bytes.
TEST(ExactAttentionTest,
     ExactRowsOfAnotherNumberTypeOrAlignmentUseThePlainKernel) {
  LatentSpec elsewhere = kExact;
  for (auto* side : {&elsewhere.keys, &elsewhere.values}) {
    for (PartSpec& part : *side) part.exact_alignment = 8;
  }
  for (const auto& [spec, dtype, tensor_cores] :
       {std::tuple(kExact, DType::kBf16, true),
        std::tuple(kExact, DType::kF16, false),
        std::tuple(elsewhere, DType::kBf16, false)}) {
    LatentCache cache(spec, {70}, 2);
    cache.Write(0, 0, 70);
    cache.RoundQueries(dtype);
    EmulatedTest test(1);
    const Outcome outcome = Attend(test, {cache, {{0, 67, 3}}, dtype});
    ExpectRight(outcome, dtype);
    EXPECT_EQ(outcome.tensor_cores, tensor_cores);
  }
}

// Overwrites the first number of the exact row that part p has for a slot.
void SpoilRow(LatentCache& cache, size_t p, const PagedAttentionArgs& args,
              const ExactSlots& exact, int64_t slot, uint16_t with) {
  const TestPart& part = cache.parts()[p];
  const int64_t row = slot - args.sequences[0].first_slot;
  const LatentPartArgs& rows = row < 0 ? part.exact.ring : part.exact.fresh;
  char* at =
      SlotAddress(rows, rows.groups[0].codes, 0, std::max<int64_t>(0, row));
  if (row < 0) {
    at += exact.PlaceOfRow(exact.RowOf(slot, 0), cache.side_table(0).data())
              .offset_bytes;
  }
  std::memcpy(at, &with, sizeof(with));
}

// A slot can have both a latent (codes) and an exact row. A non-finite number
// in either must affect only the query rows that read it.
TEST(ExactAttentionTest, NonFiniteNumbersAffectOnlyRowsThatReadThem) {
  constexpr uint16_t kInf = 0x7f80;
  constexpr int64_t kWindow = 6;
  struct Case {
    LatentSpec spec;
    // true: overwrites a number of the latent; false: of the exact row
    bool latent;
  };
  const PartSpec numbers = Numbers({40});
  for (const auto& [spec, latent] : std::vector<Case>{
           {OfHeads(6, 2, kLevels, kLevels), false},
           {OfHeads(6, 2, Codes({32}, {8}), Codes({32}, {8})), false},
           {OfHeads(6, 2, numbers, numbers), false},
           {OfHeads(6, 2, numbers, numbers), true}}) {
    for (const int64_t count : {int64_t{20}, int64_t{9}}) {
      constexpr int64_t kFirst = 506;
      for (const int64_t slot : {kFirst - 2, kFirst + 3}) {
        LatentCache cache(WithExact("", 0, 0, kWindow, spec), {kFirst + 20}, 8);
        cache.Write(0, 0, kFirst + 20);
        cache.RoundQueries(DType::kBf16);
        std::vector<float> rows[2];
        for (const int i : {0, 1}) {
          if (i == 1 && latent) {
            const LatentPartArgs& part = cache.parts()[1].part;
            std::memcpy(
                SlotAddress(part, part.groups[0].codes,
                            cache.table(0)[static_cast<size_t>(slot) / 64],
                            slot % 64),
                &kInf, sizeof(kInf));
          }
          EmulatedTest test(3);
          Ask ask = {cache, {{0, kFirst, count, 6}}, DType::kBf16, 64, false};
          if (i == 1 && !latent) {
            ask.spoil = [&](const PagedAttentionArgs& args) {
              SpoilRow(cache, 1, args, args.value_exact, slot, kInf);
            };
          }
          const Outcome outcome = Attend(test, ask);
          EXPECT_EQ(outcome.prompt_items > 0, count > 16);
          rows[i] = outcome.got;
        }
        const auto width = static_cast<int64_t>(rows[0].size()) / count;
        for (int64_t r = 0; r < count; ++r) {
          const int64_t own = kFirst + r;
          const bool exact = slot > own - kWindow;
          const bool reads = slot <= own && exact == !latent;
          int64_t others = 0;
          for (int64_t c = r * width; c < (r + 1) * width; ++c) {
            const auto at = static_cast<size_t>(c);
            others += SameBits({rows[0][at]}, {rows[1][at]}) ? 0 : 1;
          }
          // If a row reads the spoilt number, each of the three heads of the
          // first group gets one non-finite result.
          EXPECT_EQ(others, reads ? 3 : 0) << slot << " " << own;
        }
      }
    }
  }
}

// If a key is NaN, exactly the rows that read it become NaN.
TEST(ExactAttentionTest, NaNKeysAffectOnlyRowsThatReadThem) {
  constexpr int64_t kWindow = 6;
  constexpr int64_t kFirst = 506;
  constexpr int64_t kSlot = kFirst + 3;
  for (const int64_t count : {int64_t{20}, int64_t{9}}) {
    LatentCache cache(
        WithExact("", 0, kWindow, 0, OfHeads(6, 2, kLevels, kLevels)),
        {kFirst + 20}, 8);
    cache.Write(0, 0, kFirst + 20);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(3);
    const Outcome outcome =
        Attend(test, {cache,
                      {{0, kFirst, count, 6}},
                      DType::kBf16,
                      64,
                      false,
                      [&](const PagedAttentionArgs& args) {
                        SpoilRow(cache, 0, args, args.key_exact, kSlot, 0x7fff);
                      }});
    const auto width = static_cast<int64_t>(outcome.got.size()) / count;
    for (int64_t r = 0; r < count; ++r) {
      const auto row = outcome.got.begin() + r * width;
      const int64_t nans = std::count_if(
          row, row + width, [](float number) { return std::isnan(number); });
      const int64_t own = kFirst + r;
      const bool reads = kSlot <= own && kSlot > own - kWindow;
      // The columns that belong to no head are always NaN. If this row reads
      // the key, the columns of three heads are NaN too.
      EXPECT_EQ(nans, width - 6 * 64 + (reads ? 3 * 64 : 0)) << own;
    }
  }
}

TEST(ExactAttentionTest,
     LeavingOutAnySynchronizingLineOfThePrefillKernelIsDetected) {
  LatentCache cache(
      WithExact("", 0, 40, 50,
                OfHeads(18, 9, Codes({64}, {4}), Codes({64}, {4}))),
      {523}, 6);
  cache.Write(0, 0, 523);
  cache.RoundQueries(DType::kBf16);
  const auto mutants =
      LeaveOutEach("attention_prefill", kSeeds, [&](EmulatedTest& test) {
        return IsRight(Attend(test, {cache, {{0, 503, 20, 6}}, DType::kBf16}),
                       DType::kBf16);
      });
  EXPECT_EQ(mutants.size(), 8u);
  for (const Mutant& mutant : mutants) {
    // Only ThreadSanitizer notices a missing SyncWarp, because the kernel's
    // shuffles also make the lanes wait for each other.
    if (mutant.site.kind == "SyncWarp" && !kThreadSanitizer) continue;
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}

// All rows of a work item share one read of each latent, and tiles of operands
// have no bank conflicts.
TEST(ExactAttentionTest, EachLatentIsReadFromMemoryOnlyOnceForAllRows) {
  for (const PartSpec& part : {Levels(Codes({128}, {4})), Codes({64}, {8})}) {
    LatentCache cache(WithExact("", 4, 28, 28, OfHeads(8, 1, part, part)),
                      {512}, 6);
    cache.Write(0, 0, 512);
    cache.RoundQueries(DType::kBf16);
    const int64_t row_bytes = 2 * part.widths[0];
    for (const int64_t count : {17, 1}) {
      EmulatorOptions options;
      options.count_accesses = true;
      options.shared_bytes = kMuchRoom << 10;
      EmulatedTest test(options);
      Attend(test, {cache, {{0, 512 - count, count}}, DType::kBf16, 64, false});
      const char* const kernel = count > 1 ? "attention_prefill" : "attention";
      std::vector<int64_t> loaded;  // bytes loaded by each source line
      int64_t decoded = 0;
      for (const AccessCount& access : test.emulator().Accesses(kernel)) {
        const bool shared = access.kind.find("shared") != std::string::npos;
        if (shared && access.requests >= 64 && part.bits[0] == 8) {
          EXPECT_EQ(access.passes, access.least_passes)
              << access.kind << " at " << access.file << ":" << access.line;
        }
        if (access.kind != "global load") continue;
        loaded.push_back(access.bytes);
        if (access.file.find("mma_exact-inl.h") == std::string::npos) continue;
        decoded += access.bytes;
      }
      if (count == 1) {
        EXPECT_EQ(decoded, 2 * (4 + 28) * row_bytes);
        continue;
      }
      // The first work item has 16 tokens: it reads the codes of slots 4 to 482
      // and 4 + 43 exact rows. The second has one token: it reads the codes of
      // slots 4 to 483 and 4 + 28 exact rows. A slot has 64 bytes of codes.
      EXPECT_THAT(loaded, Contains(2 * ((479 + 480) * 64 + 79 * row_bytes)));
    }
  }
}

const LatentSpec kPromptNumbers =
    OfType(OfHeads(6, 2, Numbers({40}), Numbers({72})), DType::kBf16);

// One launch has prompts of different lengths, sequences that decode one token,
// and sequences without rows.
TEST(PromptAttentionTest, OneLaunchSupportsSequencesOfDifferentLengths) {
  for (const LatentSpec& spec : {kPromptNumbers, kFour}) {
    LatentCache cache(spec, {40, 70, 22, 3, 600}, 2);
    const std::vector<LatentAsk> asks = {{0, 0, 40},  {1, 69, 1}, {2, 5, 17},
                                         {3, 0, 0},   {3, 0, 3},  {4, 599, 1},
                                         {4, 500, 18}};
    for (const LatentAsk& ask : asks) {
      cache.Write(ask.sequence, 0, ask.start + ask.count);
    }
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(1);
    const Outcome all = Attend(test, {cache, asks, DType::kBf16});
    ExpectRight(all, DType::kBf16);
    // The heads form two units of three or four heads. A work item has up to
    // 128 rows: 42 tokens with three heads, or 32 tokens with four.
    EXPECT_EQ(all.prompt_items,
              2 * (spec.num_heads == 6 ? 1 + 1 + 1 : 2 + 1 + 1));
    std::vector<float> alone;
    for (const LatentAsk& ask : asks) {
      EmulatedTest one(2);
      const Outcome outcome =
          Attend(one, {cache, {ask}, DType::kBf16, 64, false});
      alone.insert(alone.end(), outcome.got.begin(), outcome.got.end());
    }
    EXPECT_TRUE(SameBits(all.got, alone));
  }
}

TEST(PromptAttentionTest, FreedPagesAreNotRead) {
  LatentSpec spec = kFour;
  spec.page_tokens = 16;
  spec.window = 20;
  LatentCache cache(InTiles(spec, 16), {600}, 5);
  cache.Write(0, 0, 600);
  cache.RoundQueries(DType::kBf16);
  LatentAsk ask = {0, 580, 20};
  // 560 slots are released. The first row sees slots 561 to 580.
  ask.dead_pages = 35;
  std::fill_n(cache.table(0).begin(), 35, 1 << 30);
  EmulatedTest test(1);
  const Outcome outcome = Attend(test, {cache, {ask}, DType::kBf16});
  ExpectRight(outcome, DType::kBf16);
  EXPECT_GT(outcome.prompt_items, 0);
}

TEST(PromptAttentionTest, AnyNumberOfQueryHeadsMayShareAKvHead) {
  for (const int64_t heads : {1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 40}) {
    LatentCache cache(OfHeads(2 * heads, 2, Numbers({40}), Codes({96}, {4})),
                      {70}, 3);
    cache.Write(0, 0, 70);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(static_cast<uint64_t>(heads));
    SCOPED_TRACE(heads);
    const Outcome outcome = Attend(test, {cache, {{0, 52, 18}}, DType::kBf16});
    ExpectRight(outcome, DType::kBf16);
    // There are two KV heads. Their query heads are divided into units of at
    // most 16 heads, and a work item has up to 128 rows of a unit.
    const int64_t units = (heads + 15) / 16;
    const int64_t tokens = 128 / std::min<int64_t>(heads, 16);
    EXPECT_EQ(outcome.prompt_items, 2 * units * ((18 + tokens - 1) / tokens));
  }
}

TEST(PromptAttentionTest,
     PageTileAndGranuleSizesDoNotChangeTheBitsOfTheOutput) {
  for (const LatentSpec& from : {kPromptNumbers, kFour}) {
    std::vector<float> first;
    for (const auto& [page_tokens, tile_slots, granule] :
         std::vector<std::array<int64_t, 3>>{{64, 64, 16},
                                             {128, 64, 16},
                                             {192, 64, 16},
                                             {5, 5, 16},
                                             {16, 8, 16},
                                             {32, 32, 0},
                                             {128, 16, 0}}) {
      LatentSpec spec = InTiles(from, tile_slots, granule);
      spec.page_tokens = page_tokens;
      LatentCache cache(spec, {150}, 3);
      cache.Write(0, 0, 150);
      cache.RoundQueries(DType::kBf16);
      EmulatedTest test(1);
      const Outcome outcome =
          Attend(test, {cache, {{0, 110, 40}}, DType::kBf16});
      ExpectRight(outcome, DType::kBf16);
      EXPECT_GT(outcome.prompt_items, 0);
      if (first.empty()) first = outcome.got;
      EXPECT_TRUE(SameBits(first, outcome.got))
          << page_tokens << " " << tile_slots << " " << granule;
    }
  }
}

// An infinite value at one token of a prompt must not affect the results of
// earlier tokens.
TEST(PromptAttentionTest, NonFiniteNumbersAffectOnlyRowsThatSeeThem) {
  LatentCache cache(kPromptNumbers, {528}, 8);
  cache.Write(0, 0, 528);
  cache.RoundQueries(DType::kBf16);
  std::vector<float> rows[2];
  for (const int i : {0, 1}) {
    if (i == 1) {
      const LatentPartArgs& part = cache.parts()[1].part;
      char* const at = SlotAddress(part, part.groups[0].codes,
                                   cache.table(0)[516 / 64], 516 % 64);
      const uint16_t infinity = 0x7f80;
      std::memcpy(at, &infinity, sizeof(infinity));
    }
    EmulatedTest test(3);
    const Outcome outcome =
        Attend(test, {cache, {{0, 500, 28}}, DType::kBf16, 64, false});
    EXPECT_GT(outcome.prompt_items, 0);
    rows[i] = outcome.got;
  }
  const auto seen = static_cast<int64_t>(rows[0].size()) / 28 * 16;
  EXPECT_TRUE(SameBits({rows[0].begin(), rows[0].begin() + seen},
                       {rows[1].begin(), rows[1].begin() + seen}));
  // 12 tokens see the infinite value. In each of them, the three heads of the
  // first group get one non-finite result.
  int64_t others = 0;
  for (size_t i = 0; i < rows[0].size(); ++i) {
    others += std::isfinite(rows[0][i]) && !std::isfinite(rows[1][i]);
  }
  EXPECT_EQ(others, 3 * 12);
}

TEST(PromptAttentionTest, TheOutputOfARowThatSeesNoSlotIsZero) {
  LatentSpec spec = kFour;
  spec.page_tokens = 16;
  LatentCache cache(InTiles(spec, 16), {1040}, 5);
  cache.Write(0, 0, 1040);
  cache.RoundQueries(DType::kBf16);
  // All pages of the 1040 slots are released, so the rows see no slot.
  LatentAsk ask = {0, 1020, 20};
  ask.dead_pages = 65;
  EmulatedTest test(1);
  const Outcome outcome = Attend(test, {cache, {ask}, DType::kBf16});
  ExpectRight(outcome, DType::kBf16);
  EXPECT_GT(outcome.prompt_items, 0);
}

TEST(PromptAttentionTest,
     TheDecodeKernelComputesPromptsThatDoNotFitInSharedMemory) {
  LatentCache cache(kFour, {40}, 2);
  cache.Write(0, 0, 40);
  cache.RoundQueries(DType::kBf16);
  std::vector<float> first;
  // The prefill kernel needs 41744 bytes of shared memory, and 148 bytes more
  // for each row. A work item of 128 rows (32 tokens) needs 60688 bytes. With
  // less memory, work items have 64 rows (16 tokens), for which the kernel
  // needs 51216 bytes. With less than that, it cannot run.
  for (const auto& [bytes, items] :
       {std::pair(60688, 4), std::pair(60687, 6), std::pair(51216, 6),
        std::pair(51215, 0)}) {
    EmulatedTest test(EmulatorOptions{.seed = 1, .shared_bytes = bytes});
    const Outcome outcome = Attend(test, {cache, {{0, 0, 40}}, DType::kBf16});
    ExpectRight(outcome, DType::kBf16);
    if (OnGpu()) continue;
    EXPECT_EQ(outcome.prompt_items, items) << bytes;
    if (first.empty()) first = outcome.got;
    EXPECT_TRUE(items == 0 || SameBits(first, outcome.got)) << bytes;
  }
}

TEST(PromptAttentionTest,
     TheDecodeKernelComputesPromptsWhoseQueriesAreNotAligned) {
  LatentCache cache(kFour, {40}, 2);
  cache.Write(0, 0, 40);
  cache.RoundQueries(DType::kBf16);
  const std::vector<LatentAsk> asks = {{0, 0, 40}};
  EmulatedTest as_rows(1);
  const Outcome rows =
      Attend(as_rows, {cache, asks, DType::kBf16, 64, true, nullptr,
                       /*prompts_as_rows=*/true});
  cache.Launch(asks, [&](const PagedAttentionArgs& args) {
    for (const int64_t numbers : {1, 8}) {
      EmulatedTest test(1);
      DeviceLaunch launch(test, cache, args, asks, DType::kBf16);
      launch.MoveQueries(numbers);
      const std::vector<float> got = launch.Run();
      EXPECT_EQ(launch.Items().back().first_prompt > 0, numbers == 8);
      if (numbers == 1) {
        EXPECT_TRUE(SameBits(got, rows.got));
      }
    }
  });
}

TEST(PromptAttentionTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  for (const LatentSpec& spec : {kPromptNumbers, kFour}) {
    LatentCache cache(spec, {530, 70}, 6);
    cache.Write(0, 0, 530);
    cache.Write(1, 0, 70);
    cache.RoundQueries(DType::kBf16);
    std::vector<float> first;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      const Outcome outcome = Attend(
          test,
          {cache, {{0, 503, 20, 6}, {1, 50, 20}}, DType::kBf16, 64, seed == 1});
      if (seed == 1) ExpectRight(outcome, DType::kBf16);
      if (first.empty()) first = outcome.got;
      EXPECT_TRUE(SameBits(first, outcome.got)) << seed;
    }
  }
}

// Here, the keys have two chunks. There are more work items than CTAs.
TEST(PromptAttentionTest, LeavingOutAnySynchronizingLineIsDetected) {
  LatentCache cache(OfHeads(18, 9, Codes({256}, {4}), Codes({64}, {4})), {523},
                    6);
  cache.Write(0, 0, 523);
  cache.RoundQueries(DType::kBf16);
  const auto mutants =
      LeaveOutEach("attention_prefill", kSeeds, [&](EmulatedTest& test) {
        return IsRight(Attend(test, {cache, {{0, 503, 20, 6}}, DType::kBf16}),
                       DType::kBf16);
      });
  EXPECT_EQ(mutants.size(), 6u);
  for (const Mutant& mutant : mutants) {
    // Only ThreadSanitizer notices a missing SyncWarp, because the kernel's
    // shuffles also make the lanes wait for each other.
    if (mutant.site.kind == "SyncWarp" && !kThreadSanitizer) continue;
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}

// A work item reads each latent once, and tiles of operands have no bank
// conflicts.
TEST(PromptAttentionTest, EachLatentIsReadOnceWithoutBankConflicts) {
  for (const auto& [spec, slot_bytes] :
       std::vector<std::pair<LatentSpec, int64_t>>{
           {OfHeads(8, 1, Codes({128}, {4}), Codes({128}, {4})), 2 * 64},
           {OfHeads(8, 1, Codes({64}, {8}), Codes({64}, {8})), 2 * 64},
           {OfType(OfHeads(8, 1, Numbers({128}), Numbers({64})), DType::kBf16),
            256 + 128}}) {
    LatentCache cache(spec, {512}, 6);
    cache.Write(0, 0, 512);
    cache.RoundQueries(DType::kBf16);
    EmulatorOptions options;
    options.count_accesses = true;
    options.shared_bytes = kMuchRoom << 10;
    EmulatedTest test(options);
    const Outcome outcome =
        Attend(test, {cache, {{0, 495, 17}}, DType::kBf16, 64, false});
    const std::vector<AccessCount> counts =
        test.emulator().Accesses("attention_prefill");
    EXPECT_EQ(outcome.prompt_items, 2);  // two work items of 16 tokens each
    std::vector<int64_t> loaded;
    for (const AccessCount& count : counts) {
      if (count.kind == "global load") loaded.push_back(count.bytes);
      // Source lines with few requests are not checked, because they access
      // only one row.
      if (count.requests < 200) continue;
      if (count.kind.find("shared") == std::string::npos) continue;
      EXPECT_EQ(count.passes, count.least_passes)
          << count.kind << " at " << count.file << ":" << count.line;
    }
    // One source line must load all keys and values: the slots of both work
    // items, each slot once per item.
    EXPECT_THAT(loaded, Contains((511 + 512) * slot_bytes));
  }
}

// ---- random shapes

class RandomShape {
 public:
  explicit RandomShape(uint64_t seed) : engine_(seed) {
    const int64_t kv_heads = Pick({1, 1, 2, 3});
    spec = OfHeads(kv_heads * UpTo(17), kv_heads, Part(), Part());
    if (UpTo(3) == 1) spec.keys.push_back(Part());
    if (UpTo(3) == 1) spec.values.push_back(Part());
    spec.page_tokens = Pick({64, 64, 64, 128, 16, 5, 48, 192});
    spec = InTiles(spec, spec.page_tokens % 64 == 0 ? Pick({64, 64, 0, 16}) : 0,
                   Pick({16, 16, 16, 0}));
    if (UpTo(4) == 1) spec.window = Pick({1, 2, 7, 50, 64, 70, 130, 513});
    spec.causal = UpTo(5) > 1;
    if (UpTo(2) == 1) {
      spec = WithExact("", Pick({0, 1, 4, 63, 64, 65, 130, 600}),
                       Pick({0, 0, 1, 2, 28, 64, 65, 100, 520}),
                       Pick({0, 1, 2, 28, 64, 65, 100, 520}), spec);
      spec.evicted = Pick({0, 0, 1, 1001});
    }
    dtype = UpTo(2) == 1 ? DType::kBf16 : DType::kF16;
    spec = ExactOfType(spec, dtype);
    tokens = Pick({1, 3, 17, 64, 65, 127, 128, 513, 520, 577, 1030});
    rows = std::min(tokens, UpTo(16));
  }

  LatentSpec spec;
  DType dtype;
  int64_t tokens;
  // number of tokens, at the end of the sequence, that have queries
  int64_t rows;

 private:
  int64_t UpTo(int64_t most) {
    return 1 + static_cast<int64_t>(engine_() % static_cast<uint64_t>(most));
  }
  int64_t Pick(std::initializer_list<int64_t> list) {
    return list.begin()[UpTo(static_cast<int64_t>(list.size())) - 1];
  }
  PartSpec Part() {
    switch (UpTo(6)) {
      case 1:
        return Numbers({8 * UpTo(20)});
      case 2:
        return Codes({32 * UpTo(5)}, {4});
      case 3:
        return Codes({64 * UpTo(3)}, {4}, 32);
      case 4:
        return Codes({16 * UpTo(9)}, {8});
      case 5:
        return Codes({32 * UpTo(5)}, {8}, 16);
      default:
        return Levels(Codes({32 * UpTo(5)}, {4}));
    }
  }

  std::mt19937_64 engine_;
};

TEST(AttentionCudaTest, RowsOfRandomShapesDoNotDependOnOtherRows) {
  for (uint64_t seed = 1; seed <= 2 * kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const RandomShape shape(seed);
    const LatentSpec& spec = shape.spec;
    const DType dtype = shape.dtype;
    const int64_t tokens = shape.tokens;
    const int64_t rows = shape.rows;
    LatentCache cache(spec, {tokens, 70}, static_cast<uint32_t>(seed));
    cache.Write(0, 0, tokens);
    cache.Write(1, 0, 70);
    cache.RoundQueries(dtype);
    std::vector<float> all[2];
    for (const bool splits : {false, true}) {
      EmulatedTest test(2 * seed + splits);
      const Outcome outcome =
          Attend(test, {cache,
                        {{0, tokens - rows, rows}, {1, 69, 1}},
                        dtype,
                        splits ? 64 : 0,
                        !splits});
      // With so many cases, the values of some rows nearly cancel, so only the
      // error of all numbers together is checked.
      if (!splits) {
        EXPECT_LE(outcome.error, ToleranceOf(dtype));
      }
      all[splits] = outcome.got;
    }
    EXPECT_TRUE(SameBits(all[0], all[1]));
    if (!spec.causal) continue;
    std::vector<float> alone;
    for (int64_t r = 0; r <= rows; ++r) {
      const LatentAsk ask =
          r < rows ? LatentAsk{0, tokens - rows + r, 1} : LatentAsk{1, 69, 1};
      EmulatedTest test(static_cast<uint64_t>(r));
      const std::vector<float> row =
          Attend(test, {cache, {ask}, dtype, 64, false}).got;
      alone.insert(alone.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(SameBits(all[0], alone));
  }
}

// Prompts are cut at random places into chunks that the prefill kernel
// supports.
TEST(PromptAttentionTest,
     ChunksOfAPromptOfRandomShapeGiveTheBitsOfTheWholePrompt) {
  for (uint64_t seed = 1; seed <= (kSeeds + 1) / 2; ++seed) {
    SCOPED_TRACE(seed);
    const RandomShape shape(1000 + seed);
    const DType dtype = shape.dtype;
    std::mt19937_64 engine(seed);
    const auto up_to = [&](int64_t most) {
      return 1 + static_cast<int64_t>(engine() % static_cast<uint64_t>(most));
    };
    constexpr int64_t kLeast = kDeviceSplitRows + 1;
    const int64_t rows = kLeast - 1 + up_to(130);
    const int64_t first = std::max<int64_t>(0, shape.tokens - rows);
    const int64_t tokens = first + rows;
    LatentCache cache(shape.spec, {tokens}, static_cast<uint32_t>(seed));
    cache.Write(0, 0, tokens);
    cache.RoundQueries(dtype);
    EmulatedTest test(WithShared(seed, kMuchRoom));
    const Outcome whole = Attend(test, {cache, {{0, first, rows}}, dtype});
    EXPECT_LE(whole.error, ToleranceOf(dtype));
    // Without a causal mask, chunks see other slots than the whole prompt.
    if (!shape.spec.causal || whole.prompt_items == 0) continue;
    std::vector<float> in_chunks;
    for (int64_t t = first; t < tokens;) {
      int64_t count = kLeast - 1 + up_to(60);
      if (tokens - t - count < kLeast) count = tokens - t;
      EmulatedTest other(
          WithShared(seed + static_cast<uint64_t>(t), kMuchRoom));
      const Outcome part =
          Attend(other, {cache, {{0, t, count}}, dtype, 64, false});
      in_chunks.insert(in_chunks.end(), part.got.begin(), part.got.end());
      t += count;
    }
    EXPECT_TRUE(SameBits(whole.got, in_chunks));
  }
}

// If the memory for partial results does not suffice for all contexts, the
// longest ones are split first.
TEST(AttentionCudaTest, TheLongestContextsAreTheFirstThatAreSplit) {
  LatentSpec spec = OfHeads(2, 2, Codes({8}, {4}), Codes({8}, {4}));
  LatentCache cache(spec, {600, 2100, 5}, 4);
  for (const int64_t s : {0, 1, 2})
    cache.Write(s, 0, s == 0 ? 600 : s == 1 ? 2100 : 5);
  std::vector<float> first;
  // The first two contexts have 2 and 5 splits, and the third one has 1.
  for (const auto& [room, split] :
       std::vector<std::pair<int64_t, std::pair<bool, bool>>>{
           {0, {false, false}},
           {4, {false, false}},
           {5, {false, true}},
           {6, {false, true}},
           {7, {true, true}}}) {
    EmulatedTest test(static_cast<uint64_t>(room));
    const Outcome outcome = Attend(
        test,
        {cache, {{0, 599, 1}, {1, 2099, 1}, {2, 4, 1}}, DType::kF32, room});
    ExpectRight(outcome);
    EXPECT_EQ(outcome.items[0].first_partial >= 0, split.first) << room;
    EXPECT_EQ(outcome.items[1].first_partial >= 0, split.second) << room;
    EXPECT_LT(outcome.items[2].first_partial, 0) << room;
    if (first.empty()) first = outcome.got;
    EXPECT_TRUE(SameBits(first, outcome.got)) << room;
  }
}

// If contexts are equally long and the memory for partial results does not
// suffice, the first ones are split.
TEST(AttentionCudaTest, AsManyEqualContextsAreSplitAmongCtasAsMemoryAllows) {
  constexpr int64_t kEqual = 17;
  LatentSpec spec = OfHeads(2, 2, Codes({8}, {4}), Codes({8}, {4}));
  std::vector<int64_t> lengths(kEqual, 513);
  lengths.push_back(2100);
  LatentCache cache(spec, lengths, 4);
  std::vector<LatentAsk> asks;
  for (int64_t s = 0; s <= kEqual; ++s) {
    const int64_t length = lengths[static_cast<size_t>(s)];
    cache.Write(s, 0, length);
    asks.push_back({s, length - 1, 1});
  }
  std::vector<float> first;
  // The longest context has five splits, and each of the others has two.
  for (const int64_t room : {4, 5, 20, 38, 39}) {
    EmulatedTest test(static_cast<uint64_t>(room));
    const Outcome outcome =
        Attend(test, {cache, asks, DType::kF32, room, first.empty()});
    if (first.empty()) {
      ExpectRight(outcome);
      first = outcome.got;
    }
    int64_t split = 0;
    for (size_t s = 0; s < static_cast<size_t>(kEqual); ++s) {
      const bool is = outcome.items[s].first_partial >= 0;
      EXPECT_EQ(is, room >= 5 && 2 * (split + 1) <= room - 5);
      split += is ? 1 : 0;
    }
    EXPECT_EQ(outcome.items[kEqual].first_partial >= 0, room >= 5);
    EXPECT_TRUE(SameBits(first, outcome.got)) << room;
  }
}

TEST(AttentionCudaTest, PageTileAndGranuleSizesDoNotChangeTheBitsOfTheOutput) {
  const LatentSpec two_planes =
      OfHeads(4, 2, Codes({128}, {3}), Codes({128}, {6}));
  for (const auto& [from, dtype] :
       std::vector<std::pair<LatentSpec, DType>>{{kDense, DType::kF32},
                                                 {kDense, DType::kBf16},
                                                 {kFour, DType::kF32},
                                                 {two_planes, DType::kBf16},
                                                 {kFour, DType::kBf16}}) {
    std::vector<float> first;
    for (const auto& [page_tokens, tile_slots, granule] :
         std::vector<std::array<int64_t, 3>>{{64, 64, 16},
                                             {128, 64, 16},
                                             {5, 5, 16},
                                             {16, 8, 16},
                                             {32, 32, 0},
                                             {128, 16, 0}}) {
      LatentSpec spec = InTiles(from, tile_slots, granule);
      spec.page_tokens = page_tokens;
      LatentCache cache(spec, {150}, 3);
      cache.Write(0, 0, 150);
      cache.RoundQueries(dtype);
      EmulatedTest test(1);
      const Outcome outcome = Attend(test, {cache, {{0, 141, 9}}, dtype});
      ExpectRightByEither(outcome, dtype);
      if (first.empty()) first = outcome.got;
      EXPECT_TRUE(SameBits(first, outcome.got))
          << page_tokens << " " << tile_slots << " " << granule;
    }
  }
}

// The tensor-core kernel stores the index of a tile, and the index of a slot in
// its tile, in 16 bits each.
TEST(AttentionCudaTest, PagesOfMoreThan65536SlotsAreReadCorrectly) {
  constexpr int64_t kPage = 65600;
  LatentSpec spec = OfHeads(1, 1, Codes({32}, {4}), Codes({32}, {4}));
  spec.page_tokens = kPage;
  spec.window = 4;
  spec.asked_tokens = 1;
  for (const auto& [tile_slots, tensor_cores] :
       {std::pair(kPage, false), std::pair(int64_t{1}, false),
        std::pair(kPage / 2, true)}) {
    LatentCache cache(InTiles(spec, tile_slots), {kPage - 10}, 3);
    cache.Write(0, kPage - 14, kPage - 10);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(1);
    const Outcome outcome =
        Attend(test, {cache, {{0, kPage - 11, 1}}, DType::kBf16});
    ExpectRight(outcome, DType::kBf16);
    EXPECT_EQ(outcome.tensor_cores, tensor_cores) << tile_slots;
  }
}

// The contexts end at the highest slot number that is supported, so slot
// numbers need 32 bits.
TEST(AttentionCudaTest, SlotNumbersUpToTheHighestAreSupported) {
  constexpr int64_t kTokens = 1023;
  constexpr int64_t kBefore = kAttentionMostSlots - kTokens;
  static_assert(kBefore % kAttentionSplitSlots == 0);
  LatentSpec sliding = kDense;
  sliding.window = 70;
  // The rings have 128 and 64 rows. The number of slots before the context is a
  // multiple of both.
  const LatentSpec exact = WithExact("", 0, 129, 65, kFour);
  for (const LatentSpec& from : {kDense, sliding, exact}) {
    for (const DType dtype : kBothKernels) {
      for (const int64_t rows : {40, 9}) {
        LatentCache cache(OfType(from, dtype), {kTokens}, 3);
        cache.Write(0, 0, kTokens);
        cache.RoundQueries(dtype);
        Ask ask = {cache, {{0, kTokens - rows, rows, 8}}, dtype, 64, false};
        EmulatedTest test(1);
        const Outcome first = Attend(test, ask);
        ask.slots_before = kBefore;
        EmulatedTest other(1);
        const Outcome last = Attend(other, ask);
        EXPECT_EQ(last.prompt_items > 0, dtype != DType::kF32 && rows > 16);
        EXPECT_TRUE(SameBits(first.got, last.got)) << rows;
      }
    }
  }
}

TEST(AttentionCudaTest, FreedPagesAreNotRead) {
  LatentSpec spec = kDense;
  spec.page_tokens = 16;
  spec.window = 20;
  LatentAsk ask = {0, 595, 5};
  // 576 slots are released. The first row sees slots 576 to 595.
  ask.dead_pages = 36;
  for (const DType dtype : kBothKernels) {
    LatentCache cache(InTiles(spec, 16), {600}, 5);
    cache.Write(0, 0, 600);
    cache.RoundQueries(dtype);
    std::fill_n(cache.table(0).begin(), 36, 1 << 30);
    EmulatedTest test(1);
    ExpectRightByEither(Attend(test, {cache, {ask}, dtype}), dtype);
  }
}

TEST(AttentionCudaTest, TheOutputOfARowThatSeesNoSlotIsZero) {
  LatentSpec spec = kDense;
  spec.page_tokens = 16;
  // All pages of the 1040 slots are released, so the rows see no slot.
  LatentAsk ask = {0, 1030, 10};
  ask.dead_pages = 65;
  for (const DType dtype : kBothKernels) {
    LatentCache cache(InTiles(spec, 16), {1040, 7}, 5);
    cache.Write(0, 0, 1040);
    cache.Write(1, 0, 7);
    cache.RoundQueries(dtype);
    EmulatedTest test(1);
    ExpectRightByEither(
        Attend(test, {cache, {ask, {1, 0, 0}, {1, 6, 1}}, dtype}), dtype);
    EmulatedTest none(1);
    EXPECT_EQ(Attend(none, {cache, {}, dtype}).got.size(), 0u);
  }
}

TEST(AttentionCudaTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  for (const DType dtype : kBothKernels) {
    LatentCache cache(kFour, {600, 70}, 6);
    cache.Write(0, 0, 600);
    cache.Write(1, 0, 70);
    cache.RoundQueries(dtype);
    std::vector<float> first;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      const Outcome outcome =
          Attend(test, {cache, {{0, 599, 1}, {1, 50, 20}}, dtype});
      ExpectRightByEither(outcome, dtype);
      if (first.empty()) first = outcome.got;
      EXPECT_TRUE(SameBits(first, outcome.got)) << seed;
    }
  }
}

// Overwrites the first bytes of part `p` in a slot of sequence 0: those of its
// range (scale, minimum) if `params` is set, otherwise of its codes or numbers.
template <typename T>
void Spoil(LatentCache& cache, size_t p, int64_t slot, bool params, T with) {
  const LatentPartArgs& part = cache.parts()[p].part;
  const int64_t page_tokens = cache.Params().page_tokens;
  char* const at =
      SlotAddress(part, params ? part.groups[0].params : part.groups[0].codes,
                  cache.table(0)[static_cast<size_t>(slot / page_tokens)],
                  slot % page_tokens);
  std::memcpy(at, &with, sizeof(with));
}
void SpoilNumber(LatentCache& cache, size_t p, int64_t slot, float with) {
  VisitDType(cache.parts()[p].part.dtype, [&](auto type) {
    Spoil(cache, p, slot, /*params=*/false, FromFloat<decltype(type)>(with));
  });
}
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Codes of keys and values on tensor cores.
const LatentSpec kCodeSpecs[] = {
    OfHeads(8, 2, Codes({64}, {2}), Codes({64}, {3})),
    OfHeads(8, 2, Codes({64}, {5}), Codes({64}, {6})),
    kFour,
    OfHeads(8, 2, Codes({64}, {8}), Codes({64}, {8})),
    OfHeads(8, 2, Levels(Codes({64}, {4})), Levels(Codes({64}, {4}))),
    OfHeads(8, 2, Levels(Codes({64}, {3})), Levels(Codes({128}, {3})))};

// One query channel of one head is much larger than the others. The head's
// result must stay within the tolerance, which allows for the rounding of its
// other channels. No bit of another head may change.
TEST(AttentionCudaTest, AnOutlierInAQueryDoesNotChangeOtherHeads) {
  for (const LatentSpec& spec : kCodeSpecs) {
    for (const float factor : {-40.0f, 3e4f, 0.0f}) {
      std::vector<float> got[2];
      int64_t head_column = 0;
      int64_t width = 0;
      for (const int i : {0, 1}) {
        LatentCache cache(spec, {70}, 4);
        cache.Write(0, 0, 70);
        const TestPart& keys = cache.parts()[0];
        if (i == 1) cache.ScaleQueries(keys.columns[2] + 5, factor);
        cache.RoundQueries(DType::kBf16);
        EmulatedTest test(5);
        const LatentAsk ask = {0, 69, 1};
        const Outcome outcome =
            Attend(test, {cache, {ask}, DType::kBf16, 64, factor < 1e4f});
        double deviation = 0.0;
        cache.Expected(ask, &deviation);
        EXPECT_LE(outcome.row_error,
                  2.0 * ToleranceOf(DType::kBf16) + 4.0 * deviation)
            << factor;
        got[i] = outcome.got;
        head_column = cache.parts()[1].columns[2];
        width = cache.parts()[1].WidthOf(0);
      }
      ASSERT_EQ(got[0].size(), got[1].size());
      for (int64_t c = 0; c < static_cast<int64_t>(got[0].size()); ++c) {
        const auto at = static_cast<size_t>(c);
        const bool of_head = c >= head_column && c < head_column + width;
        EXPECT_TRUE(std::isfinite(got[1][at]) || !std::isfinite(got[0][at]));
        if (of_head) continue;
        EXPECT_TRUE(SameBits({got[0][at]}, {got[1][at]})) << c;
      }
    }
  }
}

// All slots have the same codes: 0, the largest code, or others.
TEST(AttentionCudaTest, EqualCodesGiveACorrectResult) {
  for (const LatentSpec& spec : kCodeSpecs) {
    for (const int codes : {0x00, 0x77, 0x88, 0xff}) {
      LatentCache cache(spec, {530}, 4);
      cache.Write(0, 0, 530);
      for (int64_t slot = 0; slot < 530; ++slot) {
        for (const size_t p : {0, 1}) {
          const LatentPartArgs& part = cache.parts()[p].part;
          for (int64_t g = 0; g < part.num_groups; ++g) {
            ForSlotBytes(part, part.groups[g].codes,
                         cache.table(0)[static_cast<size_t>(slot / 64)],
                         slot % 64, CodesBytes(part, part.groups[g]),
                         [codes](char* at, int64_t /*first*/, int64_t bytes) {
                           std::memset(at, codes, static_cast<size_t>(bytes));
                         });
          }
        }
      }
      cache.RoundQueries(DType::kBf16);
      EmulatedTest test(static_cast<uint64_t>(codes));
      const Outcome outcome =
          Attend(test, {cache, {{0, 528, 2}}, DType::kBf16});
      EXPECT_TRUE(outcome.tensor_cores);
      ExpectRight(outcome, DType::kBf16);
    }
  }
}

// Each number of a set becomes a unit times an integer of two signed bytes. The
// error is below 1/32000 of the largest number.
TEST(AttentionCudaTest, DigitsAreWithinTheirErrorBound) {
  std::minstd_rand engine(7);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (int i = 0; i < 3000; ++i) {
    float largest = std::ldexp(1.0f + 0.5f * (1.0f + uniform(engine)),
                               static_cast<int>(engine() % 200) - 90);
    // The largest numbers below a power of 2 are the hardest.
    if (i % 3 == 0) largest = std::nextafter(std::ldexp(1.0f, i % 50), 0.0f);
    if (i % 3 == 1) largest = std::ldexp(1.0f, i % 50);
    const auto unit = emulated::DigitUnit::Of(std::bit_cast<uint32_t>(largest));
    for (const float x : {largest, -largest, largest * uniform(engine), 0.0f}) {
      const uint32_t raw = emulated::RawDigits(x, unit.inverse);
      const auto high = static_cast<int8_t>(raw >> 8);
      const auto low = static_cast<int8_t>(raw ^ 0x80u);
      const int32_t integer = emulated::JoinDigits(high, low);
      EXPECT_LE(std::abs(integer), emulated::kMostDigits) << largest;
      EXPECT_LE(std::abs(static_cast<double>(x) -
                         static_cast<double>(unit.unit) * integer),
                static_cast<double>(largest) / 32000)
          << x << " " << largest;
    }
  }
  for (const float largest : {kInfinity, kNaN}) {
    EXPECT_TRUE(std::isnan(
        emulated::DigitUnit::Of(std::bit_cast<uint32_t>(largest)).unit));
  }
}

// The results of five tokens. Element 0 has the results with the original
// cache. Element 1 has those with a cache in which the slot of the third token
// was overwritten ("spoilt").
struct Spoilt {
  // the tokens before the spoilt slot, which do not see it
  std::vector<float> before[2];
  std::vector<float> after[2];
};
template <typename SpoilSlot>
Spoilt AttendSpoilt(LatentCache& cache, DType dtype,
                    const SpoilSlot& spoil_slot) {
  constexpr int64_t kFirst = 510;
  cache.Write(0, 0, kFirst + 5);
  cache.RoundQueries(dtype);
  Spoilt rows;
  for (const int i : {0, 1}) {
    if (i == 1) spoil_slot(kFirst + 2);
    EmulatedTest test(3);
    const std::vector<float> got =
        Attend(test, {cache, {{0, kFirst, 5}}, dtype, 64, /*judged=*/false})
            .got;
    const auto border = got.begin() + static_cast<int64_t>(got.size()) / 5 * 2;
    rows.before[i].assign(got.begin(), border);
    rows.after[i].assign(border, got.end());
  }
  return rows;
}

TEST(AttentionCudaTest, NonFiniteNumbersAffectOnlyRowsThatSeeThem) {
  for (const int64_t window : {0, 2}) {
    for (const DType dtype : kDTypes) {
      LatentSpec spec = OfHeads(8, 2, Numbers({40}), Numbers({72}));
      spec.keys[0].dtype = spec.values[0].dtype = dtype;
      spec.window = window;
      LatentCache cache(spec, {515}, 8);
      const Spoilt rows = AttendSpoilt(cache, dtype, [&](int64_t slot) {
        SpoilNumber(cache, 1, slot, kInfinity);
      });
      EXPECT_TRUE(SameBits(rows.before[0], rows.before[1]));
      // Two or three tokens see the spoilt slot. In each of them, the four
      // heads of the first group get one non-finite result.
      int64_t others = 0;
      for (size_t i = 0; i < rows.after[0].size(); ++i) {
        others += SameBits({rows.after[0][i]}, {rows.after[1][i]}) ? 0 : 1;
      }
      EXPECT_EQ(others, 4 * (window > 0 ? 2 : 3));
    }
  }
}

TEST(AttentionCudaTest, ValuesDecodedFromCodesStayFiniteForEveryScale) {
  std::vector<PartSpec> parts = {
      Codes({64}, {4}), Codes({64}, {8}),         Codes({64}, {3}),
      Codes({64}, {6}), Levels(Codes({64}, {4})), Levels(Codes({64}, {3}))};
  for (const PartSpec& part : parts) {
    for (const DType dtype : kDTypes) {
      LatentSpec spec = OfHeads(8, 2, Numbers({40}), part);
      spec.keys[0].dtype = dtype;
      LatentCache cache(spec, {515}, 8);
      for (const uint32_t minimum : {0x7bffu, 0xfbffu}) {
        const Spoilt rows = AttendSpoilt(cache, dtype, [&](int64_t slot) {
          // The scale is the largest float16. The minimum is the largest or the
          // most negative float16.
          Spoil(cache, 1, slot, /*params=*/true, minimum << 16 | 0x7bffu);
        });
        EXPECT_TRUE(SameBits(rows.before[0], rows.before[1]));
        EXPECT_FALSE(SameBits(rows.after[0], rows.after[1]));
        for (size_t i = 0; i < rows.after[0].size(); ++i) {
          // Columns that belong to no head are NaN in both results.
          EXPECT_EQ(std::isfinite(rows.after[1][i]),
                    std::isfinite(rows.after[0][i]));
        }
      }
    }
  }
}

// The values of one slot get the largest float16 as their scale. Both kernels
// limit such a scale, so that no decoded value is infinite.
TEST(PromptAttentionTest, ThePrefillKernelLimitsScalesAsTheDecodeKernelDoes) {
  constexpr DType kType = DType::kBf16;
  for (const PartSpec& part :
       {Codes({64}, {4}), Codes({64}, {8}), Levels(Codes({64}, {4}))}) {
    LatentCache cache(OfType(OfHeads(8, 2, Numbers({40}), part), kType), {528},
                      8);
    cache.Write(0, 0, 528);
    cache.RoundQueries(kType);
    for (const uint32_t minimum : {0x7bffu, 0xfbffu, 0u}) {
      Spoil(cache, 1, 515, /*params=*/true, minimum << 16 | 0x7bffu);
      EmulatedTest test(3);
      const Outcome prompt =
          Attend(test, {cache, {{0, 508, 20, 6}}, kType, 64, false});
      EXPECT_GT(prompt.prompt_items, 0);
      EmulatedTest other(4);
      const Outcome decoded = Attend(
          other, {cache, {{0, 508, 10, 6}, {0, 518, 10, 6}}, kType, 64, false});
      const std::vector<double> want(decoded.got.begin(), decoded.got.end());
      EXPECT_LE(NormError(want, prompt.got), ToleranceOf(kType));
    }
  }
}

// Overwrites the key of one slot. Earlier rows do not see this slot and must
// not change.
TEST(PromptAttentionTest, NonFiniteKeysAffectOnlyRowsThatSeeThem) {
  constexpr int64_t kFirst = 500;
  constexpr int64_t kCount = 28;
  constexpr int64_t kSlot = kFirst + 5;
  for (const PartSpec& value : {Numbers({24}), Codes({32}, {4})}) {
    for (const float key : {kNaN, kInfinity}) {
      LatentCache cache(OfHeads(16, 1, Numbers({40}), value), {kFirst + kCount},
                        9);
      cache.Write(0, 0, kFirst + kCount);
      cache.RoundQueries(DType::kBf16);
      std::vector<float> rows[2];
      for (const int i : {0, 1}) {
        if (i == 1) SpoilNumber(cache, 0, kSlot, key);
        EmulatedTest test(1);
        const Outcome outcome = Attend(
            test, {cache, {{0, kFirst, kCount, 6}}, DType::kBf16, 64, false});
        EXPECT_GT(outcome.prompt_items, 0);
        rows[i] = outcome.got;
      }
      const size_t seen = rows[0].size() / kCount * (kSlot - kFirst);
      int64_t nans = 0;
      for (size_t i = 0; i < rows[0].size(); ++i) {
        // Columns that belong to no head are NaN from the start.
        const bool spoilt = !std::isnan(rows[0][i]) && std::isnan(rows[1][i]);
        nans += spoilt;
        EXPECT_TRUE(i >= seen || SameBits({rows[0][i]}, {rows[1][i]})) << i;
      }
      // An infinite key leaves some rows finite: if its score is -inf, its
      // weight is 0.
      const int64_t all = (kCount - (kSlot - kFirst)) * 16 * value.widths[0];
      EXPECT_EQ(nans == all, std::isnan(key));
      EXPECT_GT(nans, 0);
      EXPECT_EQ(nans % value.widths[0], 0);
    }
  }
}

// Depending on their scale, the scores of a row differ very much or hardly at
// all. In both cases the prefill kernel must agree with the decoding kernel.
TEST(PromptAttentionTest, ScoreScalesOfAnySizeAreSupported) {
  for (const float scale : {1e-38f, 1e-6f, 30.0f, 1e5f}) {
    LatentCache cache(kPromptNumbers, {80}, 3);
    cache.Write(0, 0, 80);
    cache.RoundQueries(DType::kBf16);
    std::vector<float> rows[2];
    cache.Launch({{0, 40, 40}}, [&](const PagedAttentionArgs& args) {
      for (const bool as_rows : {false, true}) {
        EmulatedTest test(1);
        DeviceLaunch launch(test, cache, args, {{0, 40, 40}}, DType::kBf16);
        launch.shape().scale = scale;
        launch.shape().prompts_as_rows = as_rows;
        rows[as_rows] = launch.Run();
        EXPECT_EQ(launch.Items().back().first_prompt > 0, !as_rows);
      }
    });
    const std::vector<double> want(rows[1].begin(), rows[1].end());
    int64_t finite = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(std::isfinite(rows[0][i]), std::isfinite(rows[1][i]));
      finite += std::isfinite(want[i]);
    }
    EXPECT_GT(finite, 0);
    EXPECT_LE(NormError(want, rows[0]), ToleranceOf(DType::kBf16)) << scale;
  }
}

// The decoded value of a code may be nearly as large as the largest float16.
TEST(AttentionCudaTest, ValuesNearTheLargestFloat16GiveACorrectResult) {
  for (const int bits : {4, 8}) {
    LatentSpec spec = OfHeads(4, 2, Numbers({40}), Codes({64}, {bits}));
    spec.keys[0].dtype = DType::kF16;
    LatentCache cache(spec, {1}, 8);
    cache.Write(0, 0, 1);
    cache.RoundQueries(DType::kF16);
    // Spoils the only slot, so that its values are as large as possible: 15 *
    // 4364 = 65460 with 4 bits, or 255 * 256.5 = 65407.5 with 8.
    Spoil(cache, 1, 0, /*params=*/true,
          uint32_t{ToF16(bits == 4 ? 4364.0f : 256.5f).bits});
    Spoil(cache, 1, 0, /*params=*/false, uint32_t{0xffffffff});
    EmulatedTest test(1);
    const Outcome outcome = Attend(test, {cache, {{0, 0, 1}}, DType::kF16});
    EXPECT_TRUE(outcome.tensor_cores);
    ExpectRight(outcome, DType::kF16);
  }
}

TEST(AttentionCudaTest, NonFiniteScoresMakeTheirRowNaNOrGetWeightZero) {
  for (const DType dtype : kDTypes) {
    LatentSpec spec = OfHeads(16, 1, Numbers({40}), Numbers({24}));
    spec.keys[0].dtype = spec.values[0].dtype = dtype;
    const auto attend = [&](int64_t length, float key, float value) {
      LatentCache cache(spec, {length}, 9);
      cache.Write(0, 0, length);
      cache.RoundQueries(dtype);
      SpoilNumber(cache, 0, 0, key);
      SpoilNumber(cache, 1, 0, value);
      EmulatedTest test(1);
      return Attend(test, {cache, {{0, length - 1, 1}}, dtype, 64, false}).got;
    };
    // Counts the NaNs in the columns that belong to a head. The other columns
    // are NaN from the start, and are not counted.
    const auto nans = [](const std::vector<float>& row) {
      return std::count_if(row.begin(), row.end(),
                           [](float x) { return std::isnan(x); }) -
             (static_cast<int64_t>(row.size()) - 16 * 24);
    };
    EXPECT_EQ(nans(attend(600, kNaN, 1.0f)), 16 * 24);
    // The score is +inf or -inf, depending on the sign of the head's query. A
    // slot with score -inf has no weight, so its value may be any number.
    const std::vector<float> rows = attend(600, kInfinity, 1.0f);
    EXPECT_GT(nans(rows), 0);
    EXPECT_LT(nans(rows), 16 * 24);
    EXPECT_EQ(nans(rows) % 24, 0);
    EXPECT_TRUE(SameBits(rows, attend(600, kInfinity, 7.0f)));
    // With one slot, the result is NaN even if the score is -inf.
    EXPECT_EQ(nans(attend(1, kInfinity, 1.0f)), 16 * 24);
  }
}

TEST(PromptAttentionTest, NonFiniteScoresMakeTheirRowNaNOrGetWeightZero) {
  constexpr int64_t kRows = 17;
  constexpr int64_t kNumbers = 16 * 24;  // numbers in a row
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const LatentSpec spec =
        OfType(OfHeads(16, 1, Numbers({40}), Numbers({24})), dtype);
    // The key and value of slot 0 are overwritten. All rows see this slot.
    const auto attend = [&](int64_t first, float key, float value) {
      LatentCache cache(spec, {first + kRows}, 9);
      cache.Write(0, 0, first + kRows);
      cache.RoundQueries(dtype);
      SpoilNumber(cache, 0, 0, key);
      SpoilNumber(cache, 1, 0, value);
      EmulatedTest test(1);
      const Outcome outcome =
          Attend(test, {cache, {{0, first, kRows}}, dtype, 64, false});
      EXPECT_GT(outcome.prompt_items, 0);
      return outcome.got;
    };
    // Counts the NaNs in the columns that belong to a head. The other columns
    // are NaN from the start, and are not counted.
    const auto nans = [](const std::vector<float>& rows, int64_t count) {
      const auto width = static_cast<int64_t>(rows.size()) / kRows;
      return std::count_if(rows.begin(), rows.begin() + count * width,
                           [](float x) { return std::isnan(x); }) -
             count * (width - kNumbers);
    };
    EXPECT_EQ(nans(attend(100, kNaN, 1.0f), kRows), kRows * kNumbers);
    // The score is +inf or -inf, depending on the sign of the head's query.
    const std::vector<float> rows = attend(100, kInfinity, 1.0f);
    EXPECT_GT(nans(rows, kRows), 0);
    EXPECT_LT(nans(rows, kRows), kRows * kNumbers);
    EXPECT_EQ(nans(rows, kRows) % 24, 0);
    EXPECT_TRUE(SameBits(rows, attend(100, kInfinity, 7.0f)));
    // The first row sees no other slot, so even with score -inf its result is
    // NaN.
    EXPECT_EQ(nans(attend(0, kInfinity, 1.0f), 1), kNumbers);
  }
}

// There is only one head, so a work item has 128 tokens. Its warps see
// different blocks of slots, and with a small window some rows of the same warp
// have no visible slot in common.
TEST(PromptAttentionTest,
     WorkItemsOfManyTokensHaveTheSameBitsInChunksOfAnySize) {
  for (const int64_t window : {0, 1, 20, 64, 70}) {
    LatentSpec spec =
        OfType(OfHeads(1, 1, Codes({64}, {8}), Numbers({72})), DType::kBf16);
    spec.window = window;
    LatentCache cache(spec, {150}, 3);
    cache.Write(0, 0, 150);
    cache.RoundQueries(DType::kBf16);
    std::vector<float> whole;
    for (const int64_t chunk : {150, 75, 30}) {
      std::vector<LatentAsk> asks;
      for (int64_t t = 0; t < 150; t += chunk) asks.push_back({0, t, chunk});
      EmulatedTest test(static_cast<uint64_t>(chunk));
      const Outcome outcome = Attend(test, {cache, asks, DType::kBf16});
      ExpectRight(outcome, DType::kBf16);
      EXPECT_EQ(outcome.prompt_items, chunk > 128 ? 2 : 150 / chunk);
      if (whole.empty()) whole = outcome.got;
      EXPECT_TRUE(SameBits(whole, outcome.got)) << window << " " << chunk;
    }
  }
}

// The context has more splits than a warp has lanes.
TEST(AttentionCudaTest, SplittingAContextAmongCtasGivesTheResultOfOneCta) {
  constexpr int64_t kTokens = 33 * kAttentionSplitSlots + 3;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    LatentSpec spec = OfHeads(2, 1, Numbers({8}), Numbers({24}));
    spec.values.push_back(Numbers({16}));
    spec = InTiles(spec, 0);
    for (auto* side : {&spec.keys, &spec.values}) {
      for (PartSpec& part : *side) part.dtype = dtype;
    }
    LatentCache cache(spec, {kTokens, 600}, 6);
    cache.Write(0, 0, kTokens);
    cache.Write(1, 0, 600);
    cache.RoundQueries(dtype);
    const std::vector<LatentAsk> asks = {{1, 599, 1}, {0, kTokens - 2, 2}};
    std::vector<float> first;
    for (const int64_t most_partials : {0, 70}) {
      EmulatedTest test(static_cast<uint64_t>(2 + most_partials));
      const Outcome outcome = Attend(test, {cache, asks, dtype, most_partials});
      ExpectRight(outcome, dtype);
      EXPECT_EQ(outcome.tensor_cores, dtype == DType::kBf16);
      EXPECT_EQ(outcome.items[1].first_partial >= 0, most_partials > 0);
      if (first.empty()) first = outcome.got;
      EXPECT_TRUE(SameBits(first, outcome.got));
    }
  }
}

// With many splits and few CTAs, a work item computes several splits. Each
// split has its own partial result, even if no row sees its slots. Here, the
// last item has fewer splits than the others.
TEST(AttentionCudaTest, SplitsThatShareAWorkItemAreComputedIndependently) {
  constexpr int64_t kSplits = 10;
  constexpr int64_t kTokens = kSplits * kAttentionSplitSlots + 3;
  const auto of = [](PartSpec key, PartSpec value) {
    return OfHeads(8, 8, std::move(key), std::move(value));
  };
  LatentSpec exact =
      WithExact("", 4, 28, 30, of(Codes({16}, {8}), Codes({16}, {8})));
  LatentSpec sliding = of(Codes({32}, {4}), Numbers({8}));
  sliding.window = kTokens - kAttentionSplitSlots - 2;
  for (const LatentSpec& from :
       {of(Numbers({8}), Codes({16}, {8})), sliding, exact}) {
    for (const DType dtype : kBothKernels) {
      LatentSpec spec = OfType(from, dtype);
      spec.asked_tokens = 9;
      LatentCache cache(spec, {kTokens, 70}, 6);
      cache.Write(0, 0, kTokens);
      cache.Write(1, 0, 70);
      cache.RoundQueries(dtype);
      const std::vector<LatentAsk> asks = {{1, 69, 1}, {0, kTokens - 9, 9}};
      std::vector<float> first;
      for (const int64_t most_partials : {0, 100}) {
        EmulatedTest test(static_cast<uint64_t>(2 + most_partials),
                          /*multiprocessors=*/1);
        const Outcome outcome = Attend(
            test, {cache, asks, dtype, most_partials, most_partials == 0});
        if (first.empty()) {
          ExpectRightByEither(outcome, dtype);
          first = outcome.got;
          continue;
        }
        EXPECT_GE(outcome.items[1].first_partial, 0);
        // A GPU has more CTAs, so its work items may have one split each.
        if (!OnGpu()) {
          EXPECT_GT(outcome.items[1].item_splits, 1);
          EXPECT_NE(outcome.items[1].num_splits % outcome.items[1].item_splits,
                    0);
        }
        EXPECT_TRUE(SameBits(first, outcome.got));
      }
    }
  }
}

TEST(AttentionCudaTest,
     TheKernelThatMergesSplitsReadsTheirMaximaInOneMemoryRequest) {
  constexpr int64_t kSplits = 5;
  LatentCache cache(OfHeads(1, 1, Numbers({8}), Numbers({64})),
                    {kSplits * kAttentionSplitSlots}, 6);
  cache.Write(0, 0, kSplits * kAttentionSplitSlots);
  cache.RoundQueries(DType::kF32);
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  ExpectRight(
      Attend(test, {cache, {{0, kSplits * kAttentionSplitSlots - 1, 1}}}));
  int64_t requests = 0;
  for (const AccessCount& count : test.emulator().Accesses("attention_merge")) {
    if (count.kind.find("global") != std::string::npos) {
      requests += count.requests;
    }
  }
  // For each of two blocks of 32 channels there are kSplits requests for
  // partial sums. There is one more request each for the maxima, the sums of
  // weights and the results.
  EXPECT_EQ(requests, 2 * (kSplits + 3));
}

// Runs a case with more sequences than CTAs, and returns whether the result is
// right. The first sequence has two splits, which one CTA computes; some of the
// other sequences see no slot.
bool IsRightInTwoSplits(LatentCache& cache, EmulatedTest& test, DType dtype) {
  std::vector<LatentAsk> asks = {{0, 520, 3}};
  for (int64_t first = 20; first < 40; ++first) {
    asks.push_back({0, first, 1, first % 3 == 0 ? 1 : 0});
  }
  return IsRight(Attend(test, {cache, asks, dtype, 0}), dtype);
}

// Expects that leaving out any synchronizing line is detected. Lines with a
// SyncWarp are checked only under ThreadSanitizer, where up to `needless` of
// them may stay undetected.
void ExpectEachSiteIsMissed(
    const std::string& kernel, DType dtype, size_t sites,
    const LatentSpec& spec = OfHeads(2, 1, Numbers({72}), Numbers({72})),
    int needless = 0) {
  LatentCache cache(spec, {523}, 6);
  cache.Write(0, 0, 523);
  cache.RoundQueries(dtype);
  const auto mutants = LeaveOutEach(kernel, kSeeds, [&](EmulatedTest& test) {
    return IsRightInTwoSplits(cache, test, dtype);
  });
  EXPECT_EQ(mutants.size(), sites);
  int undetected = 0;
  for (const Mutant& mutant : mutants) {
    // Only ThreadSanitizer notices a missing SyncWarp, because the kernel's
    // shuffles also make the lanes wait for each other.
    if (mutant.site.kind == "SyncWarp") {
      if (!kThreadSanitizer) continue;
      if (mutant.verdict == Verdict::kRight && ++undetected <= needless) {
        continue;
      }
    }
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}
TEST(AttentionCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  ExpectEachSiteIsMissed("attention", DType::kBf16, 10);
}
TEST(AttentionCudaTest, LeavingOutAnySynchronizingLineIsDetectedWithCodes) {
  ExpectEachSiteIsMissed("attention", DType::kBf16, 10,
                         OfHeads(5, 1, Codes({128}, {4}), Codes({160}, {4})));
}
TEST(AttentionCudaTest, LeavingOutAnySynchronizingLineIsDetectedWithTwoPlanes) {
  ExpectEachSiteIsMissed(
      "attention", DType::kBf16, 10,
      OfHeads(5, 1, Levels(Codes({128}, {3})), Levels(Codes({192}, {3}))));
}
// All keys are exact rows, so values are the first that is copied. A lane
// passes to LoadMatrices only addresses of values that it copied itself, so
// nothing detects that the SyncWarp of Step is missing.
TEST(AttentionCudaTest, LeavingOutAnySynchronizingLineIsDetectedWithExactKeys) {
  ExpectEachSiteIsMissed(
      "attention", DType::kBf16, 11,
      WithExact("", 0, 5000, 0,
                OfHeads(5, 1, Codes({64}, {8}), Codes({64}, {8}))),
      /*needless=*/1);
}
TEST(AttentionCudaTest, LeavingOutAnySynchronizingLineOfTheMergeIsDetected) {
  // The merge computes 5 blocks of 32 channels for each of 48 rows, so each
  // warp computes several blocks.
  constexpr int64_t kTokens = kAttentionSplitSlots + 3;
  LatentCache cache(OfHeads(16, 1, Numbers({8}), Numbers({136})), {kTokens}, 6);
  cache.Write(0, 0, kTokens);
  cache.RoundQueries(DType::kBf16);
  const auto mutants =
      LeaveOutEach("attention_merge", 4, [&](EmulatedTest& test) {
        return IsRight(
            Attend(test, {cache, {{0, kTokens - 3, 3}}, DType::kBf16}),
            DType::kBf16);
      });
  EXPECT_EQ(mutants.size(), 2u);
  for (const Mutant& mutant : mutants) {
    EXPECT_EQ(mutant.site.kind, "SyncWarp");
    // Only ThreadSanitizer notices a missing SyncWarp, because the kernel's
    // shuffles also make the lanes wait for each other.
    EXPECT_TRUE(!kThreadSanitizer || mutant.verdict != Verdict::kRight)
        << mutant.site.line;
  }
}
TEST(AttentionCudaTest,
     LeavingOutAnySynchronizingLineOfThePlainKernelIsDetected) {
  ExpectEachSiteIsMissed("attention_plain", DType::kF32, 5);
}
TEST(AttentionCudaTest,
     LeavingOutAnySynchronizingLineIsDetectedWithKeyBiasesAtStoredPositions) {
  LatentSpec biased = OfHeads(5, 1, Codes({128}, {4}), Codes({64}, {4}));
  biased.key_bias = true;
  biased.unit_of_head = {0};
  biased.stored_positions = true;
  ExpectEachSiteIsMissed("attention_plain", DType::kF32, 7, biased);
}
// Latents and keys have more numbers than a tile.
TEST(AttentionCudaTest,
     LeavingOutAnySynchronizingLineIsDetectedWithRebuiltKeysAndLiftedValues) {
  ExpectEachSiteIsMissed("attention_plain", DType::kF32, 7,
                         OfHeads(2, 1, Rebuilt(Numbers({72}), {80, 30}),
                                 Lifted(Numbers({72}), 72)));
}
TEST(AttentionCudaTest,
     LeavingOutAnySynchronizingLineIsDetectedWithKeysThatAreOnlyRotated) {
  ExpectEachSiteIsMissed(
      "attention_plain", DType::kF32, 6,
      OfHeads(2, 1, Rebuilt(Numbers({72}), {72, 30, false, true}),
              Numbers({72})));
}

// If pages have granules, every global load reads whole sectors, and accesses
// to shared memory have no bank conflicts.
TEST(AttentionCudaTest, LatentsAreReadInWholeSectorsWithoutBankConflicts) {
  struct Case {
    LatentSpec spec;
    int64_t latent_bytes;  // bytes of a slot's key and value
  };
  const auto both = [](const PartSpec& part) {
    return OfHeads(8, 1, part, part);
  };
  for (const auto& [spec, latent_bytes] :
       std::vector<Case>{{both(Codes({128}, {4})), 2 * 64 + 2 * 4},
                         {both(Codes({128}, {8})), 2 * 128 + 2 * 4},
                         {both(Levels(Codes({128}, {4}))), 2 * 64 + 2 * 4},
                         // Each of two warps copies the piece with the third
                         // bits of a value.
                         {both(Levels(Codes({128}, {3}))), 2 * 48 + 16 + 2 * 4},
                         {both(Numbers({128})), 2 * 256}}) {
    LatentCache cache(spec, {512}, 6);
    cache.Write(0, 0, 512);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(1, 4, /*count_accesses=*/true);
    Attend(test, {cache, {{0, 511, 1}}, DType::kBf16});
    int64_t loaded = 0;
    for (const AccessCount& count : test.emulator().Accesses("attention")) {
      // Bank conflicts are allowed in code that runs once per work item.
      const bool shared = count.kind.find("shared") != std::string::npos;
      if (count.requests >= 64 && shared) {
        EXPECT_EQ(count.passes, count.least_passes)
            << count.kind << " at " << count.line;
      }
      // Stores are not checked: a warp stores channels that are not contiguous,
      // so they cannot fill whole sectors.
      if (count.kind == "global load") {
        EXPECT_LE(count.sectors, count.least_sectors) << " at " << count.line;
        loaded += count.bytes;
      }
    }
    // The kernel loads the latents, 8 block table entries, and 8 rows of
    // queries.
    EXPECT_EQ(loaded, 512 * latent_bytes + 8 * 4 + 8 * 128 * 2);
  }
}

// The tensor-core kernel runs if a CTA can have enough shared memory for it,
// otherwise the plain kernel. If there is too little for either, the error
// states the bytes needed and available.
TEST(AttentionCudaTest, TheSizeOfSharedMemoryDecidesWhichKernelRuns) {
  if (OnGpu()) SkipWithoutEmulator();  // a GPU's shared memory is fixed
  const auto attend = [](const LatentSpec& spec, int64_t shared_bytes) {
    LatentCache cache(spec, {20}, 3);
    cache.Write(0, 0, 20);
    cache.RoundQueries(DType::kBf16);
    EmulatedTest test(EmulatorOptions{.shared_bytes = shared_bytes});
    const Outcome outcome = Attend(test, {cache, {{0, 19, 1}}, DType::kBf16});
    ExpectRight(outcome, DType::kBf16);
    return outcome.tensor_cores;
  };
  // 44656 bytes is exactly what the tensor-core kernel needs for this spec.
  EXPECT_TRUE(attend(kFour, 44656));
  const auto prepare = [](const LatentSpec& spec, int64_t shared_bytes) {
    LatentCache cache(spec, {1}, 1);
    EmulatedTest test(EmulatorOptions{.shared_bytes = shared_bytes});
    DeviceLaunch launch(test, cache, cache.Params(), {}, DType::kBf16);
    return Prepare(test.device(), launch.shape()).status();
  };
  EXPECT_THAT(
      prepare(kFour, 44655),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr("paged_attention: the GPU kernels do not support values of "
                    "64 numbers per head: they need 58112 bytes of shared "
                    "memory, but a CTA of device emulated has only 44655")));
  // For 16 rows with long keys, the tensor-core kernel needs 107280 bytes, and
  // the plain kernel only 58112.
  const LatentSpec long_keys = OfHeads(16, 1, Numbers({1024}), Numbers({64}));
  EXPECT_TRUE(attend(long_keys, 107280));
  EXPECT_FALSE(attend(long_keys, 107279));
  EXPECT_FALSE(attend(long_keys, 58112));
  // The tensor-core kernel supports the largest heads even with the 163 KiB of
  // an A100.
  const LatentSpec largest = OfHeads(2, 1, Numbers({1024}), Numbers({1024}));
  EXPECT_TRUE(attend(largest, 163 << 10));
}

// Shared memory is reserved for the actual number of runs of codes in a key,
// not for the largest possible number.
TEST(AttentionCudaTest, SharedMemoryIsSizedForTheActualNumberOfCodeRuns) {
  // A key has ten runs of codes, for which the kernel needs 131984 bytes.
  const LatentSpec runs =
      OfHeads(16, 1, Codes({160}, {8}, 16), Codes({160}, {8}, 80));
  LatentCache cache(runs, {600}, 3);
  cache.Write(0, 0, 600);
  cache.RoundQueries(DType::kBf16);
  std::vector<float> first;
  for (const int64_t shared_bytes : {int64_t{227} << 10, int64_t{131984}}) {
    EmulatedTest test(EmulatorOptions{.shared_bytes = shared_bytes});
    const Outcome outcome = Attend(test, {cache, {{0, 599, 1}}, DType::kBf16});
    EXPECT_TRUE(outcome.tensor_cores);
    ExpectRight(outcome, DType::kBf16);
    if (first.empty()) first = outcome.got;
    EXPECT_TRUE(SameBits(first, outcome.got));
  }
}

TEST(AttentionCudaTest,
     TheReportNamesTheKernelsThatRunAndWhyOtherKernelsDoNot) {
  const auto kernels = [](LatentSpec spec, DType dtype, int64_t shared_bytes) {
    LatentCache cache(spec, {1}, 1);
    EmulatedTest test(EmulatorOptions{.shared_bytes = shared_bytes});
    (void)test.emulator();  // skips on a GPU, whose shared memory is fixed
    DeviceLaunch launch(test, cache, cache.Params(), {}, dtype);
    auto prepared = Prepare(test.device(), launch.shape());
    KVASIR_EXPECT_OK(prepared.status());
    return prepared.ok() ? prepared->kernels() : AttentionKernels();
  };
  const auto expect = [&](const LatentSpec& spec, int64_t shared_bytes,
                          const AttentionKernels& want,
                          DType dtype = DType::kBf16) {
    const AttentionKernels got = kernels(spec, dtype, shared_bytes);
    EXPECT_EQ(got.decode, want.decode) << got.why;
    EXPECT_EQ(got.prompts, want.prompts);
    EXPECT_EQ(got.why, want.why);
  };
  const auto expect_plain = [&](const LatentSpec& spec, const std::string& why,
                                DType dtype = DType::kBf16) {
    expect(spec, kMuchRoom << 10, {"attention_plain", "attention_plain", why},
           dtype);
  };
  expect(kFour, kMuchRoom << 10,
         {"attention", "attention_prefill of 128 rows", ""});
  expect(kFour, 51216, {"attention", "attention_prefill of 64 rows", ""});
  expect(
      kFour, 51215,
      {"attention", "attention",
       "the kernel for prompts needs 51216 bytes of shared memory, but a CTA "
       "has only 51215"});
  const auto expect_decoded = [&](const LatentSpec& spec,
                                  const std::string& why) {
    expect(spec, kMuchRoom << 10, {"attention", "attention", why});
  };
  const auto shaped = [](const auto& change) {
    LatentCache cache(kFour, {1}, 1);
    EmulatedTest test;
    DeviceLaunch launch(test, cache, cache.Params(), {}, DType::kBf16);
    change(launch.shape());
    auto prepared = Prepare(test.device(), launch.shape());
    KVASIR_EXPECT_OK(prepared.status());
    return prepared.ok() ? prepared->kernels() : AttentionKernels();
  };
  for (const float scale : {0.0f, -1.0f, kNaN}) {
    const AttentionKernels got =
        shaped([&](PagedAttentionParams& params) { params.scale = scale; });
    EXPECT_EQ(got.prompts, "attention");
    EXPECT_EQ(got.why,
              absl::StrCat("prompts: the scale of scores must be above 0, but "
                           "is ",
                           scale));
  }
  const AttentionKernels as_rows = shaped(
      [&](PagedAttentionParams& params) { params.prompts_as_rows = true; });
  EXPECT_EQ(as_rows.prompts, "attention");
  EXPECT_EQ(as_rows.why, "prompts: computed as single rows, as requested");
  LatentSpec gap = kFour;
  gap.query_gap = 3;
  expect_decoded(gap, "prompts: queries are not in aligned pieces of 16 bytes");
  const LatentSpec long_keys = OfHeads(16, 1, Numbers({1024}), Numbers({64}));
  expect(
      long_keys, 107279,
      {"attention_plain", "attention_plain",
       "the kernel for tensor cores needs 107280 bytes of shared memory, but "
       "a CTA has only 107279"});
  expect_plain(kFour, "activations are float32", DType::kF32);
  const auto of = [](PartSpec key, PartSpec value) {
    return OfType(OfHeads(4, 2, std::move(key), std::move(value)),
                  DType::kBf16);
  };
  LatentSpec some = of(Numbers({64}), Numbers({64}));
  some.values.push_back(Codes({64}, {8}));
  expect_decoded(InTiles(some, 0),
                 "prompts: only some of the values are codes");
  expect_decoded(
      of(Numbers({64}), Numbers({264})),
      "prompts: values take 5 slabs of 64 channels, but at most 4 slabs are "
      "supported");
  LatentSpec exact = kFour;
  exact.sinks = 2;
  expect_plain(exact, "keys: exact rows are not in aligned pieces of 16 bytes");
  expect_decoded(of(Levels(Codes({64}, {3})), Codes({64}, {6})),
                 "prompts: only codes of 4 and 8 bits are supported");
  expect_plain(
      of(Numbers({64}), Codes({64}, {4, 3}, 32)),
      "values: run 1 has 32 codes of 3 bits, which are not whole pieces "
      "of 16 bytes");
  expect_plain(of(Codes({64}, {4}, 16), Numbers({64})),
               "keys: run 0 has 16 codes of 4 bits, which are not whole pieces "
               "of 16 bytes");
  // The last code of 33 begins another piece.
  expect_plain(of(Codes({33}, {4}), Numbers({33})),
               "keys: run 0 has 33 codes of 4 bits, which are not whole pieces "
               "of 16 bytes");
  expect_decoded(of(Numbers({64}), Fixed(Codes({64}, {4}))),
                 "prompts: codes have static ranges");
  expect_plain(of(Numbers({64}), Ranges(Codes({64}, {4}), DType::kF32)),
               "values: ranges are not float16");
  expect_plain(of(Numbers({60}), Numbers({64})),
               "keys: a latent has 60 channels, which is not a multiple of 8");
  expect_plain(OfType(of(Numbers({64}), Numbers({64})), DType::kF16),
               "keys: numbers are F16, but activations are BF16");
  expect_plain(of(Numbers({1032}), Numbers({64})),
               "keys: 1040 channels in 0 runs, but at most 1024 channels in 64 "
               "runs are supported");
  // The tensor-core kernel stores the index of a slot in its tile in 16 bits,
  // which is too few for 65537 slots.
  LatentSpec long_pages = OfHeads(1, 1, Codes({32}, {4}), Codes({32}, {4}));
  long_pages.page_tokens = 65537;
  expect_plain(long_pages,
               "pages of 1 tiles of 65537 slots, but at most 65536 of each are "
               "supported");
}

TEST(AttentionCudaTest, CappedScoresAreComputedByThePlainKernel) {
  LatentSpec biased = BiasedSpecs().front();
  LatentSpec windowed = kDense;
  windowed.window = 50;
  uint64_t seed = 0;
  for (LatentSpec spec : {kDense, windowed, biased}) {
    // Scores are often above the low cap, and never near the high one.
    for (const float cap : {0.5f, 50.0f}) {
      spec.score_cap = cap;
      for (const DType dtype : kDTypes) {
        LatentCache cache(spec, {1, 65, 600}, 1);
        const std::vector<LatentAsk> asks = {
            {0, 0, 1}, {1, 40, 25}, {2, 599, 1}};
        for (const LatentAsk& ask : asks) {
          cache.Write(ask.sequence, 0, ask.start + ask.count);
        }
        cache.RoundQueries(dtype);
        EmulatedTest test(++seed);
        const Outcome outcome = Attend(test, {cache, asks, dtype});
        SCOPED_TRACE(seed);
        ExpectRight(outcome, dtype);
        EXPECT_FALSE(outcome.tensor_cores);
        EXPECT_EQ(outcome.prompt_items, 0);
      }
    }
  }
}

TEST(AttentionCudaTest,
     TheErrorNamesThePlanFeatureThatTheGpuKernelsDoNotSupport) {
  const auto refusal = [](const LatentSpec& spec) {
    LatentCache cache(spec, {1}, 1);
    EmulatedTest test;
    DeviceLaunch launch(test, cache, cache.Params(), {}, DType::kBf16);
    return Prepare(test.device(), launch.shape()).status();
  };
  const auto refuses = [](const char* what) {
    return base::StatusIs(
        absl::StatusCode::kUnimplemented,
        HasSubstr(absl::StrCat(
            "paged_attention: the GPU kernels do not support ", what)));
  };
  LatentSpec wide = kDense;
  wide.values.push_back(Numbers({1000}));
  EXPECT_THAT(refusal(wide),
              refuses("values of 1072 numbers per head; the limit is 1024"));
  KVASIR_EXPECT_OK(refusal(kDense));
}

}  // namespace
}  // namespace kvasir::kernels::emulation
