#include "server/inspect/report.h"

#include <string>
#include <utility>

#include "base/temp_folder.h"
#include "model/checkpoint/random_weights.h"
#include "nlohmann/json.hpp"
#include "server/inspect/test_plans.h"
#include "worker/program/served_plan.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

const ReportOptions kOptions = {
    .page_tokens = 16, .max_batched_tokens = 32, .lengths = {1, 100, 512}};

cache::PageLayout LayoutOf(const ModelSource& source) {
  return cache::PageLayout::Create(*source.plan,
                                   {.page_tokens = kOptions.page_tokens})
      .value();
}

InspectReport ReportOf(const ModelSource& source) {
  auto report = MakeInspectReport(source, kOptions);
  KVASIR_EXPECT_OK(report);
  return report.ok() ? *std::move(report) : InspectReport{};
}

ModelSource WithEverything() {
  return SourceWith(
      R"({"full":{},"stored":"PRE_ROPE","codec":{"bits":{"schedule":
          [8,4,4,4,2,2,0,0]},"channel_sequence":{},"param_dtype":"F16",
          "basis_sequence":{"min_tokens":64}}})",
      LowRankPart("fold", "NO_ROPE"),
      R"(,"eviction":{"budget":128,"sinks":4,"recent":32,"lambda":0.5,
          "decay":1,"positions":"ORIGINAL","every_tokens":16})");
}

TEST(InspectReportTest, TheBytesOfAllComponentsAddUpToTheBytesOfThePageLayout) {
  ModelSource windowed = SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                    LowRankPart("fold", "NO_ROPE"));
  windowed.spec.layers[1].sliding_window = 40;
  KVASIR_ASSERT_OK(windowed.SetPlan(windowed.plan->source));
  const ModelSource sources[] = {SourceWith(kFullKey, kFullValue),
                                 WithEverything(), std::move(windowed)};
  for (const ModelSource& source : sources) {
    const cache::PageLayout layout = LayoutOf(source);
    EXPECT_DOUBLE_EQ(BytesOfToken(layout).total(),
                     layout.marginal_bytes_per_token());
    for (const int64_t length : {0, 1, 15, 16, 17, 100, 400, 512}) {
      const CacheBytes<int64_t> bytes = BytesOfSequence(layout, length, 32);
      EXPECT_EQ(bytes.total(), layout.BytesAtLength(length, 32)) << length;
      EXPECT_GE(bytes.unfilled, 0);
    }
  }
}

TEST(InspectReportTest,
     CodesParametersAndPaddingAreReportedAsSeparateComponents) {
  const cache::PageLayout layout =
      LayoutOf(SourceWith(LowRankPart("reconstruct", "PRE_ROPE"), kFullValue));
  // Each of the 2 layers has two latents, of 6 and of 5 codes of 4 bits. The
  // codes of each take 3 bytes; scale and minimum in fp16 take 4 bytes.
  const CacheBytes<double> token = BytesOfToken(layout);
  EXPECT_EQ(token.key_codes, 2 * (3 + 3));
  EXPECT_EQ(token.parameters, 2 * (4 + 4));
  EXPECT_EQ(token.value_codes, 2 * 4 * 8 * 2);
  EXPECT_EQ(token.annotations, 0);
  // The keys of a layer's page have four regions of 128 bytes. Two regions use
  // 16 slots * 3 bytes = 48 bytes, and two use 16 * 4 = 64 bytes.
  EXPECT_EQ(token.padding, 2 * (80 + 80 + 64 + 64) / 16.0);
  const CacheBytes<int64_t> one = BytesOfSequence(layout, 1, 32);
  EXPECT_EQ(one.unfilled, 15 * 2 * (6 + 8 + 64));
}

