// Tests the kernels of mixtures of experts. Grouped products are compared with
// a product of each group. The choice of experts and the sum of their results
// are compared with the reference.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/left_out.h"
#include "kernels/experts/ops.h"
#include "kernels/linear/ops.h"

namespace kvasir::kernels::emulation {
namespace {

using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBf16};
const uint64_t kSeeds = Seeds();

struct GroupedCase {
  DType x;
  DType w;
  std::vector<int32_t> sizes;
  int64_t k;
  int64_t n;
};

std::vector<int32_t> FirstRows(const std::vector<int32_t>& sizes) {
  std::vector<int32_t> first = {0};
  for (const int32_t size : sizes) first.push_back(first.back() + size);
  return first;
}

struct GroupedDevice {
  GroupedDevice(const GroupedCase& c, EmulatedTest& test)
      : first(FirstRows(c.sizes)),
        w(test.PutNumbers(
            RandomFloats(static_cast<int64_t>(c.sizes.size()) * c.n * c.k, 1),
            c.w)),
        x(test.PutNumbers(RandomFloats(first.back() * c.k, 2), c.x)),
        y(test.PutNumbers(std::vector<float>(
                              static_cast<size_t>(first.back() * c.n), kPoison),
                          c.x)),
        rows(test.Put(first)) {
    params.x = x.as<float>();
    params.x_row_stride = c.k;
    params.num_rows = first.back();
    params.first_rows = rows.as<int32_t>();
    params.num_groups = static_cast<int64_t>(c.sizes.size());
    params.weight = {w.data(), c.k, c.n, c.w, WeightLayout::kRows};
    params.y = y.as<float>();
    params.y_row_stride = c.n;
    params.dtype = c.x;
  }
  std::vector<int32_t> first;
  DeviceBuffer w, x, y, rows;
  GroupedMatmulParams params;
};

std::vector<float> Grouped(const GroupedCase& c, EmulatedTest& test) {
  const GroupedDevice on(c, test);
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(GroupedMatmul(test.stream(), on.params, none));
  return test.GetNumbers(on.y, c.x);
}

// Computes the product of each group by matmul.
std::vector<float> OneByOne(const GroupedCase& c, EmulatedTest& test) {
  const GroupedDevice on(c, test);
  const int64_t bytes = DTypeBytes(c.x);
  for (size_t group = 0; group < c.sizes.size(); ++group) {
    const int64_t row = on.first[group];
    MatmulParams params;
    params.x = (on.x.as<char>() + row * c.k * bytes).as<const float>();
    params.x_row_stride = c.k;
    params.num_rows = c.sizes[group];
    params.weight = on.params.weight;
    params.weight.data =
        OffsetBytes(on.params.weight.data,
                    static_cast<int64_t>(group) * params.weight.bytes());
    params.y = (on.y.as<char>() + row * c.n * bytes).as<float>();
    params.y_row_stride = c.n;
    params.dtype = c.x;
    params.y_dtype = c.x;
    Workspace none(nullptr, 0);
    KVASIR_EXPECT_OK(Matmul(test.stream(), params, none));
  }
  return test.GetNumbers(on.y, c.x);
}

TEST(GroupedMatmulCudaTest,
     RowsHaveTheSameBitsAsInASeparateProductOfEachGroup) {
  for (const DType x : kDTypes) {
    for (const DType w : {x, DType::kBf16}) {
      for (const GroupedCase& c : {GroupedCase{x, w, {0, 0}, 8, 8},
                                   GroupedCase{x, w, {0, 0, 1, 0}, 40, 33},
                                   GroupedCase{x, w, {1, 2, 0, 17, 3}, 72, 64},
                                   GroupedCase{x, w, {70, 0, 130}, 37, 40},
                                   GroupedCase{x, w, {64}, 128, 32}}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(x) << " by " << DTypeName(w) << ", "
                     << c.sizes.size() << " groups");
        EmulatedTest test(3);
        EXPECT_TRUE(SameBits(OneByOne(c, test), Grouped(c, test)));
      }
    }
  }
}

TEST(GroupedMatmulCudaTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  for (const DType dtype : kDTypes) {
    const GroupedCase c = {dtype, dtype, {3, 0, 20, 1}, 45, 33};
    EmulatedTest first(1);
    const auto want = Grouped(c, first);
    for (uint64_t seed = 2; seed <= kSeeds; ++seed) {
      EmulatedTest test(seed);
      EXPECT_TRUE(SameBits(want, Grouped(c, test))) << "seed " << seed;
    }
  }
}

