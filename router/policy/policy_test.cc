#include "router/policy/policy.h"

#include <vector>

#include "base/status_matchers.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ReplicaView Idle() {
  ReplicaView view;
  view.eligible = true;
  view.free_pages = 1000;
  view.total_pages = 1000;
  view.page_tokens = 64;
  view.max_num_seqs = 4;
  return view;
}

std::vector<size_t> Turns(PolicyKind kind,
                          const std::vector<ReplicaView>& replicas, int count) {
  std::vector<size_t> picked;
  for (int turn = 0; turn < count; ++turn) {
    picked.push_back(
        PickReplica(kind, replicas, {}, static_cast<uint64_t>(turn))
            .value_or(replicas.size()));
  }
  return picked;
}

size_t Least(const std::vector<ReplicaView>& replicas,
             uint64_t prompt_tokens = 64) {
  return PickReplica(PolicyKind::kLeastLoaded, replicas, {prompt_tokens}, 0)
      .value_or(replicas.size());
}

TEST(PolicyTest, RoundRobinUsesTheReplicasInTurn) {
  EXPECT_THAT(Turns(PolicyKind::kRoundRobin, {Idle(), Idle(), Idle()}, 5),
              ElementsAre(0, 1, 2, 0, 1));
}

TEST(PolicyTest, SkipsReplicasThatAreNotEligible) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].eligible = false;
  EXPECT_THAT(Turns(PolicyKind::kRoundRobin, replicas, 3),
              ElementsAre(1, 1, 1));
  EXPECT_THAT(Turns(PolicyKind::kLeastLoaded, replicas, 3),
              ElementsAre(1, 1, 1));
}

TEST(PolicyTest, ReturnsNothingIfNoReplicaIsEligible) {
  std::vector<ReplicaView> replicas = {Idle()};
  replicas[0].eligible = false;
  EXPECT_FALSE(
      PickReplica(PolicyKind::kRoundRobin, replicas, {}, 0).has_value());
  EXPECT_FALSE(PickReplica(PolicyKind::kLeastLoaded, {}, {}, 7).has_value());
}

TEST(PolicyTest, LeastLoadedUsesEquallyLoadedReplicasInTurn) {
  EXPECT_THAT(Turns(PolicyKind::kLeastLoaded, {Idle(), Idle()}, 4),
              ElementsAre(0, 1, 0, 1));
}

TEST(PolicyTest, AShorterQueueMattersMoreThanFreePages) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].waiting = 1;
  replicas[1].free_pages = 100;
  EXPECT_EQ(Least(replicas), 1u);
}

TEST(PolicyTest, AReplicaWithMoreFreePagesIsPreferred) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].free_pages = 400;
  replicas[1].free_pages = 800;
  EXPECT_EQ(Least(replicas), 1u);
}

TEST(PolicyTest, ASmallDifferenceInFreePagesDoesNotDecideTheReplica) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].free_pages = 990;
  replicas[0].running = 1;
  replicas[1].free_pages = 985;
  EXPECT_EQ(Least(replicas), 1u);
}

TEST(PolicyTest, APromptGoesToAReplicaWithEnoughFreePages) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].total_pages = 100;
  replicas[0].free_pages = 90;
  replicas[1].free_pages = 500;
  EXPECT_EQ(Least(replicas, 64 * 50), 0u);
  EXPECT_EQ(Least(replicas, 64 * 91), 1u);
}

TEST(PolicyTest, LeastLoadedAvoidsAReplicaWhoseBatchIsFull) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].running = 4;
  replicas[1].free_pages = 10;
  EXPECT_EQ(Least(replicas), 1u);
}

TEST(PolicyTest, RequestsSentSinceTheLastReportCountAsLoad) {
  std::vector<ReplicaView> replicas = {Idle(), Idle()};
  replicas[0].unreported_requests = 1;
  EXPECT_EQ(Least(replicas), 1u);
  replicas[1].unreported_tokens = 64 * 500;
  EXPECT_EQ(Least(replicas), 0u);
}

TEST(PolicyTest, ABurstOfRequestsBetweenReportsIsSpreadOverTheReplicas) {
  std::vector<ReplicaView> replicas = {Idle(), Idle(), Idle(), Idle()};
  for (uint64_t turn = 0; turn < 16; ++turn) {
    const auto picked =
        PickReplica(PolicyKind::kLeastLoaded, replicas, {64}, turn / 5);
    ++replicas[*picked].unreported_requests;
  }
  for (const ReplicaView& replica : replicas) {
    EXPECT_EQ(replica.unreported_requests, 4u);
  }
}

TEST(PolicyTest, PolicyNamesAreParsed) {
  EXPECT_EQ(*ParsePolicy("round_robin"), PolicyKind::kRoundRobin);
  EXPECT_EQ(*ParsePolicy("least_loaded"), PolicyKind::kLeastLoaded);
  EXPECT_EQ(*ParsePolicy("prefix_affinity"), PolicyKind::kPrefixAffinity);
  EXPECT_THAT(ParsePolicy("random"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("round_robin, least_loaded or")));
}

}  // namespace
}  // namespace kvasir::router