TEST(InspectReportTest, ReportsTheFlopsPerSlotForEveryKindOfCompressedSpace) {
  const int64_t dense = int64_t{2} * 8 * 8;  // 2 * 8 query heads * 8 dimensions
  const struct {
    const char* name;
    ModelSource source;
    worker::SideFlops key;
    worker::SideFlops value;
  } cases[] = {
      {"full", SourceWith(kFullKey, kFullValue), {dense, 0}, {dense, 0}},
      {"low rank",
       SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                  LowRankPart("at_runtime", "NO_ROPE")),
       // Keys: 6 + 5 channels, each multiplied into 2 heads of 8 dimensions.
       // Rotating 4 heads of 8 dimensions takes 3 FLOPs per number.
       {dense, 2 * 11 * 2 * 8 + 3 * 32},
       // Values: 4 query heads read 6 channels each, and 4 read 5
       // channels each.
       {int64_t{2} * (4 * 6 + 4 * 5), 0}},
      {"values are never rebuilt",
       SourceWith(kFullKey, LowRankPart("reconstruct", "NO_ROPE")),
       {dense, 0},
       {int64_t{2} * (4 * 6 + 4 * 5), 0}},
      {"rope pairs",
       SourceWith(R"({"rope_pairs":{"per_head":[{"pair_indices":[0,1,3]},
           {"pair_indices":[0,1,3]},{"pair_indices":[0,1,3]},
           {"pair_indices":[1,2,3]}]},"uses":[{"fold":{}}],
           "stored":"PRE_ROPE","codec":{"dtype":"BF16"}})",
                  kFullValue),
       {int64_t{2} * 8 * 6, int64_t{3} * 4 * 6},
       {dense, 0}},
      {"commuting",
       SourceWith(R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0,1,2,3],"rank_per_pair":[2,2,1,1]}]},
           "uses":[{"at_runtime":{}}],"stored":"POST_ROPE",
           "codec":{"dtype":"BF16"}})",
                  kFullValue),
       {int64_t{2} * 8 * 12, 0},
       {dense, 0}},
      {"commuting, rotated for each of its heads",
       SourceWith(R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],
           "pairs":[0,1,2,3],"rank_per_pair":[2,2,1,1]}]},
           "uses":[{"at_runtime":{}}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"}})",
                  kFullValue),
       {int64_t{2} * 8 * 12, int64_t{3} * 4 * 12},
       {dense, 0}},
      {"a basis of rotated keys moves to the query",
       SourceWith(R"({"full":{},"stored":"POST_ROPE","codec":{"bits":{
           "schedule":[8,4,4,4,2,2,0,0]},"channel_static":{},
           "basis_static":{}}})",
                  R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16",
           "basis_static":{}}})"),
       {int64_t{2} * 8 * 24, 0},
       {int64_t{2} * 8 * 32, 0}},
      {"anchored slow pairs, rebuilt fast ones",
       SourceWith(R"({"low_rank":{"groups":[{"heads":[0,1,2,3],"rank":10}]},
           "uses":[{"pairs":[0],"reconstruct":{}},{"pairs":[1,2,3],
           "anchored":{"block":16,"order":1}}],"stored":"PRE_ROPE",
           "codec":{"dtype":"BF16"}})",
                  kFullValue),
       {2 * 8 * 2 + 2 * 2 * 8 * 10, 2 * 10 * 4 * 2 + 3 * 4 * 2},
       {dense, 0}},
      {"basis, a quarter of the channels without bits",
       WithEverything(),
       {dense, 2 * 24 * 32 + 3 * 32},
       {int64_t{2} * (4 * 6 + 4 * 5), 0}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const InspectReport report = ReportOf(c.source);
    ASSERT_EQ(report.sides.size(), 4u);
    EXPECT_EQ(report.sides[2].flops.attention, c.key.attention);
    EXPECT_EQ(report.sides[2].flops.reconstruction, c.key.reconstruction);
    EXPECT_EQ(report.sides[3].flops.attention, c.value.attention);
    EXPECT_EQ(report.sides[3].flops.reconstruction, c.value.reconstruction);
    EXPECT_EQ(report.flops().reconstruction,
              2 * (c.key.reconstruction + c.value.reconstruction));
    EXPECT_EQ(report.dense_side_flops, dense);
  }
}