TEST(GroupedMatmulCudaTest, WeightsPackedInPanelsAreRefused) {
  EmulatedTest test;
  GroupedDevice on({DType::kF32, DType::kF32, {1}, 8, 8}, test);
  on.params.weight.layout = WeightLayout::kPanels32;
  Workspace none(nullptr, 0);
  EXPECT_THAT(GroupedMatmul(test.stream(), on.params, none),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("in rows on a GPU")));
}

struct Routed {
  std::vector<int32_t> experts, places, tokens, first_rows;
  std::vector<int64_t> load;
  std::vector<float> weights;
};

struct RouteCase {
  int64_t tokens;
  int64_t experts;
  int64_t top_k;
  bool normalize;
};

Routed Choose(const RouteCase& c, const std::vector<float>& logits,
              EmulatedTest& test) {
  const auto rows = static_cast<size_t>(c.tokens * c.top_k);
  const DeviceBuffer on = test.Put(logits);
  const DeviceBuffer experts = test.Put(std::vector<int32_t>(rows, -7));
  const DeviceBuffer places = test.Put(std::vector<int32_t>(rows, -7));
  const DeviceBuffer tokens = test.Put(std::vector<int32_t>(rows, -7));
  const DeviceBuffer weights = test.Put(std::vector<float>(rows, kPoison));
  const DeviceBuffer first_rows =
      test.Put(std::vector<int32_t>(static_cast<size_t>(c.experts + 1), -7));
  const DeviceBuffer load =
      test.Put(std::vector<int64_t>(static_cast<size_t>(c.experts), 100));
  RouteParams params;
  params.logits = on.as<float>();
  params.num_tokens = c.tokens;
  params.num_experts = c.experts;
  params.top_k = c.top_k;
  params.normalize = c.normalize;
  params.experts = experts.as<int32_t>();
  params.weights = weights.as<float>();
  params.places = places.as<int32_t>();
  params.tokens = tokens.as<int32_t>();
  params.first_rows = first_rows.as<int32_t>();
  params.load = load.as<int64_t>();
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(Route(test.stream(), params, none));
  return {test.Get<int32_t>(experts), test.Get<int32_t>(places),
          test.Get<int32_t>(tokens),  test.Get<int32_t>(first_rows),
          test.Get<int64_t>(load),    test.Get<float>(weights)};
}

Routed ByReference(const RouteCase& c, const std::vector<float>& logits) {
  const auto rows = static_cast<size_t>(c.tokens * c.top_k);
  Routed out;
  out.experts.resize(rows);
  out.places.resize(rows);
  out.tokens.resize(rows);
  out.weights.resize(rows);
  out.first_rows.resize(static_cast<size_t>(c.experts + 1));
  out.load.resize(static_cast<size_t>(c.experts), 100);
  RouteArgs args;
  args.logits = logits.data();
  args.num_tokens = c.tokens;
  args.num_experts = c.experts;
  args.top_k = c.top_k;
  args.normalize = c.normalize;
  args.experts = out.experts.data();
  args.weights = out.weights.data();
  args.places = out.places.data();
  args.tokens = out.tokens.data();
  args.first_rows = out.first_rows.data();
  args.load = out.load.data();
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      Route(reference.stream(), OnDevice(args), reference.workspace()));
  return out;
}

void ExpectRouted(const RouteCase& c, const std::vector<float>& logits,
                  uint64_t seed) {
  SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.top_k
                                  << " of " << c.experts << ", seed " << seed);
  EmulatedTest test(seed);
  const Routed want = ByReference(c, logits);
  const Routed got = Choose(c, logits, test);
  EXPECT_EQ(want.experts, got.experts);
  EXPECT_EQ(want.places, got.places);
  EXPECT_EQ(want.tokens, got.tokens);
  EXPECT_EQ(want.first_rows, got.first_rows);
  EXPECT_EQ(want.load, got.load);
  for (size_t i = 0; i < want.weights.size(); ++i) {
    if (std::isnan(want.weights[i])) {
      EXPECT_TRUE(std::isnan(got.weights[i]));
    } else {
      EXPECT_NEAR(got.weights[i], want.weights[i], 1e-5 * want.weights[i]);
    }
  }
}

