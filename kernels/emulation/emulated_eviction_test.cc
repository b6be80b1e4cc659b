// Tests the kernels that evict slots: they must keep the same slots as those of
// a CPU, and leave the same bytes in all arenas.
#include <gmock/gmock.h>

#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/eviction/ops.h"
#include "kernels/testing/latent_cache_for_test.h"
#include "kernels/testing/latent_specs_for_test.h"

namespace kvasir::kernels::emulation {
namespace {

const uint64_t kSeeds = Seeds();

constexpr int64_t kGranule = 16;

enum class Masses { kFewValues, kRandom, kEqual, kNotFinite };

// An eviction from the first eviction.num_slots slots of a sequence.
struct Plan {
  int64_t sequence = 0;
  Eviction eviction;
  bool to_other_pages = false;  // true: to pages of the last sequence
};

// A cache with metadata, and the evictions of a step.
class Step {
 public:
  Step(const LatentSpec& spec, const std::vector<int64_t>& lengths,
       std::vector<Plan> plans, Masses masses, uint32_t seed)
      : plans_(std::move(plans)), cache_(spec, lengths, seed) {
    for (size_t s = 0; s < lengths.size(); ++s) {
      cache_.Write(static_cast<int64_t>(s), 0, lengths[s]);
      Fill(cache_.table(static_cast<int64_t>(s)), lengths[s], spec.page_tokens,
           masses, seed);
    }
    for (const TestPart& part : cache_.parts()) {
      std::vector<int32_t>& units =
          units_.emplace_back(static_cast<size_t>(part.part.num_groups));
      for (size_t j = 0; j < part.group_of_head.size(); ++j) {
        units[static_cast<size_t>(part.group_of_head[j])] =
            spec.unit_of_head[j];
      }
    }
    int64_t first_kept = 0;
    const std::vector<int32_t>& others =
        cache_.table(static_cast<int64_t>(lengths.size()) - 1);
    for (Plan& plan : plans_) {
      const std::vector<int32_t>& from = cache_.table(plan.sequence);
      std::vector<int32_t>& to = to_tables_.emplace_back(from);
      if (plan.to_other_pages) {
        std::copy_n(others.begin(), std::min(others.size(), to.size()),
                    to.begin());
      }
      plan.eviction.first_kept = first_kept;
      plan.eviction.block_table = OnDevice(from.data());
      plan.eviction.to_table = OnDevice(to.data());
      first_kept += cache_.num_units() * plan.eviction.kept;
    }
  }

  // The memory that the two ops write.
  struct Result {
    std::vector<int32_t> kept;
    std::vector<std::vector<char>> arenas;
    bool operator==(const Result&) const = default;
  };

  // Changes the cache.
  Result OnCpu() {
    const auto test = TestStream::InGranules(kGranule);
    std::vector<EvictPart> parts;
    for (size_t p = 0; p < units_.size(); ++p) {
      parts.push_back({OnDevice(cache_.parts()[p].part), units_[p].data()});
    }
    const std::vector<Eviction> evictions = Evictions();
    Result result;
    result.kept.assign(KeptSlots(), -1);
    Run(*test, OnDevice(cache_.metadata()), parts, OnDevice(evictions.data()),
        OnDevice(result.kept.data()), test->workspace());
    for (const TestPart& part : cache_.parts()) {
      result.arenas.push_back(part.memory());
    }
    result.arenas.push_back(cache_.metadata_memory());
    return result;
  }

  // Does not change the cache.
  Result OnEmulated(EmulatedTest& test) const {
    std::deque<Arena> arenas;
    std::vector<EvictPart> parts;
    for (size_t p = 0; p < units_.size(); ++p) {
      const TestPart& from = cache_.parts()[p];
      parts.push_back({OnDevice(from.part), units_[p].data()});
      parts.back().latents.arena =
          Put(test, from.part.arena, from.memory(), &arenas);
    }
    SlotMetadata metadata = OnDevice(cache_.metadata());
    metadata.arena =
        Put(test, cache_.metadata().arena, cache_.metadata_memory(), &arenas);
    std::deque<DeviceBuffer> tables;
    std::vector<Eviction> evictions = Evictions();
    for (size_t i = 0; i < evictions.size(); ++i) {
      tables.push_back(test.Put(cache_.table(plans_[i].sequence)));
      evictions[i].block_table = tables.back().as<int32_t>();
      tables.push_back(test.Put(to_tables_[i]));
      evictions[i].to_table = tables.back().as<int32_t>();
    }
    const DeviceBuffer list = test.Put(evictions);
    const DeviceBuffer kept = test.Put(std::vector<int32_t>(KeptSlots(), -1));
    const DeviceBuffer memory = test.Memory(1 << 20);
    Workspace workspace = EmulatedTest::WorkspaceOf(memory);
    Run(test, metadata, parts, list.as<Eviction>(), kept.as<int32_t>(),
        workspace);
    Result result;
    result.kept = test.Get<int32_t>(kept);
    for (const Arena& arena : arenas) {
      std::vector<char>& bytes = result.arenas.emplace_back(arena.bytes);
      KVASIR_EXPECT_OK(ReadBack(test.stream(), bytes.data(),
                                arena.buffer.as<char>() + arena.before,
                                arena.bytes));
    }
    return result;
  }