TEST(InspectReportTest, ALayerWithoutRopeCountsNoFlopsForRotation) {
  ModelSource source = SmallSource();
  source.spec.layers[1].rope = false;
  const auto flops = [&](int64_t layer, const std::string& stored) {
    const ModelSource with = SourceWith(
        R"({"full":{},"stored":")" + stored + R"(","codec":{"dtype":"F16"}})",
        kFullValue);
    kvasir::v1::KvPlan plan = with.plan->source;
    plan.mutable_layers(1)->mutable_key()->mutable_parts(0)->set_stored(
        kvasir::v1::NO_ROPE);
    KVASIR_EXPECT_OK(source.SetPlan(plan));
    return worker::FlopsPerSlot(*source.plan, layer, plan::Side::kKey);
  };
  EXPECT_EQ(flops(0, "PRE_ROPE").reconstruction, 3 * 32);
  EXPECT_EQ(flops(1, "PRE_ROPE").reconstruction, 0);
}

TEST(InspectReportTest, TheJsonReportHasTheByteCountsOfThePageLayout) {
  const ModelSource sources[] = {
      SourceWith(LowRankPart("reconstruct", "PRE_ROPE"), kFullValue),
      WithEverything()};
  for (const ModelSource& source : sources) {
    const cache::PageLayout layout = LayoutOf(source);
    const nlohmann::ordered_json json = ReportToJson(ReportOf(source));
    EXPECT_EQ(json["kv_bytes_per_token"], layout.marginal_bytes_per_token());
    EXPECT_EQ(json["kv_payload_bytes_per_token"],
              layout.marginal_payload_bytes_per_token());
    EXPECT_EQ(json["kv_fixed_bytes_per_sequence"],
              layout.fixed_bytes_per_sequence());
    EXPECT_EQ(json["kv_fixed_payload_bytes_per_sequence"],
              layout.fixed_payload_bytes_per_sequence());
    EXPECT_EQ(json["dense_bf16_bytes_per_token"],
              layout.dense_bf16_bytes_per_token());
    ASSERT_EQ(json["at_length"].size(), 3u);
    for (const auto& row : json["at_length"]) {
      EXPECT_EQ(row["kv_bytes"],
                layout.BytesAtLength(row["tokens"].get<int64_t>(), 32));
    }
    ASSERT_EQ(json["layers"].size(), 4u);
    for (int row = 0; row < 4; ++row) {
      const plan::Side side =
          row % 2 == 0 ? plan::Side::kKey : plan::Side::kValue;
      EXPECT_EQ(json["layers"][row]["bytes_per_token"],
                layout.PayloadBytesPerToken(row / 2, side));
    }
  }
}

// Regression test: lengths up to 131,072 tokens were once reported for a model
// with a length of 1,024.
TEST(InspectReportTest,
     TheDefaultSequenceLengthsOfTheReportDependOnTheModelsMaximum) {
  auto report =
      MakeInspectReport(SourceWith(kFullKey, kFullValue), {.page_tokens = 16});
  KVASIR_ASSERT_OK(report);
  std::vector<int64_t> lengths;
  for (const ReportLength& at : report->at_length) lengths.push_back(at.tokens);
  EXPECT_THAT(lengths, ::testing::ElementsAre(8, 32, 128, 512));
}

// Regression test: an uncompressed float32 model was once reported with
// "compression ratio 0.500".
TEST(InspectReportTest, TheCompressionRatioIsRelativeToTheDataTypeOfTheModel) {
  const ModelSource source =
      SourceWith(R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"F32"}})",
                 R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"F32"}})");
  const cache::PageLayout layout = LayoutOf(source);
  const DenseBytes f32 = DenseBytesPerToken(layout, kvasir::v1::F32);
  EXPECT_EQ(f32.own, layout.marginal_bytes_per_token());
  EXPECT_EQ(f32.text(),
            absl::StrCat("dense f32 ", f32.own, ", bf16 ", f32.own / 2));
  EXPECT_EQ(f32.RatioText(layout.marginal_bytes_per_token()),
            "1.000 (bf16 0.500)");
  const DenseBytes bf16 = DenseBytesPerToken(layout, kvasir::v1::BF16);
  EXPECT_EQ(bf16.text(), absl::StrCat("dense bf16 ", f32.own / 2));
  EXPECT_EQ(bf16.RatioText(layout.marginal_bytes_per_token()), "0.500");
}

