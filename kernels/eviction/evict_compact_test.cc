#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/eviction/ops.h"
#include "kernels/testing/attention_checks.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// The cache has two sequences with this number of slots each. Slots are evicted
// from the first; the pages of the second serve as free pages.
constexpr int64_t kSlots = 300;
constexpr int64_t kKept = 90;

// The parts of the layer, and the unit to which each of their groups belongs.
struct EvictParts {
  EvictParts(const LatentCache& cache, const LatentSpec& spec) {
    for (const TestPart& part : cache.parts()) {
      std::vector<int32_t>& of_group =
          units.emplace_back(static_cast<size_t>(part.part.num_groups));
      for (size_t j = 0; j < part.group_of_head.size(); ++j) {
        of_group[static_cast<size_t>(part.group_of_head[j])] =
            spec.unit_of_head[j];
      }
    }
    for (size_t p = 0; p < units.size(); ++p) {
      parts.push_back({OnDevice(cache.parts()[p].part), units[p].data()});
    }
  }
  std::deque<std::vector<int32_t>> units;
  std::vector<EvictPart> parts;
};

// The pages to which the kept slots are moved.
enum class To { kSamePages, kOtherPages, kSomeOtherPages };

struct Evicted {
  LatentCache cache;
  std::vector<float> mass;                 // [unit, slot], before the eviction
  std::vector<std::vector<int32_t>> kept;  // [U]
  std::vector<double> expected;

  static LatentAsk Last() {
    return {.sequence = 0, .start = kKept - 1, .count = 1};
  }

  Evicted(TestStream& test, const LatentSpec& spec, To to)
      : cache(spec, {kSlots, kSlots}, 3) {
    cache.Write(0, 0, kSlots);
    FillMetadata(spec.page_tokens);
    mass = cache.Mass(0, kSlots);
    std::vector<int32_t> to_table = cache.table(0);
    if (to == To::kOtherPages) to_table = cache.table(1);
    if (to == To::kSomeOtherPages) to_table[1] = cache.table(1)[1];
    const Eviction eviction = {
        .num_slots = kSlots,
        .kept = kKept,
        .sinks = 2,
        .recent = 33,
        .block_table = OnDevice<const int32_t>(cache.table(0).data()),
        .to_table = OnDevice<const int32_t>(to_table.data())};
    const EvictParts parts(cache, spec);
    const absl::StatusOr<PreparedEviction> prepared =
        Prepare(test.device(), OnDevice(cache.metadata()), parts.parts);
    KVASIR_EXPECT_OK(prepared);
    const absl::StatusOr<EvictionStep> step =
        CheckEvictions(cache.num_units(), {eviction});
    KVASIR_EXPECT_OK(step);
    std::vector<int32_t> list(static_cast<size_t>(step->kept_slots));
    const EvictionRows rows = {OnDevice<const Eviction>(&eviction), 1,
                               OnDevice(list.data())};
    KVASIR_EXPECT_OK(
        EvictSelect(test.stream(), *prepared, rows, *step, test.workspace()));
    for (int64_t u = 0; u < cache.num_units(); ++u) {
      kept.emplace_back(list.begin() + u * kKept,
                        list.begin() + (u + 1) * kKept);
    }
    // Computes the output that attention should give after the move.
    LatentAsk ask = Last();
    ask.slots_of_unit = &kept;
    expected = cache.Expected(ask);
    KVASIR_EXPECT_OK(
        EvictCompact(test.stream(), *prepared, rows, test.workspace()));
    cache.table(0) = to_table;
  }

 private:
  void FillMetadata(int64_t page_tokens) {
    std::mt19937 engine(5);
    for (int64_t u = 0; u < cache.num_units(); ++u) {
      for (int64_t s = 0; s < kSlots; ++s) {
        const int64_t page =
            cache.table(0)[static_cast<size_t>(s / page_tokens)];
        const int64_t at = s % page_tokens;
        ScoresOf(cache.metadata(), page, u)[at] =
            static_cast<float>(engine() % 64);
        for (const int side : {kKeyError, kValueError}) {
          ErrorsOf(cache.metadata(), side, page, u)[at] =
              static_cast<uint8_t>(100 + engine() % 32);
        }
      }
    }
  }
};

