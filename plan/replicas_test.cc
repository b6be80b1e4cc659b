#include "plan/replicas.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"

namespace kvasir::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";

// Returns the JSON of a low_rank part in bf16 with these groups.
std::string LowRank(const std::vector<std::string>& groups,
                    const std::string& stored, const std::string& uses) {
  return absl::StrCat(R"({"low_rank":{"groups":[)", absl::StrJoin(groups, ","),
                      R"(]},"uses":[)", uses, R"(],"stored":")", stored,
                      R"(","codec":{"dtype":"BF16"}})");
}
std::string Group(const std::string& heads, int rank) {
  return absl::StrCat(R"({"heads":[)", heads, R"(],"rank":)", rank, "}");
}
std::string Values(const std::vector<std::string>& groups) {
  return LowRank(groups, "NO_ROPE", R"({"at_runtime":{}})");
}

std::string Layer(const std::string& value, const std::string& rest = "") {
  return absl::StrCat(R"({"key":{"parts":[)", kFullKey,
                      R"(]},"value":{"parts":[)", value, "]}", rest, "}");
}

// Resolves a plan for 8 query heads and 4 KV heads of 16 dimensions for each of
// `size` ranks.
using Ranked = std::vector<std::shared_ptr<const ResolvedPlan>>;
Ranked Ranks(const std::vector<std::string>& layers, int64_t size) {
  AttentionShape shape;
  shape.num_heads = 8;
  shape.num_kv_heads = 4;
  shape.head_dim = 16;
  shape.hidden_size = 32;
  shape.rotary_dim = 16;
  shape.layers.resize(layers.size());
  const auto plan =
      ParsePlanJson(absl::StrCat(R"({"schema_version":1,"layers":[)",
                                 absl::StrJoin(layers, ","), "]}"),
                    "test");
  KVASIR_EXPECT_OK(plan);
  Ranked ranks;
  for (int64_t rank = 0; plan.ok() && rank < size; ++rank) {
    auto resolved = ResolvePlan(*plan, shape, {.rank = rank, .size = size});
    KVASIR_EXPECT_OK(resolved);
    if (!resolved.ok()) continue;
    ranks.push_back(std::make_shared<const ResolvedPlan>(*std::move(resolved)));
  }
  return ranks;
}

// Lists the replicas as text: "0-1 value 0: heads 0,1 ranks 0,1 bytes 24 + 24"
// (layers, side, part; bytes of the first copy, then of all others).
std::vector<std::string> Listed(const Ranked& ranks) {
  std::vector<std::string> lines;
  for (const Replica& replica : FindReplicas(ranks)) {
    lines.push_back(absl::StrCat(
        replica.first_layer, "-", replica.last_layer, " ",
        replica.joint ? "joint " : "",
        replica.side.has_value() ? SideName(*replica.side) : "metadata", " ",
        replica.part, ": heads ", absl::StrJoin(replica.heads, ","), " ranks ",
        absl::StrJoin(replica.ranks, ","), " bytes ", replica.bytes_per_token,
        " + ", replica.extra_bytes_per_token()));
  }
  return lines;
}

TEST(ReplicasTest, AGroupOfHeadsThatLieOnOneRankIsNotReplicated) {
  const std::string layer = Layer(Values({Group("0,1", 8), Group("2,3", 8)}));
  EXPECT_THAT(Listed(Ranks({layer, layer}, 1)), IsEmpty());
  EXPECT_THAT(Listed(Ranks({layer, layer}, 2)), IsEmpty());
  EXPECT_THAT(Listed(Ranks({Layer(kFullValue)}, 4)), IsEmpty());
}

