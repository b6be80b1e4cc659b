#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/eviction/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The slot metadata of one sequence, whose pages are shuffled. Its entries are
// found by slot number.
class Slots {
 public:
  Slots(int64_t num_slots, int64_t num_units, int64_t page_tokens,
        bool key_errors, bool value_errors, uint32_t seed)
      : num_slots_(num_slots) {
    metadata.page_tokens = page_tokens;
    metadata.num_units = num_units;
    const int64_t plane = num_units * page_tokens;
    metadata.scores_offset = 4;
    metadata.positions_offset = 4 + 4 * plane;
    if (key_errors) metadata.error_offset[kKeyError] = 4 + 8 * plane;
    if (value_errors) metadata.error_offset[kValueError] = 4 + 9 * plane;
    metadata.page_bytes = (4 + 10 * plane + 3) / 4 * 4;
    const int64_t pages = (num_slots + page_tokens - 1) / page_tokens;
    memory_.assign(static_cast<size_t>((pages + 1) * metadata.page_bytes),
                   '\xff');
    metadata.arena = memory_.data();
    for (int64_t p = 0; p < pages; ++p) {
      table.push_back(static_cast<int32_t>(p) + 1);
    }
    std::shuffle(table.begin(), table.end(), std::mt19937(seed));
  }

  float& score(int64_t unit, int64_t slot) {
    return ScoresOf(metadata, Page(slot), unit)[slot % metadata.page_tokens];
  }
  uint32_t& position(int64_t unit, int64_t slot) {
    return PositionsOf(metadata, Page(slot), unit)[slot % metadata.page_tokens];
  }
  uint8_t& error(int side, int64_t unit, int64_t slot) {
    return ErrorsOf(metadata, side, Page(slot),
                    unit)[slot % metadata.page_tokens];
  }
  bool has_errors(int side) const { return metadata.error_offset[side] >= 0; }

  // Fills the planes with random numbers from a small set, so that some slots
  // have equal scores and errors.
  void Fill(uint32_t seed) {
    std::mt19937 engine(seed);
    const auto below = [&engine](uint32_t most) { return engine() % most; };
    for (int64_t u = 0; u < metadata.num_units; ++u) {
      for (int64_t s = 0; s < num_slots_; ++s) {
        score(u, s) = 0.25f * static_cast<float>(below(9));
        for (const int side : {kKeyError, kValueError}) {
          if (!has_errors(side)) continue;
          error(side, u, s) = static_cast<uint8_t>(90 + below(4));
        }
      }
    }
  }

  SlotMetadataArgs metadata;
  std::vector<int32_t> table;

 private:
  int64_t Page(int64_t slot) const {
    return table[static_cast<size_t>(slot / metadata.page_tokens)];
  }

  const int64_t num_slots_;
  std::vector<char> memory_;
};

Eviction Of(const Slots& slots, Eviction eviction) {
  eviction.block_table = OnDevice(slots.table.data());
  return eviction;
}

std::vector<int32_t> Select(TestStream& test, const Slots& slots,
                            const std::vector<Eviction>& evictions) {
  const absl::StatusOr<PreparedEviction> prepared =
      Prepare(test.device(), OnDevice(slots.metadata), {});
  KVASIR_EXPECT_OK(prepared);
  const absl::StatusOr<EvictionStep> step =
      CheckEvictions(slots.metadata.num_units, evictions);
  KVASIR_EXPECT_OK(step);
  std::vector<int32_t> kept(static_cast<size_t>(step->kept_slots), -1);
  KVASIR_EXPECT_OK(EvictSelect(
      test.stream(), *prepared,
      {OnDevice(evictions.data()), static_cast<int64_t>(evictions.size()),
       OnDevice(kept.data())},
      *step, test.workspace()));
  return kept;
}

