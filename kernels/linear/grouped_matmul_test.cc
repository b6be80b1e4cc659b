#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "kernels/linear/ops.h"
#include "kernels/linear/pack.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// Weights of several groups, packed one after the other.
struct Weights {
  Weights(int64_t groups, int64_t k, int64_t n, DType dtype)
      : packed(std::vector<float>(
                   static_cast<size_t>(groups * ((n + 31) / 32) * 32 * k),
                   kPoison),
               dtype) {
    view.k = k;
    view.n = n;
    view.dtype = dtype;
    view.data = packed.data();
    for (int64_t group = 0; group < groups; ++group) {
      StoredArray rows(RandomFloats(n * k, static_cast<uint32_t>(50 + group)),
                       dtype);
      const PackedMatrixArgs one = Group(group);
      auto* const memory = const_cast<void*>(one.data);
      KVASIR_EXPECT_OK(PackRows(OnDevice(one), {rows.data(), n, k}, 0, memory));
      ZeroPadding(OnDevice(one), memory);
    }
  }
  PackedMatrixArgs Group(int64_t group) const {
    PackedMatrixArgs one = view;
    one.data = OffsetBytes(view.data, group * view.bytes());
    return one;
  }
  StoredArray packed;
  PackedMatrixArgs view;
};

struct Case {
  std::string name;
  std::vector<int32_t> sizes;  // the rows of each group
  int64_t k;
  int64_t n;
  DType dtype;

  int64_t groups() const { return static_cast<int64_t>(sizes.size()); }
  int64_t rows() const {
    int64_t sum = 0;
    for (const int32_t size : sizes) sum += size;
    return sum;
  }
};

std::vector<float> MultiplyGroups(TestStream& test, const Case& c,
                                  const Weights& weights,
                                  const std::vector<float>& x) {
  std::vector<float> y(static_cast<size_t>(c.rows() * c.n), kPoison);
  std::vector<int32_t> first = {0};
  for (const int32_t size : c.sizes) first.push_back(first.back() + size);
  GroupedMatmulArgs params;
  params.x = x.data();
  params.x_row_stride = c.k;
  params.num_rows = c.rows();
  params.first_rows = first.data();
  params.num_groups = c.groups();
  params.weight = weights.view;
  params.y = y.data();
  params.y_row_stride = c.n;
  KVASIR_EXPECT_OK(
      GroupedMatmul(test.stream(), OnDevice(params), test.workspace()));
  return y;
}

class GroupedMatmulTest : public ::testing::TestWithParam<Case> {};

TEST_P(GroupedMatmulTest, EachRowHasTheBitsOfMatmulWithTheWeightOfItsGroup) {
  const Case& c = GetParam();
  const Weights weights(c.groups(), c.k, c.n, c.dtype);
  const std::vector<float> x = RandomFloats(c.rows() * c.k, 2);
  TestStream reference(1, CpuBackend::kReference);
  std::vector<float> expected;
  int64_t row = 0;
  for (int64_t group = 0; group < c.groups(); ++group) {
    const int64_t rows = c.sizes[static_cast<size_t>(group)];
    std::vector<float> y(static_cast<size_t>(rows * c.n), kPoison);
    MatmulArgs params;
    params.x = x.data() + row * c.k;
    params.x_row_stride = c.k;
    params.num_rows = rows;
    params.weight = weights.Group(group);
    params.y = y.data();
    params.y_row_stride = c.n;
    KVASIR_ASSERT_OK(
        Matmul(reference.stream(), OnDevice(params), reference.workspace()));
    expected.insert(expected.end(), y.begin(), y.end());
    row += rows;
  }
  EXPECT_TRUE(SameBits(expected, MultiplyGroups(reference, c, weights, x)));
  TestStream one(1);
  TestStream three(3);
  ForEachSimdTarget([&] {
    EXPECT_TRUE(SameBits(expected, MultiplyGroups(one, c, weights, x)));
    EXPECT_TRUE(SameBits(expected, MultiplyGroups(three, c, weights, x)));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GroupedMatmulTest,
    ::testing::Values(
        Case{"NoRows", {0, 0, 0}, 8, 8, DType::kF32},
        Case{"OneRow", {0, 0, 1, 0, 0}, 65, 33, DType::kBf16},
        Case{"OneGroup", {50}, 257, 100, DType::kBf16},
        Case{"Small", {1, 2, 0, 1, 3, 1, 0}, 300, 70, DType::kBf16},
        Case{"Uneven", {0, 90, 1, 0, 37, 13}, 270, 96, DType::kF16},
        Case{"FewPanels", {200, 3, 150}, 129, 17, DType::kF32}),
    [](const auto& tested) { return tested.param.name; });

TEST(GroupedMatmulCounterTest, WeightsOfGroupsWithoutRowsAreNotRead) {
  const Case c = {"", {0, 2, 0, 1}, 64, 32, DType::kBf16};
  const Weights weights(4, c.k, c.n, c.dtype);
  TestStream test(2);
  MultiplyGroups(test, c, weights, RandomFloats(3 * c.k, 3));
  EXPECT_EQ(2 * 64 * 32 * 2, test.stream().weight_bytes_read());
}

TEST(GroupedMatmulRefusalTest, TheErrorNamesTheInvalidArgument) {
  const Weights weights(1, 8, 8, DType::kF32);
  GroupedMatmulArgs params;
  params.weight = weights.view;
  params.x_row_stride = 8;
  params.y_row_stride = 8;
  TestStream test;
  const auto refused = [&](const char* text) {
    EXPECT_THAT(
        GroupedMatmul(test.stream(), OnDevice(params), test.workspace()),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refused("grouped_matmul: groups: must be at least 1, but is 0");
  params.num_groups = 1;
  params.num_rows = -1;
  refused("rows: must be at least 0, but is -1");
  params.num_rows = 0;
  KVASIR_EXPECT_OK(
      GroupedMatmul(test.stream(), OnDevice(params), test.workspace()));
  params.x_row_stride = 7;
  refused("x_row_stride: must be at least 8, but is 7");
  params.x_row_stride = 8;
  params.y_row_stride = 7;
  refused("y_row_stride: must be at least 8, but is 7");
  params.y_row_stride = 8;
  params.weight.layout = WeightLayout::kRows;
  refused("must be in panels of 32 columns on the CPU, not in rows");
  params.weight.layout = WeightLayout::kPanels32;
  params.weight.k = 0;
  refused("k: must be at least 1, but is 0");
  params.weight.k = 8;
  char little[64];
  Workspace small(OnDevice(little), sizeof(little));
  EXPECT_THAT(GroupedMatmul(test.stream(), OnDevice(params), small),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             HasSubstr("workspace")));
}

}  // namespace
}  // namespace kvasir::kernels