TEST(InspectReportTest, MemoryIsReportedWithAndWithoutEviction) {
  const ModelSource evicting = SourceWith(
      kFullKey, kFullValue,
      R"(,"eviction":{"budget_ratio":0.25,"sinks":4,"recent":32,"lambda":1,
          "decay":1,"positions":"ORIGINAL","every_tokens":16})");
  const InspectReport report = ReportOf(evicting);
  const InspectReport whole = ReportOf(SourceWith(kFullKey, kFullValue));
  ASSERT_EQ(report.evictions.size(), 1u);
  const ReportEviction& eviction = report.evictions[0];
  EXPECT_EQ(eviction.layers, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(eviction.method, "h2o");
  EXPECT_EQ(eviction.metadata_bytes_per_slot * 2, report.token.annotations);
  EXPECT_GE(eviction.metadata_bytes_per_slot,
            static_cast<double>(eviction.units) * (4 + 4));
  for (size_t i = 0; i < report.at_length.size(); ++i) {
    const ReportLength& at = report.at_length[i];
    EXPECT_EQ(at.not_evicted_bytes, whole.at_length[i].cache.total())
        << at.tokens << ": without eviction there is no metadata";
    EXPECT_EQ(whole.at_length[i].not_evicted_bytes, 0);
  }
  const ReportLength& longest = report.at_length.back();
  ASSERT_EQ(longest.tokens, 512);
  // An eviction keeps 128 slots. Up to 16 more follow until the next
  // eviction.
  const cache::PageLayout layout = LayoutOf(evicting);
  EXPECT_EQ(longest.cache.total(), 9 * layout.page_groups()[0].page_bytes);
  const auto json = ReportToJson(report);
  EXPECT_EQ(json["evictions"][0]["budget_share"], 0.25);
  EXPECT_EQ(json["at_length"][2]["kv_bytes_without_eviction"],
            longest.not_evicted_bytes);
  EXPECT_TRUE(ReportToJson(whole)["at_length"][2]["kv_bytes_without_eviction"]
                  .is_null());
  const std::string text = ReportToText(report);
  EXPECT_THAT(text, HasSubstr("eviction              h2o in 2 layers: 25 % of "
                              "the prompt stays, 36 slots at least (4 sinks "
                              "and 32 recent among them); evictions every 16 "
                              "tokens"));
  EXPECT_THAT(text, HasSubstr("bytes per slot"));
  EXPECT_THAT(text, HasSubstr("nothing evicted"));
  EXPECT_THAT(ReportToText(whole), Not(HasSubstr("evict")));
}

TEST(InspectReportTest, TheBytesOfALongSequenceExcludeEvictedSlots) {
  const cache::PageLayout layout = LayoutOf(WithEverything());
  const CacheBytes<double> token = BytesOfToken(layout);
  // An eviction keeps 128 slots. Up to 16 more follow until the next
  // eviction. Together these slots fill 9 pages.
  const CacheBytes<int64_t> bytes = BytesOfSequence(layout, 500, 32);
  EXPECT_EQ(static_cast<double>(bytes.value_codes), 144 * token.value_codes);
  EXPECT_EQ(bytes.unfilled, 0);
}

TEST(InspectReportTest, NamesThePartOfThePlanThatTheEngineCannotServe) {
  const InspectReport served =
      ReportOf(SourceWith(LowRankPart("reconstruct", "PRE_ROPE"), kFullValue));
  EXPECT_EQ(served.not_served, "");
  EXPECT_EQ(ReportToJson(served)["served"], true);
  const InspectReport other = ReportOf(WithEverything());
  EXPECT_THAT(ReportToText(other),
              AllOf(HasSubstr("not served            layer 0 key"),
                    HasSubstr("a basis made for each sequence")));
  EXPECT_EQ(ReportToJson(other)["served"], false);
}