// Chooses the slots by the simplest method: takes the best remaining candidate,
// again and again.
std::vector<int32_t> BruteForce(Slots& slots, const Eviction& eviction,
                                int64_t unit) {
  const int64_t begin = eviction.sinks;
  const int64_t end = eviction.num_slots - eviction.recent;
  const auto norms = [&](auto get) {
    std::vector<float> numbers;
    for (int64_t s = begin; s < end; ++s) numbers.push_back(get(s));
    if (numbers.empty()) return numbers;
    const float least = *std::min_element(numbers.begin(), numbers.end());
    const float most = *std::max_element(numbers.begin(), numbers.end());
    for (float& x : numbers)
      x = most == least ? 0.0f : (x - least) / (most - least);
    return numbers;
  };
  const auto error = [&](int side) {
    return norms([&](int64_t s) {
      return slots.has_errors(side) ? DecodeError(slots.error(side, unit, s))
                                    : 0.0f;
    });
  };
  const auto mass = norms([&](int64_t s) { return slots.score(unit, s); });
  const auto key = error(kKeyError);
  const auto value = error(kValueError);
  std::vector<bool> kept(static_cast<size_t>(eviction.num_slots), true);
  std::fill(kept.begin() + begin, kept.begin() + std::max(begin, end), false);
  for (int64_t i = eviction.sinks + eviction.recent; i < eviction.kept; ++i) {
    int64_t best = -1;
    float best_worth = 0.0f;
    for (int64_t s = begin; s < end; ++s) {
      if (kept[static_cast<size_t>(s)]) continue;
      const auto c = static_cast<size_t>(s - begin);
      float friendliness = (1.0f - key[c]) + (1.0f - value[c]);
      if (eviction.halves_friendliness) friendliness *= 0.5f;
      const float worth =
          eviction.lambda * mass[c] + (1.0f - eviction.lambda) * friendliness;
      if (best >= 0 && worth <= best_worth) continue;
      best = s;
      best_worth = worth;
    }
    kept[static_cast<size_t>(best)] = true;
  }
  std::vector<int32_t> list;
  for (size_t s = 0; s < kept.size(); ++s) {
    if (kept[s]) list.push_back(static_cast<int32_t>(s));
  }
  return list;
}

TEST(EvictSelectTest,
     TheKeptSlotsEqualThoseOfABruteForceSearchEvenIfScoresAreEqual) {
  TestStream reference(1, CpuBackend::kReference);
  TestStream three(3);
  std::mt19937 engine(7);
  const auto between = [&engine](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(
                       engine() % static_cast<uint64_t>(most - least + 1));
  };
  for (int round = 0; round < 600; ++round) {
    SCOPED_TRACE(round);
    const int64_t num_slots = between(1, round % 10 == 0 ? 700 : 60);
    Slots slots(num_slots, between(1, 4), between(1, 3) * 16, round % 3 > 0,
                round % 4 > 0, static_cast<uint32_t>(round));
    slots.Fill(static_cast<uint32_t>(round));
    std::vector<Eviction> evictions;
    for (int64_t e = between(1, 3); e > 0; --e) {
      Eviction eviction;
      eviction.num_slots = between(1, num_slots);
      eviction.recent = between(1, eviction.num_slots);
      eviction.sinks = between(0, eviction.num_slots - eviction.recent);
      eviction.kept =
          between(eviction.sinks + eviction.recent, eviction.num_slots);
      eviction.lambda = 0.25f * static_cast<float>(between(0, 4));
      eviction.halves_friendliness = between(0, 1) == 1;
      if (!evictions.empty()) {
        eviction.first_kept = evictions.back().first_kept +
                              slots.metadata.num_units * evictions.back().kept;
      }
      evictions.push_back(Of(slots, eviction));
    }
    std::vector<int32_t> expected;
    for (const Eviction& eviction : evictions) {
      for (int64_t u = 0; u < slots.metadata.num_units; ++u) {
        const std::vector<int32_t> unit = BruteForce(slots, eviction, u);
        expected.insert(expected.end(), unit.begin(), unit.end());
      }
    }
    ASSERT_EQ(Select(reference, slots, evictions), expected);
    ASSERT_EQ(Select(three, slots, evictions), expected);
  }
}

struct KeptToken {
  uint32_t position;
  float mass;
  uint8_t errors[2];
};

