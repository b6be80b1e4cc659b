#include "router/replicas/replica.h"

#include "base/status_matchers.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

kvasir::v1::WorkerInfo GoodInfo() {
  kvasir::v1::WorkerInfo info;
  info.set_api_version("kvasir.v1");
  info.set_weights_id("w1");
  info.set_tokenizer_hash("t1");
  info.set_model_name("tiny");
  info.set_max_model_len(100);
  info.set_max_num_seqs(8);
  info.set_page_tokens(16);
  return info;
}

kvasir::v1::LoadReport Report(uint32_t running) {
  kvasir::v1::LoadReport report;
  report.set_running(running);
  report.set_free_pages(10);
  report.set_total_pages(20);
  return report;
}

std::shared_ptr<Replica> NewReplica() {
  return std::make_shared<Replica>("w:1", nullptr);
}

TEST(CheckWorkerTest, AcceptsAWorkerWithTheSameVersionAndWeights) {
  KVASIR_EXPECT_OK(CheckWorker("w:1", GoodInfo(), {"t1", GoodInfo()}));
  KVASIR_EXPECT_OK(CheckWorker("w:1", GoodInfo(), {"", std::nullopt}));
}

TEST(CheckWorkerTest, RefusesAWorkerOfAnotherApiVersionAndNamesBothVersions) {
  kvasir::v1::WorkerInfo info = GoodInfo();
  info.set_api_version("kvasir.v2");
  EXPECT_THAT(CheckWorker("w:1", info, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("w:1"), HasSubstr("'kvasir.v2'"),
                             HasSubstr("'kvasir.v1'"))));
}

TEST(CheckWorkerTest,
     RefusesAWorkerWhoseWeightsDifferFromThoseOfOtherReplicas) {
  kvasir::v1::WorkerInfo info = GoodInfo();
  info.set_weights_id("w2");
  EXPECT_THAT(CheckWorker("w:1", info, {"", GoodInfo()}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("weights_id"), HasSubstr("'w2'"),
                             HasSubstr("'w1'"))));
}

// Regression test: replicas with different plans were once accepted, and gave
// different answers for the same seed.
TEST(CheckWorkerTest,
     RefusesAWorkerWhoseCacheFormatDiffersFromThatOfOtherReplicas) {
  kvasir::v1::WorkerInfo info = GoodInfo();
  info.set_cache_id("c2");
  EXPECT_THAT(CheckWorker("w:1", info, {"", GoodInfo()}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("cache_id"), HasSubstr("'c2'"))));
}

TEST(CheckWorkerTest, RefusesAWorkerWhoseTokenizerDiffersFromTheRouters) {
  EXPECT_THAT(CheckWorker("w:1", GoodInfo(), {"t2", std::nullopt}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("tokenizer_hash"), HasSubstr("'t1'"),
                             HasSubstr("'t2'"))));
}

TEST(CheckWorkerTest, AWorkerThatReportsASizeOfZeroIsRefused) {
  kvasir::v1::WorkerInfo info = GoodInfo();
  info.set_page_tokens(0);
  EXPECT_THAT(CheckWorker("w:1", info, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("page_tokens 0")));
}

TEST(ReplicaTest, IsReadyAfterTheFirstReport) {
  const auto replica = NewReplica();
  EXPECT_EQ(replica->state(), ReplicaState::kConnecting);
  replica->OnInfo(GoodInfo());
  EXPECT_FALSE(replica->view().eligible);
  replica->OnReport(Report(3));
  EXPECT_TRUE(replica->view().eligible);
  EXPECT_EQ(replica->view().running, 3u);
  EXPECT_EQ(replica->view().page_tokens, 16u);
}

TEST(ReplicaTest, ADrainingReplicaIsNotEligible) {
  const auto replica = NewReplica();
  replica->OnInfo(GoodInfo());
  kvasir::v1::LoadReport report = Report(1);
  report.set_draining(true);
  replica->OnReport(report);
  EXPECT_EQ(replica->state(), ReplicaState::kDraining);
  EXPECT_FALSE(replica->view().eligible);
}