TEST(RouteCudaTest, TheChosenExpertsEqualThoseOfTheReference) {
  uint64_t seed = 1;
  for (const bool normalize : {true, false}) {
    for (const RouteCase& c :
         {RouteCase{0, 3, 2, normalize}, RouteCase{1, 1, 1, normalize},
          RouteCase{1, 8, 2, normalize}, RouteCase{13, 7, 7, normalize},
          RouteCase{9, 33, 1, normalize}, RouteCase{21, 70, 5, normalize}}) {
      ExpectRouted(c, RandomFloats(c.tokens * c.experts, 5, 4.0f), seed++);
    }
  }
}

TEST(RouteCudaTest, TiesNanAndInfinitiesAreOrderedAsOnTheCpu) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ExpectRouted({3, 5, 2, true},
               {1, 2, 1, 2, 2, 1, 1, 1, 1, 1, 0, -0.0f, 0, -1, -1}, 1);
  ExpectRouted({3, 3, 2, false},
               {kPoison, kPoison, kPoison, 1, kPoison, 3, 3e38f, -kInfinity, 2},
               2);
}

TEST(RouteCudaTest, TheBitsDoNotDependOnTheOrderInWhichThreadsRun) {
  const RouteCase c = {11, 40, 3, true};
  const auto logits = RandomFloats(c.tokens * c.experts, 6);
  EmulatedTest first(1);
  const Routed want = Choose(c, logits, first);
  for (uint64_t seed = 2; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    const Routed got = Choose(c, logits, test);
    EXPECT_TRUE(SameBits(want.weights, got.weights)) << "seed " << seed;
    EXPECT_EQ(want.places, got.places) << "seed " << seed;
  }
}

struct MixCase {
  DType dtype;
  int64_t tokens;
  int64_t top_k;
  int64_t columns;
};

void ExpectMixed(const MixCase& c, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << c.tokens << " tokens of " << c.columns
                                  << " " << DTypeName(c.dtype));
  const int64_t rows = c.tokens * c.top_k;
  const auto y = Rounded(RandomFloats(rows * c.columns, 1), c.dtype);
  const auto weights = RandomFloats(rows, 2);
  std::vector<int32_t> places(static_cast<size_t>(rows));
  std::iota(places.rbegin(), places.rend(), 0);
  std::vector<float> want(static_cast<size_t>(c.tokens * c.columns), kPoison);
  MixExpertsArgs args;
  args.y = y.data();
  args.weights = weights.data();
  args.places = places.data();
  args.out = want.data();
  args.num_tokens = c.tokens;
  args.top_k = c.top_k;
  args.columns = c.columns;
  TestStream reference(1, CpuBackend::kReference);
  KVASIR_EXPECT_OK(
      MixExperts(reference.stream(), OnDevice(args), reference.workspace()));
  EmulatedTest test(seed);
  const DeviceBuffer on_y = test.PutNumbers(y, c.dtype);
  const DeviceBuffer on_weights = test.Put(weights);
  const DeviceBuffer on_places = test.Put(places);
  const DeviceBuffer out =
      test.PutNumbers(std::vector<float>(want.size(), kPoison), c.dtype);
  MixExpertsParams params;
  params.y = on_y.as<float>();
  params.weights = on_weights.as<float>();
  params.places = on_places.as<int32_t>();
  params.out = out.as<float>();
  params.num_tokens = c.tokens;
  params.top_k = c.top_k;
  params.columns = c.columns;
  params.dtype = c.dtype;
  Workspace none(nullptr, 0);
  KVASIR_EXPECT_OK(MixExperts(test.stream(), params, none));
  EXPECT_LE(WorstError(want, test.GetNumbers(out, c.dtype), c.columns),
            ToleranceOf(c.dtype));
}

TEST(MixExpertsCudaTest, SumsEqualTheReferenceWithinTheToleranceOfTheType) {
  for (const DType dtype : kDTypes) {
    ExpectMixed({dtype, 0, 2, 8}, 1);
    ExpectMixed({dtype, 1, 1, 1}, 2);
    ExpectMixed({dtype, 3, 2, 37}, 3);
    ExpectMixed({dtype, 5, 4, 64}, 4);
  }
}

}  // namespace
}  // namespace kvasir::kernels::emulation