// Simulates a long text, token by token. Each new token adds attention mass to
// all tokens that are still kept. A list in the test records which tokens
// should be kept.
TEST(EvictSelectTest, TheKeptSlotsOfALongTextEqualThoseOfABruteForceSearch) {
  struct Case {
    int64_t units;
    int64_t budget;
    int64_t sinks;
    int64_t recent;
    int64_t every;
    float lambda;
    float decay;
  };
  TestStream test;
  std::mt19937 engine(11);
  for (const Case& each :
       {Case{1, 1, 0, 1, 1, 1.0f, 1.0f}, Case{1, 3, 1, 1, 1, 0.5f, 1.0f},
        Case{3, 6, 2, 2, 3, 0.25f, 0.5f}, Case{2, 40, 4, 10, 7, 0.0f, 0.9f}}) {
    SCOPED_TRACE(each.budget);
    Slots slots(each.budget + each.every, each.units, 16, true, true, 5);
    std::vector<std::vector<KeptToken>> tokens(static_cast<size_t>(each.units));
    const PreparedEviction prepared =
        *Prepare(test.device(), OnDevice(slots.metadata), {});
    for (uint32_t next = 0; next < 3000; ++next) {
      const auto count = static_cast<int64_t>(tokens[0].size()) + 1;
      for (int64_t u = 0; u < each.units; ++u) {
        std::vector<KeptToken>& of_unit = tokens[static_cast<size_t>(u)];
        of_unit.push_back({next,
                           0,
                           {static_cast<uint8_t>(90 + engine() % 4),
                            static_cast<uint8_t>(90 + engine() % 4)}});
        slots.position(u, count - 1) = next;
        slots.score(u, count - 1) = 0;
        for (const int side : {kKeyError, kValueError}) {
          slots.error(side, u, count - 1) = of_unit.back().errors[side];
        }
        for (int64_t s = 0; s < count; ++s) {
          const float more = 0.25f * static_cast<float>(engine() % 5);
          of_unit[static_cast<size_t>(s)].mass += more;
          slots.score(u, s) += more;
        }
      }
      if (count <= each.budget || (next + 1) % each.every != 0) continue;
      const Eviction eviction =
          Of(slots, {.num_slots = count,
                     .kept = each.budget,
                     .sinks = each.sinks,
                     .recent = each.recent,
                     .lambda = each.lambda,
                     .decay = each.decay,
                     .to_table = OnDevice<const int32_t>(slots.table.data())});
      for (int64_t u = 0; u < each.units; ++u) {
        std::vector<KeptToken> stay;
        for (const int32_t s : BruteForce(slots, eviction, u)) {
          stay.push_back(
              tokens[static_cast<size_t>(u)][static_cast<size_t>(s)]);
          stay.back().mass *= each.decay;
        }
        tokens[static_cast<size_t>(u)] = stay;
      }
      const EvictionStep step = *CheckEvictions(each.units, {eviction});
      std::vector<int32_t> kept(static_cast<size_t>(step.kept_slots));
      const EvictionRows rows = {OnDevice<const Eviction>(&eviction), 1,
                                 OnDevice(kept.data())};
      KVASIR_ASSERT_OK(
          EvictSelect(test.stream(), prepared, rows, step, test.workspace()));
      KVASIR_ASSERT_OK(
          EvictCompact(test.stream(), prepared, rows, test.workspace()));
      for (int64_t u = 0; u < each.units; ++u) {
        for (int64_t s = 0; s < each.budget; ++s) {
          const KeptToken& token =
              tokens[static_cast<size_t>(u)][static_cast<size_t>(s)];
          ASSERT_EQ(slots.position(u, s), token.position) << next;
          ASSERT_EQ(slots.score(u, s), token.mass) << next;
          for (const int side : {kKeyError, kValueError}) {
            ASSERT_EQ(slots.error(side, u, s), token.errors[side]) << next;
          }
        }
      }
    }
  }
}

TEST(EvictSelectTest, TheKeptSlotsDoNotDependOnTheNumberOfThreads) {
  constexpr int64_t kSlots = 9000;
  Slots slots(kSlots, 5, 64, true, true, 3);
  slots.Fill(3);
  const Eviction eviction =
      Of(slots, {.num_slots = kSlots, .kept = 1800, .sinks = 4, .recent = 300});
  std::vector<int32_t> expected;
  TestStream reference(1, CpuBackend::kReference);
  expected = Select(reference, slots, {eviction});
  TestStream four(4);
  EXPECT_EQ(Select(four, slots, {eviction}), expected);
}

TEST(EvictSelectTest, LambdaHasNoEffectIfNoQuantizationErrorsAreStored) {
  Slots slots(100, 1, 16, false, false, 3);
  for (int64_t s = 0; s < 100; ++s) {
    slots.score(0, s) = static_cast<float>(s * 37 % 100);
  }
  TestStream test;
  const Eviction heavy =
      Of(slots, {.num_slots = 100, .kept = 30, .recent = 10, .lambda = 1.0f});
  Eviction both = heavy;
  both.lambda = 0.5f;
  EXPECT_EQ(Select(test, slots, {heavy}), Select(test, slots, {both}));
}

