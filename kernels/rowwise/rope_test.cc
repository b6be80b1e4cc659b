#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/status_macros.h"
#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// Prepares the op and runs it. The heads and steps in `args` are in host
// memory.
absl::Status PrepareAndRun(TestStream& test, const RopeArgs& args) {
  const auto heads = [](const RopeTensorArgs& tensor) {
    return absl::Span<const RopeHead>(
        tensor.heads,
        tensor.heads != nullptr ? static_cast<size_t>(tensor.num_heads) : 0);
  };
  const RopeTables tables = {
      heads(args.q),
      heads(args.k),
      {args.steps,
       args.steps != nullptr ? static_cast<size_t>(args.rotary_dim / 2) : 0}};
  RopeArgs shape = args;
  shape.q.heads = nullptr;
  shape.k.heads = nullptr;
  shape.steps = nullptr;
  KVASIR_ASSIGN_OR_RETURN(const PreparedRope rope,
                          Prepare(test.device(), OnDevice(shape), tables));
  return Rope(test.stream(), rope,
              {OnDevice(args.q.data), OnDevice(args.k.data),
               OnDevice(args.positions), args.num_tokens},
              test.workspace());
}

struct Case {
  int64_t head_dim;
  int64_t rotary_dim;
  RopePairing pairing;
  float factor;
};

const std::vector<int64_t> kPositions = {0,      1,         2,        1000,
                                         131072, 1'000'003, 9'999'999};

std::vector<double> Frequencies(int64_t rotary_dim) {
  std::vector<double> frequencies;
  for (int64_t f = 0; f < rotary_dim / 2; ++f) {
    frequencies.push_back(std::pow(
        500000.0,
        -2.0 * static_cast<double>(f) / static_cast<double>(rotary_dim)));
  }
  return frequencies;
}

// q with 3 heads, in rows that have 5 more numbers, and k with 2 heads.
struct Tensors {
  std::vector<float> q;
  std::vector<float> k;
};

Tensors Rotate(TestStream& test, const Case& c) {
  const auto tokens = static_cast<int64_t>(kPositions.size());
  Tensors t = {RandomFloats(tokens * (3 * c.head_dim + 5), 1),
               RandomFloats(tokens * 2 * c.head_dim, 2)};
  std::vector<uint64_t> steps;
  for (const double frequency : Frequencies(c.rotary_dim)) {
    steps.push_back(RopeStep(frequency));
  }
  RopeArgs params;
  params.q = {t.q.data(), 3 * c.head_dim + 5, 3, c.head_dim};
  params.k = {t.k.data(), 2 * c.head_dim, 2, c.head_dim};
  params.num_tokens = tokens;
  params.positions = kPositions.data();
  params.steps = steps.data();
  params.rotary_dim = c.rotary_dim;
  params.pairing = c.pairing;
  params.attention_factor = c.factor;
  KVASIR_EXPECT_OK(PrepareAndRun(test, params));
  return t;
}

class RopeTest : public ::testing::TestWithParam<Case> {};

