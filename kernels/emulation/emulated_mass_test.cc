// Tests the kernels that add attention mass to slots against a computation in
// float64, with several seeds, codecs, units of eviction and chunks.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/emulation/testing/attention_launch.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

const uint64_t kSeeds = Seeds();

// Returns the metadata of a cache, with `memory` in place of its memory.
SlotMetadataArgs MetadataIn(const LatentCache& cache,
                            std::vector<char>* memory) {
  SlotMetadataArgs metadata = cache.metadata();
  metadata.arena = memory->data() + (static_cast<const char*>(metadata.arena) -
                                     cache.metadata_memory().data());
  return metadata;
}
float* MassAt(const SlotMetadataArgs& metadata, LatentCache& cache,
              int64_t sequence, int64_t unit, int64_t slot) {
  const int64_t page =
      cache.table(sequence)[static_cast<size_t>(slot / metadata.page_tokens)];
  return ScoresOf(metadata, page, unit) + slot % metadata.page_tokens;
}

struct Added {
  // The relative error of the masses of all slots, compared with float64.
  double error = 0.0;
  std::vector<char> memory;  // the metadata after the launch
};

// Runs attention on the device. Expects that it changes only the masses of
// slots of the sequences in `asks`, and leaves the cache unchanged.
Added AddOnDevice(EmulatedTest& test, LatentCache& cache,
                  const std::vector<LatentAsk>& asks, DType dtype,
                  bool judged = true) {
  Added added;
  cache.UseThreads(HostThreads());
  cache.Launch(asks, [&](const PagedAttentionArgs& args) {
    DeviceLaunch launch(test, cache, args, asks, dtype);
    launch.Run();
    added.memory = launch.Metadata(cache);
  });
  std::vector<char> others = added.memory;
  std::vector<char> before = cache.metadata_memory();
  const SlotMetadataArgs now = MetadataIn(cache, &others);
  const SlotMetadataArgs old = MetadataIn(cache, &before);
  double error = 0.0;
  double norm = 0.0;
  for (const LatentAsk& ask : asks) {
    const int64_t tokens = ask.start + ask.count;
    std::vector<double> expected;
    if (judged) expected = cache.ExpectedMass(ask, tokens);
    for (int64_t i = 0; i < cache.num_units() * tokens; ++i) {
      float* const mass =
          MassAt(now, cache, ask.sequence, i / tokens, i % tokens);
      const float was =
          *MassAt(old, cache, ask.sequence, i / tokens, i % tokens);
      if (judged) {
        const double want = expected[static_cast<size_t>(i)];
        const double off =
            static_cast<double>(*mass) - static_cast<double>(was) - want;
        error += off * off;
        norm += want * want;
      }
      *mass = was;
    }
  }
  EXPECT_TRUE(others == before) << "bytes other than the masses changed";
  if (judged) added.error = error == 0.0 ? 0.0 : std::sqrt(error / norm);
  return added;
}

double MassTolerance(DType dtype) { return dtype == DType::kF32 ? 2e-5 : 2e-4; }

// Returns the spec with attention mass. Heads that share a group of latents are
// in the same unit if `by_group`; otherwise every second KV head is in another
// unit.
LatentSpec WithMass(LatentSpec spec, bool by_group) {
  spec.adds_mass = true;
  spec.unit_of_head.clear();
  for (int64_t j = 0; j < spec.num_kv_heads; ++j) {
    spec.unit_of_head.push_back(
        by_group ? 0 : static_cast<int32_t>(spec.num_kv_heads > 1 && j % 2));
  }
  return spec;
}

// Half of the cases have bfloat16 and two units of eviction, the others float32
// and one unit.
struct MassCase {
  LatentSpec spec;
  DType dtype;
};

class EmulatedMassTest : public ::testing::TestWithParam<MassCase> {};

TEST_P(EmulatedMassTest, TheMassOfASlotIsTheSumOfItsAttentionWeights) {
  const DType dtype = GetParam().dtype;
  LatentCache cache(GetParam().spec, {1, 65, 600, 20}, 1);
  const std::vector<LatentAsk> asks = {
      {0, 0, 1},
      {.sequence = 1, .start = 40, .count = 25, .first_counted_row = 3},
      {2, 599, 1},
      {.sequence = 3, .start = 15, .count = 5, .first_counted_row = 5}};
  for (const LatentAsk& ask : asks) {
    cache.Write(ask.sequence, 0, ask.start + ask.count);
  }
  cache.RoundQueries(dtype);
  EmulatedTest test(dtype == DType::kF32 ? 1 : 2);
  EXPECT_LE(AddOnDevice(test, cache, asks, dtype).error, MassTolerance(dtype));
}

