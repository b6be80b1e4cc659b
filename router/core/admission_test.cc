#include "router/core/admission.h"

#include <optional>
#include <vector>

#include "base/status_matchers.h"
#include "proto/refusal.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Answer = Admission::Answer;

// Enters the ticket, which must not be refused.
Answer Enter(Admission& admission, Ticket ticket, int32_t priority) {
  return admission.Enter(ticket, priority).value();
}

CanonicalRequest NewRequest() {
  CanonicalRequest request;
  request.prompt = TokenBytes::FromIds({1, 2, 3});
  request.sampling = NeutralSampling();
  return request;
}

kvasir::v1::WorkerInfo Info(uint32_t max_n) {
  kvasir::v1::WorkerInfo info;
  info.set_max_model_len(8);
  info.set_max_n(max_n);
  return info;
}

constexpr absl::Time kNow = absl::UnixEpoch();

TEST(AdmissionTest, RequestsOverTheLimitWaitUntilTheQueueIsFull) {
  Admission admission({2, 1});
  EXPECT_EQ(Enter(admission, 1, 0), Answer::kRun);
  EXPECT_EQ(Enter(admission, 2, 0), Answer::kRun);
  EXPECT_EQ(Enter(admission, 3, 0), Answer::kWait);
  EXPECT_FALSE(admission.Enter(4, 0).ok());
  EXPECT_EQ(admission.in_flight(), 2u);
  EXPECT_EQ(admission.waiting(), 1u);
}

TEST(AdmissionTest, AWaitingRequestRunsWhenARunningOneEnds) {
  Admission admission({1, 4});
  Enter(admission, 1, 0);
  Enter(admission, 2, 0);
  Enter(admission, 3, 0);
  EXPECT_THAT(admission.Leave(), ElementsAre(2));
  EXPECT_THAT(admission.Leave(), ElementsAre(3));
  EXPECT_THAT(admission.Leave(), IsEmpty());
  EXPECT_EQ(admission.in_flight(), 0u);
}

TEST(AdmissionTest, RequestsWithLowerPriorityValuesRunFirst) {
  Admission admission({1, 4});
  Enter(admission, 1, 0);
  Enter(admission, 2, 5);
  Enter(admission, 3, -5);
  Enter(admission, 4, 5);
  EXPECT_THAT(admission.Leave(), ElementsAre(3));
  EXPECT_THAT(admission.Leave(), ElementsAre(2));
  EXPECT_THAT(admission.Leave(), ElementsAre(4));
}

TEST(AdmissionTest, OnlyAWaitingRequestCanBeWithdrawnFromTheQueue) {
  Admission admission({1, 4});
  Enter(admission, 1, 0);
  Enter(admission, 2, 0);
  EXPECT_FALSE(admission.Withdraw(1));
  EXPECT_TRUE(admission.Withdraw(2));
  EXPECT_FALSE(admission.Withdraw(2));
  EXPECT_THAT(admission.Leave(), IsEmpty());
  EXPECT_EQ(admission.waiting(), 0u);
}

