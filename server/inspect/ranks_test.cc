// Tests of inspect's table of tensor-parallel ranks.
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "server/inspect/report.h"
#include "server/inspect/test_plans.h"
#include "summary/rank_summary.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

absl::StatusOr<InspectReport> ReportWithRanks(const ModelSource& source,
                                              int64_t tp) {
  return MakeInspectReport(source, {.page_tokens = 16, .tp = tp});
}

RankSummary RanksOf(const ModelSource& source, int64_t tp) {
  auto report = ReportWithRanks(source, tp);
  KVASIR_EXPECT_OK(report);
  EXPECT_TRUE(report.ok() && report->ranks.has_value());
  return report.ok() ? report->ranks.value_or(RankSummary{}) : RankSummary{};
}

ModelSource Whole() { return SourceWith(kFullKey, kFullValue); }

// A model in which one bf16 latent of 12 channels serves the values of all
// heads. So every tensor-parallel rank must hold this latent.
ModelSource Spanning() {
  return SourceWith(kFullKey,
                    R"({"low_rank":{"groups":[{"heads":[0,1,2,3],"rank":12}]},
          "uses":[{"at_runtime":{}}],"stored":"NO_ROPE",
          "codec":{"dtype":"BF16"}})");
}

TEST(InspectRanksTest, HeadsFeaturesAndBytesAreDividedAmongTheRanks) {
  const ModelSource source = Whole();
  const RankSummary single = RanksOf(source, 1);
  const RankSummary two = RanksOf(source, 2);
  ASSERT_EQ(two.ranks.size(), 2u);
  EXPECT_EQ(two.ranks[1].kv_heads, (plan::HeadRange{2, 2}));
  EXPECT_EQ(two.ranks[1].query_heads, (plan::HeadRange{4, 4}));
  EXPECT_EQ(two.ranks[1].first_feature, 24);
  EXPECT_EQ(two.ranks[1].num_features, 24);
  // 2 layers * (key and value) * 4 heads * 8 dimensions * 2 bytes.
  EXPECT_EQ(single.most_kv_bytes_per_token(), 2 * 2 * 4 * 8 * 2);
  for (const RankShare& rank : two.ranks) {
    EXPECT_EQ(rank.kv_bytes_per_token, 2 * 2 * 2 * 8 * 2);
    EXPECT_EQ(rank.kv_fixed_bytes_per_sequence, 0);
  }
  EXPECT_THAT(two.replicas, IsEmpty());
  EXPECT_THAT(two.uneven, IsEmpty());
  EXPECT_EQ(two.replicated_bytes_per_token(), 0);
  EXPECT_FALSE(ReportWithRanks(source, 0)->ranks.has_value());
}

TEST(InspectRanksTest, WeightBytesIncludeReplicatedTensorsOnEveryRank) {
  const ModelSource source = Whole();
  const RankSummary single = RanksOf(source, 1);
  const RankSummary two = RanksOf(source, 2);
  ASSERT_TRUE(single.ranks[0].weight_bytes.has_value());
  EXPECT_EQ(single.ranks[0].weight_bytes, single.whole_weight_bytes);
  EXPECT_EQ(single.replicated_weight_bytes(), 0);
  EXPECT_EQ(two.whole_weight_bytes, single.whole_weight_bytes);
  EXPECT_LT(*two.ranks[0].weight_bytes, *two.whole_weight_bytes);
  // Each rank holds all norms: 2 in each of the 2 layers, and the final norm. A
  // norm has 32 float32 numbers.
  EXPECT_GE(two.replicated_weight_bytes(), (2 * 2 + 1) * 32 * 4);
  EXPECT_EQ(two.replicated_weight_bytes(), *two.ranks[0].weight_bytes +
                                               *two.ranks[1].weight_bytes -
                                               *two.whole_weight_bytes);
}

TEST(InspectRanksTest, ALatentThatSeveralRanksHoldIsReportedWithItsBytes) {
  const ModelSource source = Spanning();
  const auto report = ReportWithRanks(source, 2);
  KVASIR_ASSERT_OK(report);
  const RankSummary& ranks = *report->ranks;
  ASSERT_EQ(ranks.replicas.size(), 1u);
  EXPECT_EQ(ranks.replicated_bytes_per_token(), 2 * 12 * 2);
  EXPECT_THAT(ReportToText(*report),
              AllOf(HasSubstr("tensor parallel       2 ranks"),
                    HasSubstr("on several ranks    layers 0-1 value, heads "
                              "0-3 on ranks 0-1: 48 bytes a token on each"),
                    HasSubstr("all ranks together take 48 bytes a token more"),
                    Not(HasSubstr("unequal"))));
  const auto rank_json = ReportToJson(*report)["tensor_parallel"];
  EXPECT_EQ(rank_json["size"], 2);
  EXPECT_EQ(rank_json["ranks"][1]["first_kv_head"], 2);
  EXPECT_EQ(rank_json["ranks"][1]["num_heads"], 4);
  EXPECT_EQ(rank_json["replicated_bytes_per_token"], 48);
  EXPECT_EQ(rank_json["replicas"][0]["side"], "value");
  EXPECT_EQ(rank_json["replicas"][0]["last_layer"], 1);
  EXPECT_EQ(rank_json["replicas"][0]["ranks"], (std::vector<int64_t>{0, 1}));
  EXPECT_TRUE(rank_json["uneven_layers"].empty());
  EXPECT_TRUE(rank_json["ranks"][0]["weight_bytes"].is_number());
  EXPECT_TRUE(
      ReportToJson(*ReportWithRanks(source, 0))["tensor_parallel"].is_null());
}