std::vector<MassCase> MassCases() {
  std::vector<LatentSpec> specs = Specs();
  LatentSpec mixed = Mixed();
  mixed.name = "mixed";
  LatentSpec biased = SpecOf({Codes({64}, {4})}, {Codes({64}, {4})});
  biased.name = "key_bias";
  biased.key_bias = true;
  LatentSpec capped = SpecOf({Numbers({40})}, {Numbers({72})});
  capped.name = "capped";
  capped.score_cap = 0.5f;
  // Each unit of eviction has several units of query heads.
  LatentSpec wide = SpecOf({Codes({24}, {3})}, {Numbers({40})});
  wide.name = "units_of_several_heads";
  wide.num_heads = 200;
  wide.num_kv_heads = 4;
  for (const LatentSpec& spec : {mixed, biased, capped, wide}) {
    specs.push_back(spec);
  }
  std::vector<MassCase> cases;
  for (const LatentSpec& spec : specs) {
    const bool odd = cases.size() % 2 != 0;
    cases.push_back({WithMass(spec, !odd), odd ? DType::kBf16 : DType::kF32});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Specs, EmulatedMassTest,
                         ::testing::ValuesIn(MassCases()),
                         [](const auto& test) {
                           return std::string(test.param.spec.name);
                         });

// In each unit, the slots' positions differ from their numbers.
TEST(AttentionMassCudaTest, KeysAreRotatedByThePositionsInTheirSlots) {
  LatentSpec biased = SpecOf({Codes({64}, {4})}, {Codes({64}, {4})});
  biased.key_bias = true;
  for (LatentSpec spec : {Mixed(), biased}) {
    spec.stored_positions = true;
    LatentCache cache(WithMass(spec, false), {65}, 1);
    cache.Write(0, 0, 65);
    EmulatedTest test(1);
    EXPECT_LE(AddOnDevice(test, cache, {{0, 60, 5}}, DType::kF32).error,
              MassTolerance(DType::kF32));
  }
}

TEST(AttentionMassCudaTest, ChunkSizesDoNotChangeTheBitsOfTheMass) {
  constexpr int64_t kTokens = 522;
  constexpr int64_t kFirst = 502;
  LatentSpec wide = SpecOf({Codes({64}, {4})}, {Codes({64}, {4})});
  wide.num_heads = 20;
  wide.num_kv_heads = 4;
  LatentSpec window = wide;
  window.window = 50;
  for (const LatentSpec& spec : {Mixed(), wide, window}) {
    std::vector<char> whole;
    for (const int64_t chunk : {20, 1, 7, 19}) {
      LatentCache cache(WithMass(spec, false), {kTokens, 40}, 2);
      cache.Write(0, 0, kTokens);
      cache.Write(1, 0, 40);
      cache.RoundQueries(DType::kBf16);
      std::vector<char> memory;
      for (int64_t t = kFirst; t < kTokens; t += chunk) {
        const int64_t count = std::min(chunk, kTokens - t);
        // With little shared memory, items have fewer tokens.
        EmulatedTest test(
            EmulatorOptions{.seed = static_cast<uint64_t>(t),
                            .shared_bytes = (chunk == 7 ? 76 : 163) << 10});
        // The other sequence adds no mass.
        memory = AddOnDevice(test, cache,
                             {{.sequence = 1,
                               .start = 37,
                               .count = 3,
                               .first_counted_row = 3},
                              {.sequence = 0,
                               .start = t,
                               .count = count,
                               .first_counted_row = std::clamp<int64_t>(
                                   5 + kFirst - t, 0, count)}},
                             DType::kBf16, /*judged=*/false)
                     .memory;
        cache.SetMetadata(memory);
      }
      if (whole.empty()) whole = memory;
      EXPECT_TRUE(whole == memory) << chunk;
    }
  }
}

TEST(AttentionMassCudaTest, RowsThatAreNotCountedAddNoMass) {
  LatentCache cache(WithMass(Mixed(), false), {50}, 2);
  cache.Write(0, 0, 50);
  EmulatedTest test(3);
  const Added added = AddOnDevice(
      test, cache,
      {{.sequence = 0, .start = 10, .count = 40, .first_counted_row = 40}},
      DType::kF32, /*judged=*/false);
  EXPECT_TRUE(added.memory == cache.metadata_memory());
}

TEST(AttentionMassCudaTest, TheErrorForTooLittleSharedMemoryNamesTheBytes) {
  if (OnGpu()) SkipWithoutEmulator();  // a GPU's shared memory is fixed
  const auto prepare = [](int64_t shared_bytes) {
    LatentSpec spec = SpecOf({Codes({64}, {4})}, {Codes({64}, {4})});
    spec.num_heads = 8;
    spec.num_kv_heads = 2;
    LatentCache cache(WithMass(spec, false), {1}, 1);
    EmulatedTest test(EmulatorOptions{.shared_bytes = shared_bytes});
    DeviceLaunch launch(test, cache, cache.Params(), {}, DType::kBf16);
    return Prepare(test.device(), launch.shape()).status();
  };
  KVASIR_EXPECT_OK(prepare(56128));
  EXPECT_THAT(
      prepare(56127),
      base::StatusIs(
          absl::StatusCode::kUnimplemented,
          HasSubstr("paged_attention: the GPU kernels do not support attention "
                    "mass, which needs 56128 bytes of shared memory, but a CTA "
                    "has only 56127")));
}

TEST(AttentionMassCudaTest, LeavingOutAnySynchronizingLineIsDetected) {
  LatentSpec spec =
      SpecOf({Rebuilt(Codes({128}, {4}), {16, 8})}, {Codes({64}, {4})});
  LatentCache cache(WithMass(spec, true), {523}, 6);
  cache.Write(0, 0, 523);
  cache.RoundQueries(DType::kF32);
  const std::pair<const char*, size_t> kernels[] = {
      {"attention_mass_totals", 6}, {"attention_mass", 7}};
  for (const auto& [kernel, sites] : kernels) {
    const auto mutants = LeaveOutEach(kernel, kSeeds, [&](EmulatedTest& test) {
      return AddOnDevice(test, cache, {{0, 505, 18}}, DType::kF32).error <=
             MassTolerance(DType::kF32);
    });
    EXPECT_EQ(mutants.size(), sites) << kernel;
    for (const Mutant& mutant : mutants) {
      EXPECT_NE(mutant.verdict, Verdict::kRight)
          << kernel << ": " << mutant.site.kind << " at " << mutant.site.file
          << ":" << mutant.site.line;
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels::emulation
