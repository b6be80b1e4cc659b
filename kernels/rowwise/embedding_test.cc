#include <gmock/gmock.h>

#include <vector>

#include "kernels/linear/pack.h"
#include "kernels/rowwise/ops.h"
#include "kernels/testing/op_test_util.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

class EmbeddingTest : public ::testing::TestWithParam<DType> {};

TEST_P(EmbeddingTest, RowsAreReadFromTheTableOrFromTheTiedOutputHead) {
  constexpr int64_t kVocab = 75;
  constexpr int64_t kHidden = 99;
  StoredArray table(RandomFloats(kVocab * kHidden, 1), GetParam());
  PackedMatrixArgs head;
  head.k = kHidden;
  head.n = kVocab;
  head.dtype = GetParam();
  std::vector<char> memory(static_cast<size_t>(head.bytes()));
  KVASIR_ASSERT_OK(PackRows(OnDevice(head), {table.data(), kVocab, kHidden}, 0,
                            memory.data()));
  head.data = memory.data();
  const std::vector<int32_t> ids = {0, 74, 31, 32, 31, -1, 75};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(2, backend);
    ForEachSimdTarget([&] {
      for (const bool packed : {false, true}) {
        for (const float scale : {1.0f, 5.4772256f}) {
          std::vector<float> out(ids.size() * kHidden, kPoison);
          EmbeddingArgs params;
          params.ids = ids.data();
          params.num_tokens = static_cast<int64_t>(ids.size());
          params.vocab = kVocab;
          params.hidden = kHidden;
          params.table = packed ? nullptr : table.data();
          params.table_dtype = GetParam();
          params.packed = packed ? head : PackedMatrixArgs();
          params.out = out.data();
          params.scale = scale;
          KVASIR_ASSERT_OK(
              Embedding(test.stream(), OnDevice(params), test.workspace()));
          for (size_t i = 0; i < out.size(); ++i) {
            const int32_t id = ids[i / kHidden];
            const bool valid = id >= 0 && id < kVocab;
            ASSERT_EQ(valid
                          ? scale * table.at(id * kHidden +
                                             static_cast<int64_t>(i % kHidden))
                          : 0.0f,
                      out[i]);
          }
        }
      }
    });
  }
}

TEST_P(EmbeddingTest, LearnedPositionEmbeddingsAreAdded) {
  constexpr int64_t kVocab = 5;
  constexpr int64_t kHidden = 37;
  constexpr int64_t kPositions = 9;
  const auto table = RandomFloats(kVocab * kHidden, 1);
  StoredArray positions(RandomFloats(kPositions * kHidden, 2), GetParam());
  const std::vector<int32_t> ids = {0, 4, 4, 2, 1};
  // The last two positions are outside the position table.
  const std::vector<int64_t> at = {0, 8, 3, 9, -1};
  for (const CpuBackend backend : {CpuBackend::kReference, CpuBackend::kSimd}) {
    TestStream test(2, backend);
    ForEachSimdTarget([&] {
      std::vector<float> out(ids.size() * kHidden, kPoison);
      EmbeddingArgs params;
      params.ids = ids.data();
      params.num_tokens = static_cast<int64_t>(ids.size());
      params.vocab = kVocab;
      params.hidden = kHidden;
      params.table = table.data();
      params.position_table = positions.data();
      params.position_dtype = GetParam();
      params.num_positions = kPositions;
      params.positions = at.data();
      params.out = out.data();
      KVASIR_ASSERT_OK(
          Embedding(test.stream(), OnDevice(params), test.workspace()));
      for (size_t t = 0; t < ids.size(); ++t) {
        for (int64_t i = 0; i < kHidden; ++i) {
          float want = table[static_cast<size_t>(ids[t] * kHidden + i)];
          if (t < 3) want += positions.at(at[t] * kHidden + i);
          ASSERT_EQ(want, out[t * kHidden + static_cast<size_t>(i)]);
        }
      }
    });
  }
}

// If a table is split over ranks, each id is in the table of one rank only, and
// the sum of all ranks' rows must be the row of the whole table.
TEST_P(EmbeddingTest, TokenIdsOutsideTheTableGiveRowsOfZeros) {
  constexpr int64_t kVocab = 75;
  constexpr int64_t kHidden = 99;
  StoredArray table(RandomFloats(kVocab * kHidden, 1), GetParam());
  const std::vector<int32_t> ids = {0, 31, 32, 33, 63, 64, 74, 75, -1};
  struct Part {
    int64_t first;
    int64_t count;
  };
  for (const Part part :
       {Part{0, 32}, Part{32, 32}, Part{64, 11}, Part{75, 0}}) {
    const auto* const rows = static_cast<const char*>(table.data()) +
                             part.first * kHidden * DTypeBytes(GetParam());
    PackedMatrixArgs head;
    head.k = kHidden;
    head.n = part.count;
    head.dtype = GetParam();
    std::vector<char> memory(static_cast<size_t>(head.bytes()));
    if (part.count > 0) {
      KVASIR_ASSERT_OK(PackRows(OnDevice(head), {rows, part.count, kHidden}, 0,
                                memory.data()));
    }
    head.data = memory.data();
    for (const CpuBackend backend :
         {CpuBackend::kReference, CpuBackend::kSimd}) {
      TestStream test(2, backend);
      for (const bool packed : {false, true}) {
        std::vector<float> out(ids.size() * kHidden, kPoison);
        EmbeddingArgs params;
        params.ids = ids.data();
        params.num_tokens = static_cast<int64_t>(ids.size());
        params.first_id = part.first;
        params.vocab = part.count;
        params.hidden = kHidden;
        params.table = packed ? nullptr : rows;
        params.table_dtype = GetParam();
        params.packed = packed ? head : PackedMatrixArgs();
        params.out = out.data();
        KVASIR_ASSERT_OK(
            Embedding(test.stream(), OnDevice(params), test.workspace()));
        for (size_t i = 0; i < out.size(); ++i) {
          const int32_t id = ids[i / kHidden];
          const bool here = id >= part.first && id < part.first + part.count;
          ASSERT_EQ(
              here ? table.at(id * kHidden + static_cast<int64_t>(i % kHidden))
                   : 0.0f,
              out[i]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, EmbeddingTest,
                         ::testing::Values(DType::kF32, DType::kF16,
                                           DType::kBf16));

TEST(EmbeddingRefusalTest, TheErrorNamesTheWrongShapeOfAPackedTable) {
  EmbeddingArgs params;
  params.vocab = 10;
  params.hidden = 4;
  params.packed.n = 10;
  params.packed.k = 5;
  TestStream test;
  EXPECT_THAT(
      Embedding(test.stream(), OnDevice(params), test.workspace()),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("is [10, 5], but must be [vocab, hidden] = [10, 4]")));
}

TEST(EmbeddingRefusalTest,
     TheErrorNamesAPackedTableInTheLayoutOfAnotherDevice) {
  EmbeddingArgs params;
  params.vocab = 10;
  params.hidden = 4;
  params.packed.n = 10;
  params.packed.k = 4;
  params.packed.layout = WeightLayout::kRows;
  TestStream test;
  EXPECT_THAT(
      Embedding(test.stream(), OnDevice(params), test.workspace()),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("packed table has the weight layout of another kind")));
}

}  // namespace
}  // namespace kvasir::kernels
