#include <gmock/gmock.h>

#include <cstring>
#include <limits>
#include <vector>

#include "kernels/op_test_util.h"
#include "kernels/ops.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPageTokens = 4;
constexpr int64_t kGroups = 2;
constexpr int64_t kWidth = 37;
constexpr int64_t kPages = 5;

// A side whose regions lie apart, in memory of a known byte.
struct Side {
  explicit Side(DType dtype) {
    view.dtype = dtype;
    view.width = kWidth;
    view.num_groups = kGroups;
    view.slot_stride_bytes = (kWidth + 1) * DTypeBytes(dtype);
    view.page_bytes = 2000;
    view.group_offset_bytes = offsets;
    memory.assign(static_cast<size_t>(kPages * view.page_bytes), '\x55');
    view.arena = memory.data();
  }
  const int64_t offsets[kGroups] = {16, 1000};
  std::vector<char> memory;
  KvSideView view;
};

class KvAppendTest : public ::testing::TestWithParam<DType> {};

TEST_P(KvAppendTest, WritesRoundedRowsToTheirSlotsAndNothingElse) {
  const std::vector<int64_t> slots = {3, -1, 17, 8, 0};
  const auto tokens = static_cast<int64_t>(slots.size());
  auto key = RandomFloats(tokens * kGroups * kWidth, 1);
  auto value = RandomFloats(tokens * (kGroups * kWidth + 3), 2);
  key[5] = std::numeric_limits<float>::quiet_NaN();
  key[6] = 1e-7f;  // subnormal as a half
  key[7] = -3e38f;
  Side expected_key(GetParam());
  Side expected_value(DType::kF32);
  VisitDType(GetParam(), [&](auto type) {
    using T = decltype(type);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t slot = slots[static_cast<size_t>(t)];
      if (slot < 0) continue;
      for (int64_t i = 0; i < kGroups * kWidth; ++i) {
        const T number =
            FromFloat<T>(key[static_cast<size_t>(t * kGroups * kWidth + i)]);
        std::memcpy(SlotAddress(expected_key.view, slot / kPageTokens,
                                i / kWidth, slot % kPageTokens) +
                        i % kWidth * static_cast<int64_t>(sizeof(T)),
                    &number, sizeof(T));
        std::memcpy(SlotAddress(expected_value.view, slot / kPageTokens,
                                i / kWidth, slot % kPageTokens) +
                        i % kWidth * 4,
                    &value[static_cast<size_t>(t * (kGroups * kWidth + 3) + i)],
                    4);
      }
    }
  });
  const auto check = [&](TestStream& test) {
    Side key_side(GetParam());
    Side value_side(DType::kF32);
    KvAppendParams params;
    params.key = key.data();
    params.value = value.data();
    params.key_row_stride = kGroups * kWidth;
    params.value_row_stride = kGroups * kWidth + 3;
    params.slots = slots.data();
    params.num_tokens = tokens;
    params.page_tokens = kPageTokens;
    params.key_view = key_side.view;
    params.value_view = value_side.view;
    KVASIR_ASSERT_OK(KvAppend(test.stream(), params, test.workspace()));
    EXPECT_EQ(expected_key.memory, key_side.memory);
    EXPECT_EQ(expected_value.memory, value_side.memory);
  };
  TestStream reference(1, CpuBackend::kReference);
  check(reference);
  TestStream two(2);
  ForEachSimdTarget([&] { check(two); });
}

INSTANTIATE_TEST_SUITE_P(DTypes, KvAppendTest,
                         ::testing::Values(DType::kF32, DType::kF16,
                                           DType::kBf16));

TEST(KvAppendRefusalTest, NamesWhatIsWrong) {
  Side side(DType::kBf16);
  KvAppendParams params;
  params.page_tokens = kPageTokens;
  params.key_view = side.view;
  params.value_view = side.view;
  params.key_row_stride = kGroups * kWidth;
  params.value_row_stride = kWidth;
  TestStream test;
  EXPECT_THAT(KvAppend(test.stream(), params, test.workspace()),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("row_stride: want at least 74")));
}

}  // namespace
}  // namespace kvasir::kernels
