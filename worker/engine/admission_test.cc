#include "worker/engine/admission.h"

#include <string>
#include <vector>

#include "base/status_matchers.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

Request Good() {
  Request request;
  request.request_id = "r";
  request.attempt = 2;
  request.prompt = proto::TokenBytes::FromIds({1, 2, 3});
  request.sampling.set_max_tokens(4);
  return request;
}

Admission Limited() {
  RequestLimits limits;
  limits.vocab_size = 100;
  limits.max_model_len = 32;
  limits.max_n = 4;
  return Admission(limits, /*max_queue=*/3);
}

TEST(WorkerAdmissionTest,
     APromptThatLeavesNoRoomForOutputIsRefusedWithTheReasonNeverFits) {
  EXPECT_TRUE(Limited().CheckRequest(Good()).ok());
  Request request = Good();
  request.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(32, 1));
  const char* const message =
      "prompt has 32 tokens, want at most max_model_len - 1 = 31";
  EXPECT_THAT(Limited().CheckRequest(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, message));
  // This request is wrong in two ways: its prompt is too long, and its `n` is
  // too large. The refusal names only the prompt.
  request.sampling.set_n(5);
  const Refusal refusal = Limited().CheckRequest(request);
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::NEVER_FITS);
  EXPECT_EQ(refusal.status.message(), message);
}

TEST(WorkerAdmissionTest,
     TheRouterMayRetryARequestForOtherWeightsOnAnotherWorker) {
  EXPECT_TRUE(Admission::CheckWeights("", "have").ok());
  EXPECT_TRUE(Admission::CheckWeights("have", "have").ok());
  const Refusal refusal = Admission::CheckWeights("want", "have");
  EXPECT_THAT(refusal.status,
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("has have, the request wants want")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

TEST(WorkerAdmissionTest,
     TheRouterMayNotRetryARequestWithAnInvalidValueOnAnotherWorker) {
  Request request = Good();
  request.sampling.set_n(5);
  const Refusal refusal = Limited().CheckRequest(request);
  EXPECT_THAT(refusal.status, StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("n is 5, want 1 to 4")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
}

TEST(WorkerAdmissionTest, AFullQueueAcceptsOnlyARequestThatStartsAtOnce) {
  const Admission admission = Limited();
  EXPECT_TRUE(admission.CheckPlace(Good(), {.num_queued = 2}).ok());
  EXPECT_TRUE(
      admission.CheckPlace(Good(), {.num_queued = 3, .starts_at_once = true})
          .ok());
  const Refusal refusal = admission.CheckPlace(Good(), {.num_queued = 3});
  EXPECT_THAT(refusal.status,
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("3 requests are queued, the limit is 3")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
}

TEST(WorkerAdmissionTest, ARequestWithTheIdAndAttemptOfALiveRequestIsRefused) {
  const Refusal refusal = Limited().CheckPlace(Good(), {.is_live = true});
  EXPECT_THAT(refusal.status, StatusIs(absl::StatusCode::kAlreadyExists,
                                       HasSubstr("request r, attempt 2")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
}

TEST(WorkerAdmissionTest, OnlyADrainingEngineRefusesWithTheReasonDraining) {
  EXPECT_TRUE(Admission::CheckState(Serving::kRunning).ok());
  EXPECT_EQ(Admission::CheckState(Serving::kDraining).reason,
            kvasir::v1::Refusal::DRAINING);
  for (const Serving serving :
       {Serving::kStarting, Serving::kStopped, Serving::kFailed}) {
    const Refusal refusal = Admission::CheckState(serving);
    EXPECT_EQ(refusal.status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::RETRY_ELSEWHERE);
  }
}

TEST(WorkerAdmissionTest,
     ARequestThatExceedsItsOwnQueueTimeoutMayNotBeRetriedOnAnotherWorker) {
  Request request = Good();
  EXPECT_EQ(Admission::QueueTimeout(request, absl::Seconds(2)).reason,
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
  request.queue_timeout = absl::Seconds(2);
  const Refusal refusal = Admission::QueueTimeout(request, absl::Seconds(2));
  EXPECT_THAT(refusal.status,
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("2s")));
  EXPECT_EQ(refusal.reason, kvasir::v1::Refusal::REFUSAL_UNSPECIFIED);
}

}  // namespace
}  // namespace kvasir::worker