// The plan is valid, but no server can start with it.
TEST(InspectReportTest,
     NamesThePartOfThePlanThatTheKernelsOfThisBuildCannotServe) {
  ModelSource source =
      SourceWith(LowRankPart("reconstruct", "PRE_ROPE"), kFullValue);
  EXPECT_EQ(ReportOf(source).not_served, "");
  source.shape->head_dim = 264;
  source.spec = model::SpecOfShape(*source.shape).value();
  KVASIR_ASSERT_OK(source.SetPlan(source.plan->source));
  const InspectReport report = ReportOf(source);
  EXPECT_EQ(report.not_served,
            "layer 0 key part 0: 264 numbers in a rebuilt key; this build "
            "serves at most 256");
  EXPECT_EQ(report.not_served,
            worker::ServePlan(source.plan, {}).status().message());
  EXPECT_EQ(ReportToJson(report)["served"], false);
  EXPECT_EQ(report.invariance, "");
}

TEST(InspectReportTest, ReportsWhichPromptsComputeKeysOrValuesBeforeAttention) {
  const char* const joint =
      R"({"low_rank":{"groups":[{"heads":[0,1,2,3],"rank":16}]},"uses":[
          {"at_runtime":{}}],"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";
  const ModelSource source = SourceWith(kFullKey, joint);
  const InspectReport lifts = ReportOf(source);
  EXPECT_EQ(lifts.invariance, "bits but for reused output");
  EXPECT_EQ(lifts.sides[0].lifted_from_tokens, 0);
  EXPECT_EQ(lifts.sides[1].lifted_from_tokens, 9);
  EXPECT_THAT(ReportToText(lifts),
              HasSubstr("invariance            bits but for reused output\n"));
  const nlohmann::ordered_json json = ReportToJson(lifts);
  EXPECT_EQ(json["invariance"], "bits but for reused output");
  EXPECT_EQ(json["layers"][1]["lifted_from_tokens"], 9);

  ReportOptions options = kOptions;
  options.deterministic = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const InspectReport other,
                              MakeInspectReport(source, options));
  EXPECT_EQ(other.invariance, "bits");
  EXPECT_EQ(other.sides[1].lifted_from_tokens, 0);
  EXPECT_EQ(ReportOf(SourceWith(kFullKey, kFullValue)).invariance, "bits");
  EXPECT_EQ(ReportOf(WithEverything()).invariance, "");
}

TEST(InspectReportTest, APredictionForAnotherPlanIsNotReported) {
  InspectReport report = ReportOf(SourceWith(kFullKey, kFullValue));
  EXPECT_THAT(ReportToText(report), Not(HasSubstr("predicted divergence")));
  EXPECT_TRUE(ReportToJson(report)["prediction"].is_null());
  report.prediction = {.plan = {.bytes_per_token = 900, .kl = 0.02},
                       .kl_low = 0.01,
                       .kl_high = 0.05};
  EXPECT_THAT(ReportToText(report),
              HasSubstr("\npredicted divergence  0.02000 nats a token "
                        "(0.01000 to 0.05000 over domains)\n"));
  report.prediction->probes = {{600, 0.07}, {800, 0.03}};
  EXPECT_THAT(ReportToText(report), HasSubstr(", with 2 plans measured\n"));
  EXPECT_EQ(ReportToJson(report)["prediction"]["bytes_per_token"], 900);
  report.prediction.reset();
  report.foreign_prediction = true;
  EXPECT_THAT(ReportToText(report),
              HasSubstr("predicted divergence  not known"));
}

TEST(InspectReportTest, UnknownWeightBytesAreNullInTheJsonReport) {
  InspectReport report = ReportOf(SourceWith(kFullKey, kFullValue));
  EXPECT_TRUE(
      ReportToJson(report)["at_length"][0]["weights_and_kv_bytes"].is_number());
  report.weights = {};
  EXPECT_TRUE(
      ReportToJson(report)["at_length"][0]["weights_and_kv_bytes"].is_null());
}

