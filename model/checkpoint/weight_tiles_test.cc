#include "model/checkpoint/weight_tiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "proto/kvasir/v1/weight_tiles.pb.h"

namespace kvasir::model {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TensorInfo Info(int64_t rows, int64_t columns) {
  TensorInfo info;
  info.type = TensorType::kBF16;
  info.shape = {rows, columns};
  info.size_bytes = static_cast<uint64_t>(2 * rows * columns);
  return info;
}

MATCHER_P(Holds, id, "") {
  *result_listener << arg.status().ToString();
  return arg.ok() && *arg == id;
}

// kMatrix has two by two tiles, and kVector has one.
const TensorInfo kMatrix = Info(kTileRows + 1, kTileRowBytes / 2 + 1);
const TensorInfo kVector = Info(10, 1);

// Returns tiles whose hashes are their indices in the tensor: `first`, first +
// step, and so on.
Tiles TilesAt(int64_t rows, int64_t columns, uint64_t first, uint64_t step) {
  Tiles tiles{.rows = rows, .columns = columns, .hashes = {}};
  for (int64_t i = 0; i < rows * columns; ++i) {
    tiles.hashes.push_back({first + step * static_cast<uint64_t>(i), 7});
  }
  return tiles;
}

DecoderSpec Spec() {
  DecoderSpec spec;
  spec.architecture = "Some";
  return spec;
}

// Returns the tiles that one of two ranks has read: rank 0 the left column of
// the matrix, rank 1 the right column, and both the vector.
WeightsIdBuilder HalfOf(int64_t rank) {
  WeightsIdBuilder builder;
  builder.Add("matrix", kMatrix, TilesAt(2, 1, static_cast<uint64_t>(rank), 2),
              0, rank);
  builder.Add("vector", kVector, TilesAt(1, 1, 9, 0));
  return builder;
}

std::string TextOf(const WeightsIdBuilder& builder) {
  return WeightTilesText(builder.tensors(), Spec());
}

TEST(WeightTilesTest, TheWeightsIdOfSeveralRanksEqualsThatOfASingleRank) {
  WeightsIdBuilder one;
  one.Add("matrix", kMatrix, TilesAt(2, 2, 0, 1));
  one.Add("vector", kVector, TilesAt(1, 1, 9, 0));
  const std::string id = one.Finish(Spec());
  EXPECT_THAT(CombineWeightTiles({TextOf(one)}), Holds(id));
  EXPECT_THAT(CombineWeightTiles({TextOf(HalfOf(0)), TextOf(HalfOf(1))}),
              Holds(id));
  EXPECT_THAT(CombineWeightTiles({TextOf(HalfOf(1)), TextOf(HalfOf(0))}),
              Holds(id));
}

TEST(WeightTilesTest, AChangedTileHashOfOneRankChangesTheWeightsId) {
  WeightsIdBuilder other;
  other.Add("matrix", kMatrix, TilesAt(2, 1, 1, 3), 0, 1);
  other.Add("vector", kVector, TilesAt(1, 1, 9, 0));
  const auto id = CombineWeightTiles({TextOf(HalfOf(0)), TextOf(HalfOf(1))});
  const auto changed = CombineWeightTiles({TextOf(HalfOf(0)), TextOf(other)});
  KVASIR_ASSERT_OK(id);
  KVASIR_ASSERT_OK(changed);
  EXPECT_NE(*id, *changed);
}

TEST(WeightTilesTest, GeneratedWeightsMustHaveTheSameIdOnAllRanks) {
  const std::string made = WeightTilesText("random");
  EXPECT_THAT(CombineWeightTiles({made, made}), Holds("random"));
  EXPECT_THAT(CombineWeightTiles({made, WeightTilesText("other")}),
              base::StatusIs(absl::StatusCode::kFailedPrecondition,
                             AllOf(HasSubstr("rank 1"), HasSubstr("other"))));
}

TEST(WeightTilesTest, TheErrorForConflictingTilesNamesTheTensorAndTheRanks) {
  WeightsIdBuilder other = HalfOf(1);
  WeightsIdBuilder changed;
  changed.Add("matrix", kMatrix, TilesAt(2, 1, 1, 2), 0, 1);
  changed.Add("vector", kVector, TilesAt(1, 1, 8, 0));
  EXPECT_THAT(
      CombineWeightTiles({TextOf(HalfOf(0)), TextOf(other), TextOf(changed)}),
      base::StatusIs(
          absl::StatusCode::kFailedPrecondition,
          HasSubstr("rank 2: tensor vector, tile 0, 0: it has read other bytes "
                    "than rank 1")));
}

TEST(WeightTilesTest, ATileThatNoRankHasReadIsReported) {
  WeightsIdBuilder part;
  part.AddTensor("matrix", kMatrix);
  part.Add("vector", kVector, TilesAt(1, 1, 9, 0));
  EXPECT_THAT(
      CombineWeightTiles({TextOf(HalfOf(0)), TextOf(part)}),
      base::StatusIs(
          absl::StatusCode::kFailedPrecondition,
          HasSubstr(
              "tensor matrix: no rank has read some of its 2 x 2 tiles")));
  // The number of hashes equals the number of tiles, but one tile comes twice
  // and another is missing.
  part.Add("matrix", kMatrix, TilesAt(1, 1, 0, 0), 0, 0);
  part.Add("matrix", kMatrix, TilesAt(1, 1, 1, 0), 0, 1);
  EXPECT_THAT(
      CombineWeightTiles({TextOf(HalfOf(0)), TextOf(part)}),
      base::StatusIs(absl::StatusCode::kFailedPrecondition,
                     HasSubstr("tensor matrix: no rank has read tile 1, 1")));
}

TEST(WeightTilesTest, TensorsThatDifferBetweenRanksAreReported) {
  const auto refused = [](const WeightsIdBuilder& other, const char* text) {
    EXPECT_THAT(
        CombineWeightTiles({TextOf(HalfOf(0)), TextOf(other)}),
        base::StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text)));
  };
  WeightsIdBuilder more = HalfOf(1);
  more.AddTensor("wrong", kVector);
  refused(more, "rank 1: tensor wrong is not on rank 0");
  more = HalfOf(1);
  more.AddTensor("net", kVector);
  refused(more,
          "rank 1: tensor net: rank 0 has sent another tensor at this place of "
          "its list, vector");
  WeightsIdBuilder fewer;
  fewer.AddTensor("matrix", kMatrix);
  refused(fewer, "rank 1: tensor vector is missing");
  WeightsIdBuilder wide = fewer;
  wide.AddTensor("vector", Info(10, 2));
  refused(wide, "rank 1: tensor vector is BF16 [10, 2]");
}