TEST(ReplicaTest, ALostReplicaIsReadyAgainAfterItsNextReport) {
  const auto replica = NewReplica();
  replica->OnInfo(GoodInfo());
  replica->OnReport(Report(1));
  replica->OnLost(absl::UnavailableError("connection lost"));
  EXPECT_EQ(replica->state(), ReplicaState::kLost);
  EXPECT_FALSE(replica->in_use());
  EXPECT_THAT(replica->detail(), HasSubstr("connection lost"));
  replica->OnInfo(GoodInfo());
  replica->OnReport(Report(1));
  EXPECT_EQ(replica->state(), ReplicaState::kReady);
  EXPECT_EQ(replica->detail(), "");
}

TEST(ReplicaTest, EachConnectionHasANumberOfItsOwn) {
  const std::shared_ptr<Replica> one = NewReplica();
  const std::shared_ptr<Replica> other = NewReplica();
  EXPECT_EQ(one->view().incarnation, 0u);
  EXPECT_EQ(one->view().name, other->view().name);
  one->OnInfo(GoodInfo());
  other->OnInfo(GoodInfo());
  const uint64_t first = one->view().incarnation;
  EXPECT_NE(first, 0u);
  EXPECT_NE(first, other->view().incarnation);
  one->OnLost(absl::UnavailableError("gone"));
  EXPECT_EQ(one->view().incarnation, first);
  one->OnInfo(GoodInfo());
  EXPECT_NE(one->view().incarnation, first);
}

TEST(ReplicaTest, TheTimeBetweenAttemptsToConnectGrowsUpToALimit) {
  const auto replica = NewReplica();
  const absl::Status lost = absl::UnavailableError("no route");
  const absl::Duration first = replica->OnLost(lost);
  EXPECT_GT(replica->OnLost(lost), first);
  absl::Duration last;
  for (int i = 0; i < 100; ++i) last = replica->OnLost(lost);
  EXPECT_EQ(last, absl::Seconds(5));
  replica->OnInfo(GoodInfo());
  replica->OnReport(Report(0));
  EXPECT_EQ(replica->OnLost(lost), first);
}

TEST(ReplicaTest, ARequestThatEndsBeforeTheNextReportIsNoLoad) {
  const auto replica = NewReplica();
  replica->OnInfo(GoodInfo());
  replica->OnReport(Report(0));
  {
    ReplicaLease lease(replica, 100);
    lease.OnAccepted();
    EXPECT_EQ(replica->view().unreported_requests, 1u);
  }
  EXPECT_EQ(replica->view().unreported_requests, 0u);
  EXPECT_EQ(replica->view().unreported_tokens, 0u);
  {
    ReplicaLease lease(replica, 100);
    lease.OnAccepted();
    replica->OnReport(Report(1));
  }
  EXPECT_EQ(replica->view().unreported_requests, 0u);
}

TEST(ReplicaTest, CountsRequestsSinceTheLastReport) {
  const auto replica = NewReplica();
  replica->OnInfo(GoodInfo());
  replica->OnReport(Report(0));
  {
    ReplicaLease first(replica, 100);
    ReplicaLease second(replica, 50);
    EXPECT_EQ(replica->view().unreported_requests, 2u);
    EXPECT_EQ(replica->view().unreported_tokens, 150u);
    first.OnAccepted();
    first.OnAccepted();
    EXPECT_EQ(replica->view().unreported_requests, 2u);
    replica->OnReport(Report(1));
    EXPECT_EQ(replica->view().unreported_requests, 1u) << "the second request";
    EXPECT_EQ(replica->view().unreported_tokens, 50u) << "is not accepted yet";
    EXPECT_EQ(replica->in_flight(), 2u);
  }
  EXPECT_EQ(replica->in_flight(), 0u);
  EXPECT_EQ(replica->view().unreported_requests, 0u);
  EXPECT_EQ(replica->view().unreported_tokens, 0u);
}

}  // namespace
}  // namespace kvasir::router