TEST(InspectReportTest, TheTableOfLayersShowsHowManyTokensAreStoredExactly) {
  ModelSource source = SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                  kFullValue, R"(,"exact_sinks":4)");
  kvasir::v1::KvPlan plan = source.plan->source;
  plan.mutable_layers(1)->mutable_key()->set_exact_window(24);
  KVASIR_ASSERT_OK(source.SetPlan(plan));
  const InspectReport report = ReportOf(source);
  EXPECT_EQ(report.not_served, "");
  // An exactly stored token takes 11 numbers of 2 bytes. Layer 0 stores 4
  // tokens exactly, and layer 1 stores 28.
  EXPECT_EQ(report.fixed_payload_bytes_per_sequence, (4 + 28) * 22);
  const auto json = ReportToJson(report)["layers"];
  EXPECT_EQ(json[0]["exact_sinks"], 4);
  EXPECT_EQ(json[0]["exact_window"], 0);
  // values without codes have no separate exact rows
  EXPECT_EQ(json[1]["exact_sinks"], 0);
  EXPECT_EQ(json[2]["exact_window"], 24);
  EXPECT_THAT(ReportToText(report),
              AllOf(HasSubstr("window  exact\n"), HasSubstr("-  4+0\n"),
                    HasSubstr("-  4+24\n"), HasSubstr("-  -\n")));
}

TEST(InspectReportTest, TheTableOfLayersShowsGroupsBitsLiftAndRange) {
  const InspectReport report = ReportOf(SourceWith(
      LowRankPart("reconstruct", "PRE_ROPE"), LowRankPart("fold", "NO_ROPE")));
  const LayerSideSummary& key = report.sides[0].summary;
  EXPECT_EQ(key.method, "low_rank");
  EXPECT_EQ(key.rank, 11);
  EXPECT_EQ(key.groups, "6,5");
  EXPECT_EQ(key.bits, "4");
  EXPECT_EQ(key.lift, "reconstruct");
  EXPECT_EQ(key.stored, "pre_rope");
  EXPECT_EQ(key.range, "token");
  EXPECT_EQ(key.param_bytes_per_token, 8);
  EXPECT_EQ(report.sides[1].summary.lift, "fold");
  EXPECT_THAT(ReportToText(report),
              AllOf(HasSubstr("    1 key    low_rank     11  6,5     4     "
                              "reconstruct  token"),
                    HasSubstr("bytes/token")));
  const InspectReport other = ReportOf(WithEverything());
  EXPECT_EQ(other.sides[0].summary.groups, "1x32");
  EXPECT_EQ(other.sides[0].summary.transform, "basis_sequence");
  EXPECT_EQ(other.sides[0].summary.range, "sequence");
  EXPECT_EQ(other.sides[0].summary.group_list[0].stored, 24);
  EXPECT_EQ(ReportOf(SourceWith(kFullKey, kFullValue)).sides[0].summary.groups,
            "4x8");
}