 private:
  // An arena on the device, of which only the bytes from `before` on are used.
  struct Arena {
    DeviceBuffer buffer;
    int64_t before;
    size_t bytes;
  };
  // Copies the memory of an arena to the device. Returns the start of the arena
  // there, which is equally far before the memory.
  static DevicePtr<void> Put(EmulatedTest& test, const void* arena,
                             const std::vector<char>& memory,
                             std::deque<Arena>* arenas) {
    const int64_t before = memory.data() - static_cast<const char*>(arena);
    arenas->push_back({test.Memory(static_cast<size_t>(before) + memory.size()),
                       before, memory.size()});
    const DevicePtr<char> begin = arenas->back().buffer.as<char>();
    KVASIR_EXPECT_OK(
        test.device().Write(begin + before, memory.data(), memory.size()));
    return begin;
  }

  std::vector<Eviction> Evictions() const {
    std::vector<Eviction> evictions;
    for (const Plan& plan : plans_) evictions.push_back(plan.eviction);
    return evictions;
  }
  size_t KeptSlots() const {
    const Eviction& last = plans_.back().eviction;
    return static_cast<size_t>(last.first_kept +
                               cache_.num_units() * last.kept);
  }
  template <typename Test>
  void Run(Test& test, const SlotMetadata& metadata,
           const std::vector<EvictPart>& parts,
           DevicePtr<const Eviction> evictions, DevicePtr<int32_t> kept,
           Workspace& workspace) const {
    const auto prepared = Prepare(test.device(), metadata, parts);
    KVASIR_EXPECT_OK(prepared);
    const auto step = CheckEvictions(cache_.num_units(), Evictions());
    KVASIR_EXPECT_OK(step);
    const EvictionRows rows = {evictions, static_cast<int64_t>(plans_.size()),
                               kept};
    KVASIR_EXPECT_OK(
        EvictSelect(test.stream(), *prepared, rows, *step, workspace));
    KVASIR_EXPECT_OK(EvictCompact(test.stream(), *prepared, rows, workspace));
  }
  void Fill(const std::vector<int32_t>& table, int64_t length,
            int64_t page_tokens, Masses masses, uint32_t seed) {
    std::mt19937 engine(seed);
    const auto mass = [&]() -> float {
      const auto below = [&](uint32_t most) {
        return static_cast<float>(engine() % most);
      };
      switch (masses) {
        case Masses::kFewValues:
          return 0.25f * below(9);
        case Masses::kRandom:
          return below(1 << 24) * 1e-5f;
        case Masses::kEqual:
          return 3.0f;
        case Masses::kNotFinite:
          break;
      }
      return engine() % 5 == 0   ? std::numeric_limits<float>::quiet_NaN()
             : engine() % 5 == 0 ? std::numeric_limits<float>::infinity()
                                 : below(4);
    };
    for (int64_t u = 0; u < cache_.num_units(); ++u) {
      for (int64_t s = 0; s < length; ++s) {
        const int64_t page = table[static_cast<size_t>(s / page_tokens)];
        const int64_t at = s % page_tokens;
        ScoresOf(cache_.metadata(), page, u)[at] = mass();
        for (const int side : {kKeyError, kValueError}) {
          uint8_t* const errors = ErrorsOf(cache_.metadata(), side, page, u);
          errors[at] = static_cast<uint8_t>(
              masses == Masses::kEqual ? 7 : 90 + engine() % 8);
        }
      }
    }
  }