std::vector<LatentSpec> EvictSpecs() {
  PartSpec tiles = Codes({40}, {3, 4}, 20);
  tiles.tile_slots = 64;
  std::vector<LatentSpec> specs = {
      {"numbers", 8, 4, {Numbers({33})}, {Numbers({24}, DType::kF16)}},
      {"codes_4", 8, 4, {Codes({64}, {4})}, {Codes({64}, {4})}, 32},
      {"tiles", 8, 4, {tiles}, {tiles}, 128},
      {"static_and_levels",
       4,
       4,
       {Unstored(Codes({96}, {6, 4}, 32), 17)},
       {Levels(Codes({40}, {3}))},
       64},
      {"group_latents",
       8,
       4,
       {Groups(Codes({96}, {8, 4, 2}, 32), {0, 0, 1, 1}), Codes({24}, {3})},
       {Groups(Codes({96}, {4}, 48), {0, 0, 1, 1})}},
      {"rebuilt_rolling",
       8,
       4,
       {Rebuilt(Groups(Codes({40}, {4}, 20), {0, 0, 1, 1}),
                {.dims = 16, .num_pairs = 8})},
       {Codes({24}, {8})}},
      {"one_kv_head", 4, 1, {Codes({24}, {8})}, {Numbers({24})}},
  };
  for (LatentSpec& spec : specs) {
    spec.unit_of_head = {0};
    if (spec.num_kv_heads == 4) spec.unit_of_head = {0, 0, 1, 1};
  }
  LatentSpec stored = specs[5];
  stored.name = "rebuilt_stored";
  stored.stored_positions = true;
  specs.push_back(stored);
  LatentSpec layer = specs[4];
  layer.name = "one_unit_of_groups";
  layer.unit_of_head = {0, 0, 0, 0};
  specs.push_back(layer);
  return specs;
}

class EvictCompactTest : public ::testing::TestWithParam<LatentSpec> {};

TEST_P(EvictCompactTest,
       AttentionAfterEvictionEqualsAttentionWithTheEvictedSlotsMasked) {
  const int64_t page_tokens = GetParam().page_tokens;
  for (const To to : {To::kSamePages, To::kOtherPages, To::kSomeOtherPages}) {
    SCOPED_TRACE(static_cast<int>(to));
    TestStream reference(1, CpuBackend::kReference);
    Evicted truth(reference, GetParam(), to);
    const std::vector<float> out =
        truth.cache.Attend(reference, {Evicted::Last()});
    EXPECT_LT(WorstError(truth.cache.Params(), truth.expected, out),
              Tolerance(truth.cache.Params()));
    // Metadata moves with its slot.
    const std::vector<float> mass = truth.cache.Mass(0, kKept);
    for (size_t u = 0; u < truth.kept.size(); ++u) {
      for (int64_t i = 0; i < kKept; ++i) {
        const int64_t slot = truth.kept[u][static_cast<size_t>(i)];
        const auto unit = static_cast<int64_t>(u);
        ASSERT_EQ(mass[static_cast<size_t>(unit * kKept + i)],
                  truth.mass[static_cast<size_t>(unit * kSlots + slot)]);
        const int64_t page =
            truth.cache.table(0)[static_cast<size_t>(i / page_tokens)];
        ASSERT_EQ(
            PositionsOf(truth.cache.metadata(), page, unit)[i % page_tokens],
            slot + 1000 * unit);
      }
    }
    EXPECT_TRUE(truth.kept.size() == 1 || truth.kept[0] != truth.kept[1]);
    for (const int threads : {1, 3}) {
      TestStream simd(threads);
      Evicted got(simd, GetParam(), to);
      EXPECT_EQ(got.kept, truth.kept);
      EXPECT_TRUE(SameBits(mass, got.cache.Mass(0, kKept)));
      EXPECT_TRUE(SameBits(out, got.cache.Attend(simd, {Evicted::Last()})));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, EvictCompactTest,
                         ::testing::ValuesIn(EvictSpecs()),
                         [](const auto& spec) {
                           return std::string(spec.param.name);
                         });

TEST(EvictCompactGranulesTest, SlotsStoredInGranulesAreMovedWithoutChanges) {
  const auto test = TestStream::InGranules(16);
  LatentSpec spec = {"", 8, 4, {Codes({40}, {3, 4}, 20)}, {Codes({64}, {4})},
                     64};
  spec.keys[0].granule_bytes = 16;
  spec.values[0].granule_bytes = 16;
  spec.unit_of_head = {0, 0, 1, 1};
  for (const To to : {To::kSamePages, To::kOtherPages}) {
    Evicted truth(*test, spec, to);
    const std::vector<float> out = truth.cache.Attend(*test, {Evicted::Last()});
    EXPECT_LT(WorstError(truth.cache.Params(), truth.expected, out),
              Tolerance(truth.cache.Params()));
  }
}

TEST(EvictCompactRefusalTest,
     TheErrorNamesAGroupWhoseEvictionUnitDoesNotExist) {
  LatentSpec spec = {"", 8, 4, {Codes({40}, {4})}, {Codes({64}, {4})}};
  spec.unit_of_head = {0, 0, 1, 1};
  LatentCache cache(spec, {20}, 3);
  const EvictParts parts(cache, spec);
  SlotMetadataArgs metadata = cache.metadata();
  metadata.num_units = 1;
  TestStream test;
  EXPECT_THAT(
      Prepare(test.device(), OnDevice(metadata), parts.parts).status(),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("group 2 belongs to eviction unit 1, but the "
                               "units are numbered from 0 to 0")));
}

}  // namespace
}  // namespace kvasir::kernels