TEST(AdmissionTest, TheErrorForAFullQueueNamesTheLimits) {
  Admission admission({1, 0});
  Enter(admission, 1, 0);
  const absl::Status status = admission.Enter(2, 0).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               AllOf(HasSubstr("1 of at most 1 requests run"),
                                     HasSubstr("the router is full"))));
  EXPECT_EQ(proto::RefusalOf(status)->reason(),
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

TEST(AdmissionTest, ADrainRefusesOnlyNewRequests) {
  Admission admission({1, 4});
  Enter(admission, 1, 0);
  Enter(admission, 2, 0);
  admission.BeginDrain();
  const absl::Status status = admission.Enter(3, 0).status();
  EXPECT_EQ(proto::RefusalOf(status)->reason(), kvasir::v1::Refusal::DRAINING);
  EXPECT_THAT(admission.Leave(), ElementsAre(2));
}

TEST(AdmissionTest,
     APromptOfMaxModelLenTokensIsRefusedBecauseItLeavesNoRoomForOutput) {
  CanonicalRequest request = NewRequest();
  KVASIR_EXPECT_OK(Admission::CheckRequest(request, Info(16), 128, kNow));
  request.prompt = TokenBytes::Adopt(std::vector<int32_t>(8, 1));
  const absl::Status status =
      Admission::CheckRequest(request, Info(16), 128, kNow);
  EXPECT_EQ(proto::RefusalOf(status)->reason(),
            kvasir::v1::Refusal::NEVER_FITS);
  request.prompt = {};
  EXPECT_THAT(Admission::CheckRequest(request, Info(16), 128, kNow),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the prompt is empty")));
}

TEST(AdmissionTest, TheSmallerOfTheWorkersAndTheRoutersLimitOfSamplesApplies) {
  CanonicalRequest request = NewRequest();
  request.sampling.set_n(17);
  EXPECT_THAT(
      Admission::CheckRequest(request, Info(16), 128, kNow),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("n (the number of samples) is 17, want 1 to 16")));
  KVASIR_EXPECT_OK(Admission::CheckRequest(request, Info(0), 128, kNow));
  request.sampling.set_n(200);
  for (const uint32_t reported : {0u, 500u}) {
    EXPECT_THAT(
        Admission::CheckRequest(request, Info(reported), 128, kNow),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("n (the number of samples) is 200, want 1 to 128")));
  }
}

TEST(AdmissionTest, AWaitingRequestEndsAtTheEarliestOfItsTimeouts) {
  CanonicalRequest request = NewRequest();
  const absl::Status full = Admission::WaitedTooLong(absl::Seconds(30));
  Admission::Waiting waiting = {.arrival = kNow, .since = kNow};
  Admission::Patience patience =
      Admission::PatienceOf(request, waiting, absl::Seconds(30), full);
  EXPECT_EQ(patience.until, kNow + absl::Seconds(30));
  EXPECT_EQ(proto::RefusalOf(patience.then)->reason(),
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
  request.queue_timeout = absl::Seconds(2);
  patience = Admission::PatienceOf(request, waiting, absl::Seconds(30), full);
  EXPECT_EQ(patience.until, kNow + absl::Seconds(2));
  EXPECT_THAT(patience.then, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                      HasSubstr("own timeout")));
  request.deadline = kNow + absl::Seconds(1);
  patience = Admission::PatienceOf(request, waiting, absl::Seconds(30), full);
  EXPECT_EQ(patience.until, request.deadline);
  EXPECT_THAT(patience.then, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                      HasSubstr("the router's queue")));
}

TEST(AdmissionTest, TheQueueTimeoutCountsFromTheLossOfTheWorker) {
  CanonicalRequest request = NewRequest();
  Admission::Waiting waiting = {.arrival = kNow,
                                .since = kNow + absl::Minutes(5)};
  const absl::Status lost = absl::UnavailableError("lost");
  EXPECT_EQ(
      Admission::PatienceOf(request, waiting, absl::Seconds(30), lost).until,
      waiting.since + absl::Seconds(30));
  request.queue_timeout = absl::Seconds(2);
  EXPECT_EQ(
      Admission::PatienceOf(request, waiting, absl::Seconds(30), lost).until,
      kNow + absl::Seconds(2))
      << "the client's own timeout lasts until the first token";
  waiting.begun = true;
  const Admission::Patience begun =
      Admission::PatienceOf(request, waiting, absl::Seconds(30), lost);
  EXPECT_EQ(begun.until, waiting.since + absl::Seconds(30));
  EXPECT_EQ(begun.then, lost);
}

TEST(AdmissionTest, ARequestThatResumesRunsAtOnceEvenAboveTheLimit) {
  Admission admission({.max_in_flight = 1, .max_queue = 1});
  KVASIR_ASSERT_OK(admission.Enter(1, 0));
  KVASIR_ASSERT_OK(admission.Enter(2, 0));
  EXPECT_THAT(admission.Leave(), ::testing::ElementsAre(2));
  admission.Resume();
  EXPECT_EQ(admission.in_flight(), 2u);
  KVASIR_ASSERT_OK(admission.Enter(3, 0));
  EXPECT_TRUE(admission.Leave().empty()) << "one still runs";
  EXPECT_THAT(admission.Leave(), ::testing::ElementsAre(3));
}

}  // namespace
}  // namespace kvasir::router