TEST(ReplicasTest, AGroupOfHeadsThatSpansSeveralRanksIsReplicatedOnEachRank) {
  const std::string all = Layer(Values({Group("0,1,2,3", 12)}));
  const std::string wider = Layer(Values({Group("0,1,2,3", 20)}));
  const std::string odd = Layer(Values({Group("0,3", 6), Group("1,2", 10)}));
  // Consecutive layers that differ only in the width of the group's latent form
  // one replica.
  EXPECT_THAT(Listed(Ranks({all, wider, Layer(kFullValue), all, odd}, 2)),
              ElementsAre("0-1 value 0: heads 0,1,2,3 ranks 0,1 bytes 64 + 64",
                          "3-3 value 0: heads 0,1,2,3 ranks 0,1 bytes 24 + 24",
                          "4-4 value 0: heads 0,3 ranks 0,1 bytes 12 + 12",
                          "4-4 value 0: heads 1,2 ranks 0,1 bytes 20 + 20"));
  EXPECT_THAT(Listed(Ranks({odd}, 4)),
              ElementsAre("0-0 value 0: heads 0,3 ranks 0,3 bytes 12 + 12",
                          "0-0 value 0: heads 1,2 ranks 1,2 bytes 20 + 20"));
  EXPECT_THAT(
      Listed(Ranks({all}, 4)),
      ElementsAre("0-0 value 0: heads 0,1,2,3 ranks 0,1,2,3 bytes 24 + 72"));
}

TEST(ReplicasTest, AJointLatentOfKeyAndValueIsListedOnce) {
  const std::string joint =
      absl::StrCat(R"({"joint":[)",
                   LowRank({Group("0,1,2,3", 12)}, "PRE_ROPE",
                           R"({"reconstruct":{},"serves":"SERVES_KEY"},)"
                           R"({"at_runtime":{},"serves":"SERVES_VALUE"})"),
                   "]}");
  EXPECT_THAT(Listed(Ranks({joint}, 2)),
              ElementsAre("0-0 joint key 0: heads 0,1,2,3 ranks 0,1 bytes 24 "
                          "+ 24"));
}

TEST(ReplicasTest, WithMoreRanksThanHeadsEachHeadIsReplicated) {
  EXPECT_THAT(Listed(Ranks({Layer(kFullValue)}, 8)),
              ElementsAre("0-0 key 0: heads 0 ranks 0,1 bytes 32 + 32",
                          "0-0 key 0: heads 1 ranks 2,3 bytes 32 + 32",
                          "0-0 key 0: heads 2 ranks 4,5 bytes 32 + 32",
                          "0-0 key 0: heads 3 ranks 6,7 bytes 32 + 32",
                          "0-0 value 0: heads 0 ranks 0,1 bytes 32 + 32",
                          "0-0 value 0: heads 1 ranks 2,3 bytes 32 + 32",
                          "0-0 value 0: heads 2 ranks 4,5 bytes 32 + 32",
                          "0-0 value 0: heads 3 ranks 6,7 bytes 32 + 32"));
}

TEST(ReplicasTest, AnEvictionUnitThatSpansRanksHasMetadataOnEachRank) {
  const std::string evicting = Layer(
      kFullValue,
      R"(,"eviction":{"units":[{"heads":[0]},{"heads":[1,2]},{"heads":[3]}],)"
      R"("budget":128,"sinks":4,"recent":32,"lambda":1,"decay":1,)"
      R"("positions":"ORIGINAL","every_tokens":16})");
  EXPECT_THAT(Listed(Ranks({evicting}, 2)),
              ElementsAre("0-0 metadata 0: heads 1,2 ranks 0,1 bytes 8 + 8"));
}

// Each rank computes the basis of a sequence from its own heads, so nothing
// is replicated.
TEST(ReplicasTest,
     ABasisThatEachRankComputesFromItsOwnHeadsIsNotListedAsAReplica) {
  const std::string key =
      R"({"full":{},"stored":"PRE_ROPE","codec":{"bits":{"schedule":[4]},
          "channel_sequence":{},"param_dtype":"F16",
          "basis_sequence":{"min_tokens":64}}})";
  const std::string of_sequence =
      absl::StrCat(R"({"key":{"parts":[)", key, R"(]},"value":{"parts":[)",
                   kFullValue, "]}}");
  EXPECT_THAT(Listed(Ranks({of_sequence}, 2)), IsEmpty());
  // A static basis belongs to the model and covers all heads, so all ranks hold
  // its latent.
  const std::string of_model = Layer(
      R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16",
          "basis_static":{}}})");
  EXPECT_THAT(Listed(Ranks({of_model}, 2)),
              ElementsAre("0-0 value 0: heads 0,1,2,3 ranks 0,1 bytes 128 + "
                          "128"));
}

}  // namespace
}  // namespace kvasir::plan