TEST(EvictSelectTest, LambdaWeighsAttentionMassAgainstSmallQuantizationErrors) {
  Slots slots(6, 1, 16, true, true, 3);
  const float scores[] = {0, 1, 2, 3, 4, 0};
  const uint8_t errors[] = {10, 10, 90, 120, 120, 10};
  for (int64_t s = 0; s < 6; ++s) {
    slots.score(0, s) = scores[s];
    slots.error(kKeyError, 0, s) = errors[s];
    slots.error(kValueError, 0, s) = errors[s];
  }
  TestStream test;
  const auto kept = [&](float lambda) {
    return Select(
        test, slots,
        {Of(slots,
            {.num_slots = 6, .kept = 3, .recent = 1, .lambda = lambda})});
  };
  EXPECT_THAT(kept(1.0f), ElementsAre(3, 4, 5));
  EXPECT_THAT(kept(0.5f), ElementsAre(1, 2, 5));
  EXPECT_THAT(kept(0.0f), ElementsAre(0, 1, 5));
}

TEST(EvictSelectTest, NonFiniteAttentionScoresCountAsZero) {
  Slots slots(5, 1, 16, false, false, 3);
  const float scores[] = {std::numeric_limits<float>::quiet_NaN(), 1.0f,
                          std::numeric_limits<float>::infinity(), 2.0f, 0.0f};
  for (int64_t s = 0; s < 5; ++s) slots.score(0, s) = scores[s];
  TestStream test;
  EXPECT_THAT(Select(test, slots,
                     {Of(slots, {.num_slots = 5, .kept = 3, .recent = 1})}),
              ElementsAre(1, 3, 4));
}

TEST(EvictSelectTest, AttentionMassIsMultipliedByTheDecayOncePerEviction) {
  Slots slots(20, 2, 16, false, false, 3);
  slots.Fill(1);
  slots.score(1, 7) = 3.0f;
  TestStream test;
  const std::vector<int32_t> kept = Select(
      test, slots,
      {Of(slots, {.num_slots = 10, .kept = 5, .recent = 1, .decay = 0.5f})});
  EXPECT_EQ(slots.score(1, 7), 1.5f);
  slots.Fill(1);
  slots.score(1, 7) = 3.0f;
  EXPECT_EQ(Select(test, slots,
                   {Of(slots, {.num_slots = 10, .kept = 5, .recent = 1})}),
            kept);
  EXPECT_EQ(slots.score(1, 7), 3.0f);
}

TEST(EvictSelectTest, EvictionsWithInvalidParametersAreRefused) {
  const Eviction good = {.num_slots = 10, .kept = 6, .sinks = 2, .recent = 3};
  const auto refusal = [&](auto change) {
    Eviction eviction = good;
    change(eviction);
    return CheckEvictions(2, {good, eviction}).status();
  };
  const auto invalid = [](const char* text) {
    return base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_EQ(CheckEvictions(2, {good})->kept_slots, 12);
  EXPECT_THAT(refusal([](Eviction& e) { e.recent = 0; }),
              invalid("eviction 1: recent slots: must be 1 to 10, but is 0"));
  EXPECT_THAT(refusal([](Eviction& e) { e.kept = 4; }),
              invalid("kept slots: must be 5 to 10, but is 4"));
  EXPECT_THAT(refusal([](Eviction& e) { e.kept = 11; }),
              invalid("kept slots: must be 5 to 10, but is 11"));
  EXPECT_THAT(refusal([](Eviction& e) { e.sinks = -1; }),
              invalid("sinks: must be 0 to 10, but is -1"));
  EXPECT_THAT(refusal([](Eviction& e) { e.num_slots = 0; }),
              invalid("slots: must be 1 to"));
  EXPECT_THAT(refusal([](Eviction& e) { e.lambda = kPoison; }),
              invalid("lambda: must be 0 to 1, but is nan"));
  EXPECT_THAT(refusal([](Eviction& e) { e.decay = 0.0f; }),
              invalid("decay: must be more than 0 and up to 1, but is 0"));
  EXPECT_THAT(refusal([](Eviction& e) { e.first_kept = -2; }),
              invalid("first kept slot: must be 0 to"));
}

}  // namespace
}  // namespace kvasir::kernels