// The bytes of a joint latent count once, in the key's row.
TEST(InspectReportTest, AJointLatentOfKeyAndValueIsReportedOnce) {
  ModelSource source = SourceWith(kFullKey, kFullValue);
  kvasir::v1::KvPlan plan = source.plan->source;
  const ModelSource apart = SourceWith(LowRankPart("reconstruct", "PRE_ROPE"),
                                       LowRankPart("at_runtime", "NO_ROPE"));
  for (int l = 0; l < plan.layers_size(); ++l) {
    const kvasir::v1::LayerPlan& from = apart.plan->source.layers(l);
    kvasir::v1::LayerPlan* const layer = plan.mutable_layers(l);
    layer->Clear();
    kvasir::v1::Part* const part = layer->add_joint();
    *part = from.key().parts(0);
    *part->add_uses() = from.value().parts(0).uses(0);
    part->mutable_uses(0)->set_serves(kvasir::v1::SERVES_KEY);
    part->mutable_uses(1)->set_serves(kvasir::v1::SERVES_VALUE);
  }
  KVASIR_ASSERT_OK(source.SetPlan(plan));
  const InspectReport report = ReportOf(source);
  const InspectReport two = ReportOf(apart);
  EXPECT_EQ(report.not_served, "");
  EXPECT_EQ(report.token.key_codes, two.token.key_codes);
  EXPECT_EQ(report.token.value_codes, 0);
  EXPECT_EQ(report.token.parameters, two.token.parameters / 2);
  EXPECT_EQ(report.bytes_per_token, two.bytes_per_token / 2);
  EXPECT_EQ(report.token.total(), report.bytes_per_token);
  for (const size_t side : {0u, 1u}) {
    const LayerSideSummary& row = report.sides[side].summary;
    const LayerSideSummary& alone = two.sides[side].summary;
    EXPECT_EQ(row.method, "joint low_rank");
    EXPECT_EQ(row.rank, 11);
    EXPECT_EQ(row.lift, alone.lift);
    EXPECT_EQ(row.stored, alone.stored);
    EXPECT_EQ(row.bytes_per_token, side == 0 ? alone.bytes_per_token : 0);
    EXPECT_EQ(row.param_bytes_per_token,
              side == 0 ? alone.param_bytes_per_token : 0);
    EXPECT_EQ(row.group_list[0].stored, side == 0 ? 6 : 0);
    EXPECT_EQ(report.sides[side].flops, two.sides[side].flops);
  }
}

TEST(InspectReportTest, TheWeightBytesOfAPlanEqualTheSizeOfItsTensors) {
  const WeightSizes dense = WeightBytes(SourceWith(kFullKey, kFullValue));
  EXPECT_EQ(dense.bytes, 2 * model::CountParameters(*SmallSource().shape));
  EXPECT_EQ(dense.attention_bytes, 2 * 2 * (64 * 32 * 2 + 32 * 32 * 2));
  const ModelSource low_rank = SourceWith(
      LowRankPart("reconstruct", "PRE_ROPE"), LowRankPart("fold", "NO_ROPE"));
  const WeightSizes sizes = WeightBytes(low_rank);
  // 2 layers * 2 bytes * (q_proj + k_proj.down + lifts of the keys +
  // v_proj.down + o_proj). o_proj reads 4 heads of 6 channels and 4 heads of 5.
  EXPECT_EQ(sizes.attention_bytes,
            2 * 2 * (64 * 32 + 11 * 32 + 16 * 11 + 11 * 32 + 32 * 44));
  EXPECT_EQ(dense.bytes - dense.attention_bytes,
            sizes.bytes - sizes.attention_bytes);
}

TEST(OpenModelSourceTest, InspectionAcceptsPlansThatCannotBeServed) {
  auto shape = model::FindShape("kvasir-tiny");
  KVASIR_ASSERT_OK(shape);
  auto spec = model::SpecOfShape(*shape);
  KVASIR_ASSERT_OK(spec);
  kvasir::v1::KvPlan plan =
      plan::FullRankPlan(model::AttentionShapeOf(*spec), kvasir::v1::BF16);
  auto* selection = plan.mutable_layers(3)->mutable_selection();
  selection->set_chunk_slots(8);
  selection->set_budget(64);
  selection->mutable_landmark_codec()->set_dtype(kvasir::v1::BF16);
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  const base::TempFolder folder;
  options.kv_plan = folder.Write("kv_plan.json", plan::PlanToJson(plan));
  KVASIR_EXPECT_OK(OpenModelSource(options, PlanUse::kLook));
  EXPECT_THAT(OpenModelSource(options, PlanUse::kRun),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("layer 3: the plan asks for selection")));
}

// Regression test: once only inspect named the possible numbers of ranks, and a
// starting server did not.
TEST(OpenModelSourceTest,
     TheErrorForAnImpossibleNumberOfRanksNamesThePossibleOnes) {
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  EXPECT_THAT(
      OpenModelSource(options, PlanUse::kRun, std::nullopt,
                      {.rank = 1, .size = 3}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("possible numbers of ranks: 1, 2, 4, 8 or 16")));
}