TEST(InspectRanksTest, IfRanksNeedUnequalBytesTheReportNamesTheLayers) {
  // Each of the two groups of values belongs to one of the two
  // tensor-parallel ranks.
  const ModelSource source =
      SourceWith(kFullKey,
                 R"({"low_rank":{"groups":[{"heads":[0,1],"rank":16},
          {"heads":[2,3],"rank":8}]},"uses":[{"at_runtime":{}}],
          "stored":"NO_ROPE","codec":{"dtype":"BF16"}})");
  const auto report = ReportWithRanks(source, 2);
  KVASIR_ASSERT_OK(report);
  const RankSummary& ranks = *report->ranks;
  EXPECT_THAT(ranks.replicas, IsEmpty());
  ASSERT_EQ(ranks.uneven.size(), 1u);
  EXPECT_EQ(ranks.uneven[0].last_layer, 1);
  // 2 layers * (32 bytes for the keys of two heads + 16 bytes for a group
  // of values).
  EXPECT_EQ(ranks.uneven[0].least_bytes, 2 * (32 + 16));
  EXPECT_EQ(ranks.uneven[0].most_bytes, 2 * (32 + 32));
  EXPECT_EQ(ranks.most_kv_bytes_per_token(), 2 * (32 + 32));
  EXPECT_EQ(ranks.ranks[1].kv_bytes_per_token, 2 * (32 + 16));
  EXPECT_THAT(RanksText(ranks),
              HasSubstr("unequal ranks       layers 0-1: 96.0 to 128.0 bytes"));
}

TEST(InspectRanksTest, MoreRanksThanKvHeadsReplicateEachHead) {
  const RankSummary ranks = RanksOf(Whole(), 8);
  EXPECT_EQ(ranks.ranks_per_kv_head, 2);
  EXPECT_EQ(ranks.ranks[7].kv_heads, (plan::HeadRange{3, 1}));
  EXPECT_EQ(ranks.replicated_bytes_per_token(), 2 * 2 * 4 * 8 * 2);
  EXPECT_THAT(RanksText(ranks), HasSubstr("each KV head is on 2 ranks"));
}

TEST(InspectRanksTest,
     TheErrorForAnImpossibleNumberOfRanksNamesThePossibleOnes) {
  EXPECT_THAT(
      ReportWithRanks(Whole(), 3),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("4 KV heads, 8 query heads and 48 MLP "
                               "features cannot be divided among 3"),
                     HasSubstr("possible numbers of ranks: 1, 2, 4 or 8"))));
  // The basis of a rank covers the heads of this rank: 16 channels with two
  // ranks, 8 with four. The codec needs groups of 16 channels, so four ranks
  // are impossible.
  const ModelSource basis = SourceWith(
      R"({"full":{},"stored":"PRE_ROPE","codec":{"bits":{"schedule":[4]},
          "per_token":{"group":16},"param_dtype":"F16",
          "basis_sequence":{"min_tokens":64}}})",
      kFullValue);
  KVASIR_EXPECT_OK(ReportWithRanks(basis, 2));
  EXPECT_THAT(ReportWithRanks(basis, 4),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("8 channels of rank 0"),
                             HasSubstr("possible numbers of ranks: 1 or 2"))));
}

TEST(InspectRanksTest, WeightBytesAreNotReportedForAPlanThatCannotBeServed) {
  const ModelSource source = SourceWith(
      kFullKey, kFullValue,
      R"(,"selection":{"chunk_slots":8,"budget":64,"landmark_codec":{"dtype":"BF16"}})");
  const auto report = ReportWithRanks(source, 2);
  KVASIR_ASSERT_OK(report);
  ASSERT_NE(report->not_served, "");
  EXPECT_FALSE(report->ranks->ranks[0].weight_bytes.has_value());
  EXPECT_THAT(RanksText(*report->ranks), Not(HasSubstr("weights")));
  const auto rank_json = ReportToJson(*report)["tensor_parallel"];
  EXPECT_TRUE(rank_json["ranks"][0]["weight_bytes"].is_null());
  EXPECT_TRUE(rank_json["replicated_weight_bytes"].is_null());
}

}  // namespace
}  // namespace kvasir::cli