TEST(WeightTilesTest, MalformedWeightTilesMessagesAreRefused) {
  const auto refused = [](const std::string& text, const char* why) {
    EXPECT_THAT(CombineWeightTiles({TextOf(HalfOf(0)), text}),
                base::StatusIs(absl::StatusCode::kInvalidArgument,
                               AllOf(HasSubstr("rank 1"), HasSubstr(why))));
  };
  refused("no message", "10 bytes that are not a WeightTiles message");
  refused("", "version 0");
  const std::string good = TextOf(HalfOf(1));
  refused(good.substr(0, good.size() - 1), "not a WeightTiles message");
  kvasir::v1::WeightTiles tiles;
  const auto changed = [&](const auto& change) {
    tiles.ParseFromString(good);
    change(tiles.mutable_tensors(0)->mutable_runs(0));
    return tiles.SerializeAsString();
  };
  refused(changed([](auto* run) { run->set_first(~uint64_t{0}); }),
          "matrix: the hashes that start at tile 18446744073709551615 have 16 "
          "bytes");
  refused(changed([](auto* run) { run->mutable_hashes()->append("x"); }),
          "have 17 bytes");
  refused(changed([](auto* run) { run->mutable_hashes()->resize(80); }),
          "does not fit a tensor of 4 tiles");
  EXPECT_THAT(
      CombineWeightTiles({}),
      base::StatusIs(absl::StatusCode::kInvalidArgument,
                     HasSubstr("no rank has sent a WeightTiles message")));
}

TEST(WeightTilesTest,
     ATensorThatClaimsTooManyTilesIsRefusedBeforeMemoryIsAllocated) {
  kvasir::v1::WeightTiles tiles;
  tiles.ParseFromString(TextOf(HalfOf(0)));
  for (const uint64_t size : {uint64_t{1} << 20, uint64_t{1} << 63}) {
    tiles.mutable_tensors(0)->set_rows(size);
    tiles.mutable_tensors(0)->set_columns(size);
    const std::string text = tiles.SerializeAsString();
    EXPECT_THAT(
        CombineWeightTiles({text, text}),
        base::StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("tensor matrix: no rank has read some")));
  }
}

}  // namespace
}  // namespace kvasir::model