TEST(OpenModelSourceTest, EvictionFlagsAddEvictionToAnyPlan) {
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  options.eviction.method = "h2o";
  options.eviction.budget = "0.5";
  for (const char* preset : {"", "dense-bf16", "rotated-4bit"}) {
    options.kv_plan = preset;
    KVASIR_ASSERT_OK_AND_ASSIGN(const ModelSource source,
                                OpenModelSource(options, PlanUse::kLook));
    for (const auto& layer : source.plan->source.layers()) {
      EXPECT_EQ(layer.eviction().budget_ratio(), 0.5) << preset;
      EXPECT_EQ(layer.eviction().lambda(), 1) << preset;
    }
    EXPECT_THAT(source.plan->source.method(), HasSubstr("h2o")) << preset;
  }
}

TEST(OpenModelSourceTest, EvictionFlagsReplaceThePlansEviction) {
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  options.eviction.method = "q-hitter";
  options.eviction.budget = "256";
  KVASIR_ASSERT_OK_AND_ASSIGN(const ModelSource first,
                              OpenModelSource(options, PlanUse::kLook));
  EXPECT_EQ(first.plan->source.method(), "q-hitter");
  options.eviction.method = "streaming";
  options.eviction.budget = "0.25";
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const ModelSource second,
      OpenModelSource(options, PlanUse::kLook, first.plan->source));
  EXPECT_EQ(second.plan->source.method(), "streaming");
  EXPECT_EQ(second.plan->page_groups[0].eviction.budget_tokens, 0);
  EXPECT_EQ(second.plan->page_groups[0].eviction.budget_ratio, 0.25);
}

TEST(OpenModelSourceTest, AnEvictionBudgetBelowSinksAndRecentTokensIsRefused) {
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  options.eviction.method = "h2o";
  options.eviction.budget = "64";
  options.eviction.settings.recent = 100;
  EXPECT_THAT(OpenModelSource(options, PlanUse::kLook),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the budget of 64 slots is below sinks + "
                                 "recent = 104")));
}

TEST(OpenModelSourceTest, ExactTokensAreLimitedToTheModelsLength) {
  ModelOptions options;
  options.random_weights = true;
  options.shape = "kvasir-tiny";
  const auto exact_of = [&](uint32_t sinks, uint32_t window) {
    using Exact = std::pair<uint32_t, uint32_t>;
    auto spec = model::SpecOfShape(*model::FindShape("kvasir-tiny"));
    kvasir::v1::KvPlan plan =
        plan::FullRankPlan(model::AttentionShapeOf(*spec), kvasir::v1::BF16);
    auto* const value = plan.mutable_layers(3)->mutable_value();
    auto* const codec = value->mutable_parts(0)->mutable_codec();
    codec->mutable_bits()->add_schedule(4);
    codec->mutable_per_token();
    codec->set_param_dtype(kvasir::v1::F16);
    value->set_exact_window(window);
    plan.mutable_layers(3)->set_exact_sinks(sinks);
    const auto source = OpenModelSource(options, PlanUse::kRun, plan);
    KVASIR_EXPECT_OK(source);
    if (!source.ok()) return Exact(0, 0);
    const kvasir::v1::LayerPlan& layer = source->plan->source.layers(3);
    return Exact(layer.exact_sinks(), layer.value().exact_window());
  };
  const auto length =
      static_cast<uint32_t>(model::FindShape("kvasir-tiny")->max_position);
  EXPECT_THAT(exact_of(0, 12), Pair(0u, 12u));
  EXPECT_THAT(exact_of(0, length), Pair(0u, length));
  EXPECT_THAT(exact_of(0, 1'000'000), Pair(0u, length));
  EXPECT_THAT(exact_of(4, 12), Pair(4u, 12u));
  EXPECT_THAT(exact_of(4, length), Pair(4u, length - 4));
  EXPECT_THAT(exact_of(1'000'000, 12), Pair(length, 0u));
}

}  // namespace
}  // namespace kvasir::cli
