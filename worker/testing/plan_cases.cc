#include "worker/testing/plan_cases.h"

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/shape_config.h"
#include "plan/plan.h"

namespace kvasir::worker {
namespace plan_cases {
namespace {

std::string Pairs(const std::string& use, const std::string& stored,
                  const std::string& codec = kTyped) {
  return absl::StrCat(R"({"rope_pairs":{"per_head":[{"pair_indices":[0,3]},)",
                      R"({"pair_indices":[1,2]},{"pair_indices":[0,1]},)",
                      R"({"pair_indices":[2,3]}]},"uses":[{")", use,
                      R"(":{}}],"stored":")", stored, R"(","codec":)", codec,
                      "}");
}

// Returns a rope_low_rank part with two head groups, which may have different
// ranks.
std::string Complex(const std::string& use, const std::string& stored,
                    const std::string& first_ranks,
                    const std::string& codec = kTyped) {
  return absl::StrCat(
      R"({"rope_low_rank":{"groups":[{"heads":[0,3],"pairs":[0,1,3],)",
      R"("rank_per_pair":)", first_ranks, R"(},{"heads":[2,1],"pairs":[1,2],)",
      R"("rank_per_pair":[2,2]}]},"uses":[{")", use, R"(":{}}],"stored":")",
      stored, R"(","codec":)", codec, "}");
}

}  // namespace

std::string LowRank(const std::string& groups, const std::string& use,
                    const std::string& stored, const std::string& codec,
                    const std::string& rest) {
  return absl::StrCat(R"({"low_rank":{"groups":[)", groups, R"(]},"uses":[{)",
                      use, R"(}],"stored":")", stored, R"(","codec":)", codec,
                      rest, "}");
}

PlanCase JointCase(const std::string& name, const std::string& groups,
                   const std::string& stored, const std::string& codec,
                   uint32_t exact_window, const std::string& rest,
                   uint32_t sinks) {
  const std::string uses = R"("reconstruct":{},"serves":"SERVES_KEY"},)"
                           R"({"at_runtime":{},"serves":"SERVES_VALUE")";
  return {.name = name,
          .codes = codec != kTyped,
          .key_exact = exact_window,
          .value_exact = exact_window,
          .sinks = sinks,
          .joint = LowRank(groups, uses, stored, codec, rest)};
}

std::string Full(const std::string& stored, const std::string& codec,
                 const std::string& rest) {
  return absl::StrCat(R"({"full":{},"stored":")", stored, R"(","codec":)",
                      codec, rest, "}");
}

std::string Runs(const std::vector<std::pair<int, int>>& channels_and_bits,
                 const std::string& rest) {
  std::string runs;
  for (const auto& [channels, bits] : channels_and_bits) {
    absl::StrAppend(&runs, runs.empty() ? "" : ",", R"({"channels":)", channels,
                    R"(,"bits":)", bits, "}");
  }
  return absl::StrCat(R"({"bits":{"runs":[)", runs, "]},", rest, "}");
}

std::string Codes(const std::string& bits, const std::string& rest) {
  return absl::StrCat(R"({"bits":{"schedule":[)", bits, "]},", rest, "}");
}

}  // namespace plan_cases