TEST_P(RopeTest, MatchesTheDefinitionAtAnyPositionOnEveryBackEnd) {
  const Case& c = GetParam();
  TestStream reference(1, CpuBackend::kReference);
  const Tensors truth = Rotate(reference, c);
  const int64_t row = 3 * c.head_dim + 5;
  std::vector<float> expected =
      RandomFloats(static_cast<int64_t>(kPositions.size()) * row, 1);
  const auto frequencies = Frequencies(c.rotary_dim);
  const int64_t pairs = c.rotary_dim / 2;
  for (size_t t = 0; t < kPositions.size(); ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t f = 0; f < pairs; ++f) {
        const bool halves = c.pairing == RopePairing::kHalfSplit;
        const auto first =
            static_cast<size_t>(static_cast<int64_t>(t) * row + h * c.head_dim +
                                (halves ? f : 2 * f));
        const size_t second = first + static_cast<size_t>(halves ? pairs : 1);
        // In double, an angle of 9,999,999 radians is exact to 2e-9.
        const double angle = static_cast<double>(kPositions[t]) *
                             frequencies[static_cast<size_t>(f)];
        const double factor = static_cast<double>(c.factor);
        const double a = static_cast<double>(expected[first]);
        const double b = static_cast<double>(expected[second]);
        ASSERT_NEAR(factor * (a * std::cos(angle) - b * std::sin(angle)),
                    static_cast<double>(truth.q[first]), 1e-6);
        ASSERT_NEAR(factor * (b * std::cos(angle) + a * std::sin(angle)),
                    static_cast<double>(truth.q[second]), 1e-6);
        expected[first] = truth.q[first];
        expected[second] = truth.q[second];
      }
    }
  }
  // Numbers that belong to no pair have not changed.
  EXPECT_TRUE(SameBits(expected, truth.q));
  TestStream three(3);
  ForEachSimdTarget([&] {
    const Tensors got = Rotate(three, c);
    EXPECT_TRUE(SameBits(truth.q, got.q));
    EXPECT_TRUE(SameBits(truth.k, got.k));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RopeTest,
    ::testing::Values(Case{64, 64, RopePairing::kHalfSplit, 1.0f},
                      Case{64, 64, RopePairing::kInterleaved, 1.0f},
                      Case{80, 20, RopePairing::kHalfSplit, 1.25f},
                      Case{33, 6, RopePairing::kInterleaved, 1.0f},
                      Case{2048, 2048, RopePairing::kHalfSplit, 1.0f}));

// Rows of q and k in which each head has its own list of pairs. The numbers
// between the heads belong to no head.
struct ChosenHeads {
  std::vector<std::vector<int32_t>> lists;  // one for each KV head
  std::vector<RopeHead> q;
  std::vector<RopeHead> k;
  int64_t q_stride = 0;
  int64_t k_stride = 0;
};

constexpr int64_t kQueriesPerKey = 3;

ChosenHeads MakeHeads(std::vector<std::vector<int32_t>> lists) {
  ChosenHeads heads;
  heads.lists = std::move(lists);
  for (const std::vector<int32_t>& list : heads.lists) {
    const auto pairs = static_cast<int64_t>(list.size());
    heads.k.push_back({heads.k_stride, pairs, list.data()});
    heads.k_stride += 2 * pairs + 3;
    for (int64_t i = 0; i < kQueriesPerKey; ++i) {
      heads.q.push_back({heads.q_stride + 1, pairs, list.data()});
      heads.q_stride += 2 * pairs + 2;
    }
  }
  // One head uses the first angles, as in a partial rotation.
  heads.q.push_back({heads.q_stride, 17, nullptr});
  heads.q_stride += 40;
  return heads;
}

struct Turned {
  std::vector<int64_t> positions;
  std::vector<double> frequencies;
  RopePairing pairing;
};

// Compares a rotated tensor with a float64 rotation of `before`.
void ExpectTurned(const std::vector<float>& before,
                  const std::vector<float>& after,
                  const std::vector<RopeHead>& heads, int64_t stride,
                  const Turned& turned) {
  const auto& [positions, frequencies, pairing] = turned;
  std::vector<float> expected = before;
  for (size_t t = 0; t < positions.size(); ++t) {
    for (const RopeHead& head : heads) {
      for (int64_t i = 0; i < head.num_pairs; ++i) {
        const bool halves = pairing == RopePairing::kHalfSplit;
        const auto first =
            static_cast<size_t>(static_cast<int64_t>(t) * stride + head.begin +
                                (halves ? i : 2 * i));
        const size_t second =
            first + static_cast<size_t>(halves ? head.num_pairs : 1);
        const int64_t f = head.pairs != nullptr ? head.pairs[i] : i;
        const double angle = static_cast<double>(positions[t]) *
                             frequencies[static_cast<size_t>(f)];
        const double a = static_cast<double>(before[first]);
        const double b = static_cast<double>(before[second]);
        ASSERT_NEAR(a * std::cos(angle) - b * std::sin(angle),
                    static_cast<double>(after[first]), 1e-6);
        ASSERT_NEAR(b * std::cos(angle) + a * std::sin(angle),
                    static_cast<double>(after[second]), 1e-6);
        expected[first] = after[first];
        expected[second] = after[second];
      }
    }
  }
  EXPECT_TRUE(SameBits(expected, after));
}

// Both functions return a list of pairs for each head. KeptPairs imitates a
// pruned model: each head keeps 19 of 64 pairs. ComplexChannels imitates
// complex channels: two heads of unequal size, in which several channels may
// use one angle.
std::vector<std::vector<int32_t>> KeptPairs() {
  std::vector<std::vector<int32_t>> lists(4);
  for (int32_t h = 0; h < 4; ++h) {
    for (int32_t i = 0; i < 19; ++i) {
      lists[static_cast<size_t>(h)].push_back(3 * i + (h + i) % 3);
    }
  }
  return lists;
}
std::vector<std::vector<int32_t>> ComplexChannels() {
  std::vector<std::vector<int32_t>> lists(2);
  for (int32_t f = 0; f < 64; ++f) {
    for (int32_t term = 0; term < f % 4; ++term) lists[0].push_back(f);
    if (f % 5 == 0) lists[1].push_back(f);
  }
  return lists;
}

struct HeadsCase {
  RopePairing pairing;
  int repeats;  // how often kPositions is repeated
};

class RopeHeadsTest : public ::testing::TestWithParam<HeadsCase> {};

TEST_P(RopeHeadsTest, EachChannelPairIsRotatedByItsOwnAngle) {
  constexpr int64_t kRotary = 128;
  Turned turned = {{}, Frequencies(kRotary), GetParam().pairing};
  for (int i = 0; i < GetParam().repeats; ++i) {
    turned.positions.insert(turned.positions.end(), kPositions.begin(),
                            kPositions.end());
  }
  std::vector<uint64_t> steps;
  for (const double frequency : turned.frequencies) {
    steps.push_back(RopeStep(frequency));
  }
  for (const auto& lists : {KeptPairs(), ComplexChannels()}) {
    const ChosenHeads heads = MakeHeads(lists);
    const auto tokens = static_cast<int64_t>(turned.positions.size());
    const Tensors before = {RandomFloats(tokens * heads.q_stride, 5),
                            RandomFloats(tokens * heads.k_stride, 6)};
    const auto rotate = [&](TestStream& test) {
      Tensors t = before;
      RopeArgs params;
      params.q = {t.q.data(), heads.q_stride,
                  static_cast<int64_t>(heads.q.size()), 0, heads.q.data()};
      params.k = {t.k.data(), heads.k_stride,
                  static_cast<int64_t>(heads.k.size()), 0, heads.k.data()};
      params.num_tokens = tokens;
      params.positions = turned.positions.data();
      params.steps = steps.data();
      params.rotary_dim = kRotary;
      params.pairing = turned.pairing;
      KVASIR_EXPECT_OK(PrepareAndRun(test, params));
      return t;
    };
    TestStream reference(1, CpuBackend::kReference);
    const Tensors truth = rotate(reference);
    ExpectTurned(before.q, truth.q, heads.q, heads.q_stride, turned);
    ExpectTurned(before.k, truth.k, heads.k, heads.k_stride, turned);
    TestStream three(3);
    ForEachSimdTarget([&] {
      const Tensors got = rotate(three);
      EXPECT_TRUE(SameBits(truth.q, got.q));
      EXPECT_TRUE(SameBits(truth.k, got.k));
    });
  }
}

// The last case has more numbers than the op gives to one thread.
INSTANTIATE_TEST_SUITE_P(
    Pairings, RopeHeadsTest,
    ::testing::Values(HeadsCase{RopePairing::kHalfSplit, 1},
                      HeadsCase{RopePairing::kInterleaved, 1},
                      HeadsCase{RopePairing::kHalfSplit, 5}));

TEST(RopeStepTest, TheStepEqualsTheFractionOfATurnPerPosition) {
  // M_PI has a relative error of at most 2^-53, so a step near 2^63 may be
  // wrong by 2^10. The test allows twice as much.
  const auto distance = [](uint64_t a, uint64_t b) {
    return std::min(a - b, b - a);
  };
  EXPECT_LE(distance(uint64_t{1} << 63, RopeStep(M_PI)), 2048u);
  EXPECT_LE(distance(uint64_t{1} << 62, RopeStep(M_PI / 2)), 1024u);
  EXPECT_LE(distance(uint64_t{3} << 62, RopeStep(-M_PI / 2)), 1024u);
  EXPECT_EQ(0u, RopeStep(0.0));
  // The step for one radian per position must be right to the precision of a
  // double.
  EXPECT_NEAR(1.0 / (2.0 * M_PI),
              static_cast<double>(RopeStep(1.0)) / 18446744073709551616.0,
              1e-16);
}

TEST(RopeRefusalTest, TheErrorNamesTheInvalidArgument) {
  TestStream test;
  const uint64_t steps[4] = {};
  RopeArgs params;
  params.steps = steps;
  params.rotary_dim = 7;
  EXPECT_THAT(PrepareAndRun(test, params),
              base::StatusIs(
                  absl::StatusCode::kInvalidArgument,
                  HasSubstr("rotary_dim must be even and above 0, but is 7")));
  params.rotary_dim = 8;
  params.q = {nullptr, 100, 2, 6};
  EXPECT_THAT(
      PrepareAndRun(test, params),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("head_dim: must be at least 8, but is 6")));
  const RopeHead head = {90, 6, nullptr};
  params.q = {nullptr, 100, 1, 0, &head};
  EXPECT_THAT(PrepareAndRun(test, params),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("row_stride: must be at least 102")));
}

TEST(RopeRefusalTest, TheErrorNamesAnAngleThatDoesNotExist) {
  TestStream test;
  const uint64_t steps[4] = {};
  RopeArgs params;
  params.steps = steps;
  params.rotary_dim = 8;
  const int32_t pairs[] = {0, 3, 1, 4};
  RopeHead heads[] = {{0, 3, pairs}, {6, 4, pairs}};
  params.q = {nullptr, 100, 2, 0, heads};
  const auto expect = [&](const char* why) {
    EXPECT_THAT(
        PrepareAndRun(test, params),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  expect("angle of a pair: must be from 0 to 3, but is 4");
  heads[1] = {6, 5, nullptr};
  expect(
      "pairs of a head without a list of angles: must be from 0 to 4, but is "
      "5");
  heads[1].num_pairs = 4;
  KVASIR_EXPECT_OK(PrepareAndRun(test, params));
}

}  // namespace
}  // namespace kvasir::kernels
