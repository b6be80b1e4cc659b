#include "bench/tool/ranks/thread_group.h"

#include <csignal>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "bench/tool/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

GroupTerms JoinTiles() {
  GroupTerms terms;
  terms.combine = [](absl::Span<const std::string> tiles)
      -> absl::StatusOr<worker::CombinedIds> {
    return worker::CombinedIds{.weights_id = absl::StrJoin(tiles, "+")};
  };
  return terms;
}

class ThreadGroupTest : public ::testing::Test {
 protected:
  void SetUp() override { std::signal(SIGPIPE, SIG_IGN); }
};

TEST_F(ThreadGroupTest, RanksAgreeOnTheSmallestPageCountsAndOneWeightsId) {
  ThreadGroup group(3);
  std::vector<worker::RankAgreement> agreed(3);
  KVASIR_ASSERT_OK(group.OnRanks([&](int64_t rank) -> absl::Status {
    Membership& member = group.member(rank);
    KVASIR_ASSIGN_OR_RETURN(worker::Collective* const collective,
                            member.Join(JoinTiles()));
    EXPECT_EQ(collective->shard(), (plan::TpShard{rank, 3}));
    worker::RankOffer offer;
    offer.pages = {10 + rank, 20 - rank};
    offer.host_pages = {5 * rank, 7};
    offer.weight_tiles = absl::StrCat("tiles", rank);
    KVASIR_ASSIGN_OR_RETURN(agreed[static_cast<size_t>(rank)],
                            member.Agree(offer));
    return absl::OkStatus();
  }));
  for (const worker::RankAgreement& each : agreed) {
    EXPECT_THAT(each.pages, ElementsAre(10, 18));
    EXPECT_THAT(each.host_pages, ElementsAre(0, 7));
    EXPECT_EQ(each.weights_id, "tiles0+tiles1+tiles2");
  }
}

// If a failure did not end the wait of the other ranks, this test would hang.
TEST_F(ThreadGroupTest,
       WhenOneRankFailsTheOtherRanksStopWaitingAndReturnItsError) {
  for (const bool joins : {false, true}) {
    ThreadGroup group(2);
    const absl::Status why = group.OnRanks([&](int64_t rank) -> absl::Status {
      if (rank == 1 && !joins) return absl::NotFoundError("no weights");
      KVASIR_RETURN_IF_ERROR(group.member(rank).Join(JoinTiles()).status());
      if (rank == 1) return absl::NotFoundError("no weights");
      const auto agreed = group.member(rank).Agree({});
      EXPECT_THAT(agreed, StatusIs(absl::StatusCode::kNotFound,
                                   HasSubstr("rank 1: no weights")));
      return agreed.status();
    });
    EXPECT_THAT(why, StatusIs(absl::StatusCode::kNotFound,
                              HasSubstr("rank 1: no weights")));
    EXPECT_THAT(group.OnRanks([](int64_t) { return absl::OkStatus(); }),
                StatusIs(absl::StatusCode::kNotFound, ::testing::_))
        << "an ended group stays so";
  }
}

TEST_F(ThreadGroupTest, EnginesOfAllRanksSampleTheSameTokens) {
  ThreadGroup group(2);
  std::vector<std::unique_ptr<BenchEngine>> engines(2);
  BenchEngineOptions options;
  options.model.random_weights = true;
  options.model.shape = "kvasir-tiny";
  options.model.threads = 1;
  options.max_model_len = 64;
  options.quiet = true;
  KVASIR_ASSERT_OK(group.OnRanks([&](int64_t rank) -> absl::Status {
    const auto r = static_cast<size_t>(rank);
    BenchEngineOptions own = options;
    own.group = &group.member(rank);
    KVASIR_ASSIGN_OR_RETURN(engines[r], BenchEngine::Create(own));
    KVASIR_RETURN_IF_ERROR(engines[r]->Prefill(1, 20));
    return engines[r]->Decode(1);
  }));
  EXPECT_EQ(engines[0]->results_hash(), engines[1]->results_hash());
  EXPECT_EQ(engines[0]->model().rank().weights_id(),
            engines[1]->model().rank().weights_id());
  const uint64_t first = engines[0]->results_hash();
  const int64_t calls = group.totals(1).calls;
  KVASIR_ASSERT_OK(group.OnRanks([&](int64_t rank) {
    return engines[static_cast<size_t>(rank)]->Decode(1);
  }));
  EXPECT_NE(engines[0]->results_hash(), first) << "it covers every step";
  EXPECT_EQ(engines[0]->results_hash(), engines[1]->results_hash());
  // A step has one collective call for the embedding, two for each layer, one
  // that reports rows with non-finite numbers, and one for the logits.
  EXPECT_EQ(group.totals(0).calls, group.totals(1).calls);
  EXPECT_EQ(group.totals(1).calls - calls, 1 + 2 * 6 + 1 + 1);
}

}  // namespace
}  // namespace kvasir::cli