std::vector<PlanCase> PlanCases() {
  using namespace plan_cases;  // NOLINT: for the helpers that make plans
  const std::string two =
      R"({"heads":[0,2],"rank":9},{"heads":[3,1],"rank":6})";
  const std::string pairs =
      R"({"heads":[0,2],"rank":15},{"heads":[3,1],"rank":10})";
  const std::string wide =
      R"({"heads":[0,1],"rank":16},{"heads":[2,3],"rank":8})";
  const std::string each = R"({"heads":[0],"rank":5},{"heads":[1],"rank":5},)"
                           R"({"heads":[2],"rank":3},{"heads":[3],"rank":4})";
  const std::string all = R"({"heads":[0,1,2,3],"rank":16})";
  const std::string reconstruct = R"("reconstruct":{})";
  const std::string runtime = R"("at_runtime":{})";
  const std::string fold = R"("fold":{})";
  const std::string token = R"("per_token":{},"param_dtype":"F16")";
  const std::string fused = token + R"(,"hadamard_fused":{})";
  const std::string online = token + R"(,"hadamard_online":{})";
  const std::string basis = R"("channel_static":{},"basis_static":{})";
  const std::string mean = R"(,"mean":true)";
  const std::string fixed = R"("channel_static":{})";
  const auto levels = [](const std::string& list) {
    return R"("per_token_norm":{"levels":[)" + list +
           R"(]},"param_dtype":"F16","hadamard_online":{})";
  };
  const std::string sixteen =
      "-2.7,-2.1,-1.6,-1.3,-0.9,-0.7,-0.4,-0.1,"
      "0.1,0.4,0.7,0.9,1.3,1.6,2.1,2.7";
  const std::string slow =
      LowRank(all, R"("pairs":[2,3],"reconstruct":{})", "PRE_ROPE", kTyped);
  const std::string fast =
      R"({"rope_low_rank":{"groups":[{"heads":[0,1,2,3],"pairs":[0,1],)"
      R"("rank_per_pair":[3,1]}]},"uses":[{"at_runtime":{}}],)"
      R"("stored":"POST_ROPE","codec":{"dtype":"$"}})";
  return {
      {"PaluGroups", LowRank(two, reconstruct, "PRE_ROPE"),
       LowRank(two, fold, "NO_ROPE")},
      {"PaluHeads", LowRank(each, reconstruct, "PRE_ROPE"),
       LowRank(each, runtime, "NO_ROPE")},
      {"PaluJointCodes",
       LowRank(all, reconstruct, "PRE_ROPE", Codes("4", fused)),
       LowRank(all, runtime, "NO_ROPE", Codes("3", fused)), true},
      {"PaluRangesOfFourChannels",
       LowRank(all, reconstruct, "PRE_ROPE",
               Codes("2", R"("per_token":{"group":4},"param_dtype":"BF16")")),
       LowRank(all, fold, "NO_ROPE",
               Codes("1", R"("per_token":{"group":8},"param_dtype":"F32")")),
       true},
      {"Pairs", Pairs("fold", "POST_ROPE"), Full("NO_ROPE")},
      {"PairsCodes", Pairs("at_runtime", "POST_ROPE", Codes("4", online)),
       Full("NO_ROPE", Codes("4", online)), true},
      {"PairsUnrotated", Pairs("at_runtime", "PRE_ROPE"), Full("NO_ROPE")},
      {"Commuting", Complex("at_runtime", "POST_ROPE", "[2,1,2]"),
       LowRank(two, runtime, "NO_ROPE")},
      {"CommutingFolded", Complex("fold", "POST_ROPE", "[2,1,2]"),
       Full("NO_ROPE")},
      {"CommutingUnrotated", Complex("at_runtime", "PRE_ROPE", "[2,1,1]"),
       Full("NO_ROPE")},
      {"CommutingFastReconstructedSlow", absl::StrCat(fast, ",", slow),
       Full("NO_ROPE")},
      {"Basis", Full("PRE_ROPE", R"({"dtype":"$","basis_static":{}})", mean),
       Full("NO_ROPE", R"({"dtype":"$","basis_static":{}})", mean)},
      {"BasisCodes", Full("PRE_ROPE", Codes("8,4,4,3,2,1,0,0", basis), mean),
       Full("NO_ROPE", Codes("8,8,4,4,2,2,0,0", basis), mean), true},
      {"RotatedBasisCodes",
       Full("POST_ROPE", Codes("8,8,8,4,4,4,3,0", basis), mean),
       LowRank(two, fold, "NO_ROPE", Codes("8", token)), true},
      {"Channels", Full("POST_ROPE", Codes("4", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("8", R"("channel_static":{})")), true},
      {"RotatedLevels", Full("POST_ROPE", Codes("4", levels(sixteen))),
       Full("NO_ROPE", Codes("3", levels("-2,-1.3,-0.7,-0.2,0.2,0.7,1.3,2"))),
       true},
      {"LevelsRebuilt",
       LowRank(all, reconstruct, "PRE_ROPE",
               Codes("4", R"("per_token_norm":{"levels":[)" + sixteen +
                              R"(]},"param_dtype":"F32")")),
       LowRank(two, runtime, "NO_ROPE",
               Codes("1", R"("per_token_norm":{"levels":[-1,1]},)"
                          R"("param_dtype":"BF16")")),
       true},
      {"FallingBits",
       LowRank(all, reconstruct, "PRE_ROPE",
               Runs({{2, 8}, {3, 6}, {2, 5}, {2, 3}, {1, 2}, {6, 0}}, fixed)),
       LowRank(all, runtime, "NO_ROPE",
               Runs({{4, 5}, {4, 4}, {4, 1}, {4, 0}}, fixed)),
       true},
      {"FallingBitsFolded", Full("POST_ROPE", Runs({{4, 6}, {4, 3}}, fixed)),
       LowRank(all, fold, "NO_ROPE", Runs({{8, 6}, {4, 2}, {4, 0}}, fixed)),
       true},
      {"FallingBitsOfTokens", Full("POST_ROPE", Runs({{4, 5}, {4, 6}}, token)),
       LowRank(all, runtime, "NO_ROPE", Runs({{8, 6}, {5, 5}, {3, 0}}, token)),
       true},
      {"ExactFallingBits",
       LowRank(all, reconstruct, "PRE_ROPE",
               Runs({{4, 6}, {6, 2}, {6, 0}}, fixed)),
       LowRank(all, runtime, "NO_ROPE", Runs({{4, 5}, {8, 3}, {4, 0}}, fixed)),
       true, 7, 5},
      {"ExactRowsInAnotherArena",
       LowRank(all, reconstruct, "PRE_ROPE", Runs({{4, 2}, {12, 0}}, fixed)),
       LowRank(all, runtime, "NO_ROPE", Runs({{4, 1}, {12, 0}}, fixed)), true,
       7, 5, 2, "", /*first_whole=*/true},
      {"ExactRowsOverTwoArenas",
       Full("POST_ROPE", Codes("1", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("1", R"("channel_static":{})")), true, 40, 30, 2,
       "", /*first_whole=*/true},
      {"WholeUnrotatedCodes", Full("PRE_ROPE", Codes("8", token)),
       Full("NO_ROPE", Codes("8", token)), true},
      {"ExactPaluJoint",
       LowRank(all, reconstruct, "PRE_ROPE", Codes("4", fused)),
       LowRank(all, runtime, "NO_ROPE", Codes("3", fused)), true, 7, 5},
      {"ExactPairs", Pairs("at_runtime", "POST_ROPE", Codes("4", online)),
       Full("NO_ROPE", Codes("2", online)), true, 3, 10},
      {"ExactBasis", Full("PRE_ROPE", Codes("8,4,4,3,2,1,0,0", basis), mean),
       Full("NO_ROPE", Codes("8,8,4,4,2,2,0,0", basis), mean), true, 9, 6},
      {"ExactKeysOfParts",
       absl::StrCat(fast, ",",
                    LowRank(all, R"("pairs":[2,3],"reconstruct":{})",
                            "PRE_ROPE", Codes("4", fused))),
       Full("NO_ROPE"), true, 12, 0},
      {"ExactValues", Full("POST_ROPE"),
       LowRank(two, fold, "NO_ROPE", Codes("2", token)), true, 0, 1},
      {"SinksPaluJoint",
       LowRank(all, reconstruct, "PRE_ROPE", Codes("4", fused)),
       LowRank(all, runtime, "NO_ROPE", Codes("3", fused)), true, 7, 5, 4},
      {"SinksAlonePaluGroups",
       LowRank(two, reconstruct, "PRE_ROPE", Codes("4", token)),
       LowRank(two, fold, "NO_ROPE", Codes("2", token)), true, 0, 0, 3},
      {"SinksPairs", Pairs("at_runtime", "POST_ROPE", Codes("4", online)),
       Full("NO_ROPE", Codes("2", online)), true, 0, 10, 1},
      {"SinksBasis", Full("PRE_ROPE", Codes("8,4,4,3,2,1,0,0", basis), mean),
       Full("NO_ROPE", Codes("8,8,4,4,2,2,0,0", basis), mean), true, 5, 0, 4},
      {"SinksAloneChannels",
       Full("POST_ROPE", Codes("4", R"("channel_static":{})")),
       Full("NO_ROPE", Codes("2", R"("channel_static":{})")), true, 0, 0, 9},
      {"SinksKeysOfParts",
       absl::StrCat(fast, ",",
                    LowRank(all, R"("pairs":[2,3],"reconstruct":{})",
                            "PRE_ROPE", Codes("4", fused))),
       Full("NO_ROPE"), true, 3, 0, 6},
      JointCase("KeyAndValue", R"({"heads":[0,1,2,3],"rank":40})", "PRE_ROPE",
                kTyped),
      JointCase("KeyAndValueOfTwo", pairs, "PRE_ROPE", kTyped, 0, mean),
      JointCase("KeyAndValueCodes", all, "PRE_ROPE", Codes("4", fused)),
      JointCase("KeyAndValueBasisOfTwo", wide, "PRE_ROPE",
                Codes("8,4,4,3,2,1,0,0", basis), 0, R"(,"latent_bias":true)"),
      JointCase("ExactKeyAndValue", pairs, "PRE_ROPE", Codes("8", fixed), 7),
      JointCase("KeyAndValueLevels", two, "PRE_ROPE",
                Codes("4", R"("per_token_norm":{"levels":[)" + sixteen +
                               R"(]},"param_dtype":"F16")")),
      JointCase("KeyAndValueFallingBits", all, "PRE_ROPE",
                Runs({{2, 8}, {3, 6}, {2, 5}, {2, 3}, {1, 2}, {6, 0}}, fixed)),
      JointCase("ExactKeyAndValueFallingBits", all, "PRE_ROPE",
                Runs({{4, 6}, {6, 5}, {2, 1}, {4, 0}}, fixed), 7),
      JointCase("SinksKeyAndValueFallingBits", all, "PRE_ROPE",
                Runs({{4, 6}, {4, 5}, {2, 3}, {6, 0}}, fixed), 3, "", 2),
  };
}

kvasir::v1::KvPlan PlanOf(const PlanCase& plan_case,
                          const model::DecoderSpec& spec,
                          const std::string& dtype) {
  std::string layer = absl::StrCat(R"({"key":{"parts":[)", plan_case.key,
                                   R"(]},"value":{"parts":[)", plan_case.value,
                                   R"(]},"joint":[)", plan_case.joint, "]");
  if (!plan_case.eviction.empty()) {
    absl::StrAppend(&layer, R"(,"eviction":)", plan_case.eviction);
  }
  layer += "}";
  for (size_t at = layer.find('$'); at != std::string::npos;
       at = layer.find('$')) {
    layer.replace(at, 1, dtype);
  }
  kvasir::v1::KvPlan plan;
  plan.set_schema_version(plan::kPlanSchemaVersion);
  if (plan_case.first_whole) {
    *plan.add_layers() =
        plan::FullRankPlan(model::AttentionShapeOf(spec), kvasir::v1::F32)
            .layers(0);
  }
  for (int64_t l = plan.layers_size(); l < spec.num_layers(); ++l) {
    kvasir::v1::LayerPlan* const added = plan.add_layers();
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(layer, added).ok())
        << layer;
    added->mutable_key()->set_exact_window(plan_case.key_exact);
    added->mutable_value()->set_exact_window(plan_case.value_exact);
    added->set_exact_sinks(plan_case.sinks);
  }
  return plan;
}

absl::StatusOr<std::unique_ptr<Rank>> MakePlannedRank(
    const PlanCase& plan_case, const RankOptions& options,
    Collective* collective, const std::string& dtype,
    const model::ModelShape& shape) {
  absl::StatusOr<model::DecoderSpec> spec = model::SpecOfShape(shape);
  if (!spec.ok()) return spec.status();
  const kvasir::v1::KvPlan plan = PlanOf(plan_case, *spec, dtype);
  constexpr uint64_t kSeed = 20260;
  auto source = RandomSource::Create(shape, *spec, Resolved(plan, *spec), kSeed,
                                     kernels::DType::kBf16);
  if (!source.ok()) return source.status();
  return Rank::Create(*spec, plan, source->get(), options, collective);
}

}  // namespace kvasir::worker