  std::vector<Plan> plans_;
  mutable LatentCache cache_;
  std::deque<std::vector<int32_t>> units_;
  std::deque<std::vector<int32_t>> to_tables_;
};

// A cache whose layout is that of a GPU.
LatentSpec SpecOf(PartSpec key, PartSpec value, int64_t page_tokens,
                  int64_t tile_slots) {
  LatentSpec spec;
  spec.num_heads = 8;
  spec.num_kv_heads = 4;
  spec.keys = {std::move(key)};
  spec.values = {std::move(value)};
  spec.page_tokens = page_tokens;
  spec.unit_of_head = {0, 0, 1, 2};
  for (auto* side : {&spec.keys, &spec.values}) {
    for (PartSpec& part : *side) {
      part.tile_slots = tile_slots;
      part.granule_bytes = kGranule;
    }
  }
  return spec;
}
const LatentSpec kCodes =
    SpecOf(Groups(Codes({40, 24}, {3, 4}, 20), {0, 0, 1, 2}), Codes({64}, {4}),
           64, 64);

Eviction Of(int64_t slots, int64_t kept, int64_t sinks, int64_t recent) {
  Eviction eviction;
  eviction.num_slots = slots;
  eviction.kept = kept;
  eviction.sinks = sinks;
  eviction.recent = recent;
  return eviction;
}

TEST(EvictionCudaTest, KernelsKeepAndMoveTheSameSlotsAsOnACpu) {
  const LatentSpec specs[] = {
      kCodes, SpecOf(Numbers({33}), Numbers({24}, DType::kF16), 96, 32),
      SpecOf(Unstored(Codes({96}, {6, 4}, 32), 17), Levels(Codes({40}, {3})),
             48, 16)};
  std::mt19937 engine(11);
  const auto between = [&engine](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(
                       engine() % static_cast<uint64_t>(most - least + 1));
  };
  uint32_t round = 0;
  for (const LatentSpec& spec : specs) {
    for (const Masses masses : {Masses::kFewValues, Masses::kRandom,
                                Masses::kEqual, Masses::kNotFinite}) {
      SCOPED_TRACE(++round);
      const std::vector<int64_t> lengths = {between(1, 700), between(1, 90),
                                            between(300, 400), 500};
      std::vector<Plan> plans;
      for (int64_t s = 0; s < 3; ++s) {
        const int64_t slots = lengths[static_cast<size_t>(s)];
        const int64_t recent = between(1, slots);
        const int64_t sinks = between(0, slots - recent);
        Plan plan = {s,
                     Of(slots, between(sinks + recent, slots), sinks, recent)};
        plan.eviction.lambda = 0.25f * static_cast<float>(between(0, 4));
        plan.eviction.decay = s == 1 ? 0.75f : 1.0f;
        plan.eviction.halves_friendliness = between(0, 1) == 1;
        plan.to_other_pages = s == 2;
        plans.push_back(plan);
      }
      Step step(spec, lengths, plans, masses, round);
      EmulatedTest test(round);
      const Step::Result got = step.OnEmulated(test);
      const Step::Result expected = step.OnCpu();
      EXPECT_EQ(got.kept, expected.kept);
      EXPECT_TRUE(got.arenas == expected.arenas);
    }
  }
}

// Pages begin more than 2^32 bytes after the start of their arena.
TEST(EvictionCudaTest, PagesFarFromTheStartOfTheArenaAreFound) {
  if (OnGpu()) GTEST_SKIP() << "arenas would take 20 GiB of its memory";
  LatentSpec spec = kCodes;
  spec.first_page = int64_t{1} << 21;
  Plan plan = {0, Of(300, 120, 2, 33)};
  plan.eviction.decay = 0.75f;
  Step step(spec, {300, 64}, {plan}, Masses::kRandom, 3);
  EmulatedTest test;
  const Step::Result got = step.OnEmulated(test);
  EXPECT_TRUE(got == step.OnCpu());
}
TEST(EvictionCudaTest, NothingIsLaunchedWithoutEvictions) {
  LatentCache cache(kCodes, {64}, 1);
  EmulatedTest test;
  const DeviceBuffer arena = test.Put(cache.metadata_memory());
  SlotMetadata metadata = OnDevice(cache.metadata());
  metadata.arena = arena.data();
  const auto prepared = Prepare(test.device(), metadata, {});
  KVASIR_ASSERT_OK(prepared);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(EvictSelect(test.stream(), *prepared, {}, {}, none));
  KVASIR_EXPECT_OK(EvictCompact(test.stream(), *prepared, {}, none));
  KVASIR_EXPECT_OK(test.stream().Synchronize());
}

// The context takes the kernels several turns. More than half of its slots are
// kept, so slots are overwritten soon after they are read.
Step Long() {
  Plan plan = {0, Of(2600, 1500, 4, 100)};
  plan.eviction.decay = 0.5f;
  return Step(kCodes, {2600, 64}, {plan}, Masses::kRandom, 5);
}
void ExpectEachSiteIsNeeded(const std::string& kernel, size_t sites) {
  Step step = Long();
  std::optional<Step::Result> expected;
  const auto mutants = LeaveOutEach(kernel, kSeeds, [&](EmulatedTest& test) {
    const Step::Result got = step.OnEmulated(test);
    if (!expected) expected = Long().OnCpu();
    return got == *expected;
  });
  EXPECT_EQ(mutants.size(), sites);
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(mutant.verdict, Verdict::kRight)
        << mutant.site.kind << " at " << mutant.site.file << ":"
        << mutant.site.line;
  }
}
TEST(EvictionCudaTest, LeavingOutAnySynchronizingLineOfSelectIsDetected) {
  ExpectEachSiteIsNeeded("evict_select", 5);
}
TEST(EvictionCudaTest, LeavingOutAnySynchronizingLineOfCompactIsDetected) {
  ExpectEachSiteIsNeeded("evict_compact", 1);
}

}  // namespace
}  // namespace kvasir::kernels::emulation
