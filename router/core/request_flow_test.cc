#include "router/core/request_flow.h"

#include "base/status_matchers.h"
#include "proto/refusal.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using kvasir::v1::GenerateEvent;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

absl::Time At(int milliseconds) {
  return kStart + absl::Milliseconds(milliseconds);
}

RequestFlow NewFlow(uint32_t n = 1, int max_attempts = 3,
                    absl::Duration queue_timeout = absl::ZeroDuration()) {
  CanonicalRequest request;
  request.model = "tiny";
  request.tenant = "t";
  request.client_request_id = "c";
  request.traceparent = "00-trace";
  request.prompt = TokenBytes::FromIds({1, 2, 3});
  request.sampling = NeutralSampling();
  request.sampling.set_n(n);
  request.sampling.set_max_tokens(3);
  request.deadline = At(10000);
  request.queue_timeout = queue_timeout;
  return RequestFlow(std::move(request), "id", max_attempts, kStart);
}

// Returns the flow of a request whose client gets the whole answer in
// one response.
RequestFlow NewWholeAnswer(uint32_t n = 1) {
  CanonicalRequest request = NewFlow(n).request();
  request.folded = true;
  return RequestFlow(std::move(request), "id", 3, kStart);
}

GenerateEvent Accepted() {
  GenerateEvent event;
  event.mutable_accepted()->set_prompt_tokens(3);
  return event;
}

GenerateEvent Tokens(std::vector<int32_t> ids, uint32_t index = 0) {
  GenerateEvent event;
  event.mutable_tokens()->set_index(index);
  event.mutable_tokens()->mutable_token_ids()->Add(ids.begin(), ids.end());
  return event;
}

GenerateEvent Finish(uint32_t index = 0) {
  GenerateEvent event;
  event.mutable_finish()->set_index(index);
  event.mutable_finish()->set_reason(kvasir::v1::FINISH_LENGTH);
  event.mutable_finish()->set_cached_tokens(2);
  return event;
}

absl::Status Full() {
  return proto::RefusedError(kvasir::v1::Refusal::RETRY_ELSEWHERE, "full");
}

TEST(RequestFlowTest, ARequestWithACompleteStreamEndsWithOk) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnEvent(Accepted(), At(2)).deliver);
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 8}), At(5)).deliver);
  EXPECT_TRUE(flow.OnEvent(Finish(), At(6)).deliver);
  KVASIR_EXPECT_OK(*flow.OnAttemptDone(absl::OkStatus(), At(7)));
  const AccessRecord record = flow.Record(absl::OkStatus(), At(7));
  EXPECT_EQ(record.finish_reason, "length");
  EXPECT_EQ(record.prompt_tokens, 3u);
  EXPECT_EQ(record.output_tokens, 2u);
  EXPECT_EQ(record.cached_tokens, 2u);
  EXPECT_EQ(record.attempts, 1u);
  EXPECT_EQ(record.replica, "a");
  EXPECT_EQ(record.queue, absl::Milliseconds(1));
  EXPECT_EQ(record.time_to_first_token, absl::Milliseconds(5));
  EXPECT_EQ(record.duration, absl::Milliseconds(7));
  EXPECT_EQ(record.traceparent, "00-trace");
}

TEST(RequestFlowTest, KeepsEmittedTokensSoThatAnotherWorkerCanContinue) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  flow.OnEvent(Tokens({8, 9}), At(3));
  KVASIR_ASSERT_OK_AND_ASSIGN(const TokenBytes emitted,
                              TokenBytes::FromBytes(flow.emitted()));
  EXPECT_THAT(emitted.ToIds(), ElementsAre(7, 8, 9));
}

TEST(RequestFlowTest, MeasuresTheTimeToTheFirstTokenAndTheGapsOfEachSample) {
  RequestFlow flow = NewFlow(2);
  flow.OnAttempt("a", At(0));
  const auto first = flow.OnEvent(Tokens({1}, 0), At(10));
  EXPECT_EQ(first.time_to_first_token, absl::Milliseconds(10));
  EXPECT_FALSE(first.inter_token.has_value());
  const auto other = flow.OnEvent(Tokens({1}, 1), At(12));
  EXPECT_FALSE(other.time_to_first_token.has_value());
  EXPECT_FALSE(other.inter_token.has_value());
  EXPECT_EQ(flow.OnEvent(Tokens({2}, 0), At(15)).inter_token,
            absl::Milliseconds(5));
}

TEST(RequestFlowTest, ARequestThatAWorkerRefusesIsSentToAnotherWorker) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnAttemptDone(Full(), At(2)).has_value());
  EXPECT_TRUE(flow.Tried("a", 0));
  EXPECT_FALSE(flow.Tried("b", 0));
  flow.OnAttempt("b", At(3));
  EXPECT_EQ(flow.attempts(), 2u);
}

TEST(RequestFlowTest,
     IfAWorkerIsLostBeforeTheFirstTokenAnotherWorkerGetsTheRequest) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Accepted(), At(2));
  EXPECT_FALSE(
      flow.OnAttemptDone(absl::UnavailableError("gone"), At(3)).has_value());
  flow.OnAttempt("b", At(4));
  EXPECT_FALSE(flow.OnEvent(Accepted(), At(5)).deliver)
      << "the client receives it once";
}

// The client has received nothing yet, so it cannot notice that another worker
// continues the answer.
TEST(RequestFlowTest, AnAnswerThatIsNotStreamedContinuesAtAnotherWorker) {
  RequestFlow flow = NewWholeAnswer();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 8}), At(2)).deliver);
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("recvmsg"), At(3)),
            std::nullopt);
  EXPECT_EQ(flow.emitted(), std::string("\7\0\0\0\10\0\0\0", 8));
  flow.OnAttempt("b", At(4));
  EXPECT_TRUE(flow.OnEvent(Tokens({9}), At(5)).deliver);
  EXPECT_TRUE(flow.OnEvent(Finish(), At(6)).deliver);
  KVASIR_EXPECT_OK(*flow.OnAttemptDone(absl::OkStatus(), At(7)));
}

TEST(RequestFlowTest, LosingTheWorkerAfterTheLastFinishDoesNotFailTheRequest) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  flow.OnEvent(Finish(), At(3));
  KVASIR_EXPECT_OK(
      *flow.OnAttemptDone(absl::UnavailableError("recvmsg"), At(4)));
}

// A worker cannot continue several samples from their tokens. The samples are
// seeded, so it generates the same tokens again.
TEST(RequestFlowTest, SeveralSamplesInOneResponseAreGeneratedAgainElsewhere) {
  RequestFlow flow = NewWholeAnswer(/*n=*/2);
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7, 8}, 0), At(2));
  flow.OnEvent(Tokens({5}, 1), At(2));
  flow.OnEvent(Finish(1), At(2));
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("recvmsg"), At(3)),
            std::nullopt);
  EXPECT_EQ(flow.emitted(), "");
  flow.OnAttempt("b", At(4));
  EXPECT_FALSE(flow.OnEvent(Tokens({7}, 0), At(5)).deliver);
  const RequestFlow::Delivery rest = flow.OnEvent(Tokens({8, 9}, 0), At(6));
  EXPECT_TRUE(rest.deliver);
  EXPECT_EQ(rest.repeated_tokens, 1u);
  // Sample 1 was already complete, so none of its events are delivered again.
  EXPECT_FALSE(flow.OnEvent(Tokens({5}, 1), At(7)).deliver);
  EXPECT_FALSE(flow.OnEvent(Finish(1), At(7)).deliver);
  EXPECT_TRUE(flow.OnEvent(Finish(0), At(8)).deliver);
  KVASIR_EXPECT_OK(*flow.OnAttemptDone(absl::OkStatus(), At(9)));
  EXPECT_EQ(flow.Record(absl::OkStatus(), At(9)).output_tokens, 4u);
}

TEST(RequestFlowTest, AWorkerThatRegeneratesDifferentTokensBreaksTheProtocol) {
  RequestFlow flow = NewWholeAnswer(/*n=*/2);
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7, 8}), At(2));
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("recvmsg"), At(3)),
            std::nullopt);
  flow.OnAttempt("b", At(4));
  EXPECT_FALSE(flow.OnEvent(Tokens({7}), At(5)).reset_attempt);
  // If this worker refuses the request while it repeats tokens, a third one
  // is asked.
  EXPECT_EQ(flow.OnAttemptDone(Full(), At(6)), std::nullopt);
  flow.OnAttempt("c", At(7));
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 9}), At(8)).reset_attempt);
  EXPECT_THAT(*flow.OnAttemptDone(absl::CancelledError(""), At(9)),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("other tokens")));
}

TEST(RequestFlowTest, ARequestWhoseSamplesHaveAllFinishedIsNotSentAgain) {
  for (const absl::Status& end :
       {Full(), absl::DeadlineExceededError("late"),
        proto::RefusedError(kvasir::v1::Refusal::DRAINING, "draining")}) {
    RequestFlow flow = NewWholeAnswer();
    flow.OnAttempt("a", At(1));
    flow.OnEvent(Tokens({7}), At(2));
    flow.OnEvent(Finish(), At(3));
    KVASIR_EXPECT_OK(*flow.OnAttemptDone(end, At(4)));
  }
}

TEST(RequestFlowTest, AWorkerThatRegeneratesFewerTokensBreaksTheProtocol) {
  CanonicalRequest request = NewFlow().request();
  request.folded = true;
  request.sampling.set_prompt_logprobs(0);
  RequestFlow flow(request, "id", 3, kStart);
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7, 8}), At(2));
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("recvmsg"), At(3)),
            std::nullopt);
  flow.OnAttempt("b", At(4));
  EXPECT_FALSE(flow.OnEvent(Tokens({7}), At(5)).deliver);
  EXPECT_TRUE(flow.OnEvent(Finish(), At(6)).reset_attempt);
  EXPECT_THAT(*flow.OnAttemptDone(absl::CancelledError(""), At(7)),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("earlier than the worker before")));
}

TEST(RequestFlowTest, ReceivedTokensCountAgainstTheMemoryBudget) {
  const auto budget = std::make_shared<ByteBudget>(100);
  CanonicalRequest request = NewFlow().request();
  KVASIR_ASSERT_OK_AND_ASSIGN(request.bytes, budget->Take(10));
  RequestFlow flow(std::move(request), "id", 3, kStart);
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7, 8}), At(2));
  EXPECT_EQ(budget->used_bytes(), 18u);
}

TEST(RequestFlowTest, TheLossOfAWorkerAfterTheFirstTokenEndsTheRequest) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  const auto end = flow.OnAttemptDone(absl::UnavailableError("gone"), At(3));
  EXPECT_THAT(*end,
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
  EXPECT_EQ(flow.Record(*end, At(3)).finish_reason, "lost");
}

TEST(RequestFlowTest,
     AStreamWhoseRoundingMayDifferMovesOnlyIfNothingIsRepeated) {
  for (const uint32_t n : {1, 2}) {
    RequestFlow flow = NewFlow(n);
    flow.OnAttempt("a", At(1), MoveStreams::kRounding);
    EXPECT_TRUE(flow.OnEvent(Tokens({7}), At(2)).deliver);
    EXPECT_EQ(
        flow.OnAttemptDone(absl::UnavailableError("gone"), At(3)).has_value(),
        n == 2);
  }
}

TEST(RequestFlowTest, AStreamGoesOnAtAnotherWorkerIfTheTokensStayTheSame) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1), MoveStreams::kExact);
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 8}), At(2)).deliver);
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("gone"), At(3)),
            std::nullopt);
  EXPECT_EQ(flow.emitted(), std::string("\7\0\0\0\10\0\0\0", 8));
  flow.OnAttempt("b", At(4), MoveStreams::kExact);
  const RequestFlow::Delivery rest = flow.OnEvent(Tokens({9}), At(5));
  EXPECT_TRUE(rest.deliver);
  EXPECT_EQ(rest.repeated_tokens, 0u);
  EXPECT_FALSE(rest.time_to_first_token.has_value()) << "it is observed once";
  EXPECT_EQ(rest.inter_token, absl::Milliseconds(3));
  EXPECT_TRUE(flow.OnEvent(Finish(), At(6)).deliver);
  KVASIR_EXPECT_OK(*flow.OnAttemptDone(absl::OkStatus(), At(7)));
  EXPECT_EQ(flow.Record(absl::OkStatus(), At(7)).output_tokens, 3u);
}

TEST(RequestFlowTest, AWorkerThatHasComeBackMayBeAskedAgain) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1), MoveStreams::kExact, /*connection=*/4);
  EXPECT_TRUE(flow.Tried("a", 4));
  EXPECT_FALSE(flow.Tried("a", 5));
}

TEST(RequestFlowTest, OnlyAWorkerThatWasMerelySilentMayBeAskedAgain) {
  for (const bool blamed : {false, true}) {
    RequestFlow flow = NewFlow();
    flow.OnAttempt("a", At(1), MoveStreams::kExact, /*connection=*/4);
    EXPECT_TRUE(flow.Leave(blamed, At(2)));
    EXPECT_TRUE(flow.Tried("a", 4));
    EXPECT_EQ(flow.OnAttemptDone(absl::CancelledError("left"), At(3)),
              std::nullopt);
    EXPECT_EQ(flow.Tried("a", 4), blamed);
  }
}

TEST(RequestFlowTest, ARequestWaitsIfItIsNewOrHasOutputOrLostItsWorker) {
  RequestFlow flow = NewFlow();
  EXPECT_TRUE(flow.Waits());
  EXPECT_EQ(flow.waiting().since, kStart);
  flow.OnAttempt("a", At(1), MoveStreams::kExact);
  EXPECT_EQ(flow.OnAttemptDone(Full(), At(2)), std::nullopt);
  EXPECT_FALSE(flow.Waits()) << "it was refused";
  flow.OnAttempt("b", At(3), MoveStreams::kExact);
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("gone"), At(4)),
            std::nullopt);
  EXPECT_TRUE(flow.Waits());
  EXPECT_EQ(flow.waiting().since, At(4));
  EXPECT_FALSE(flow.waiting().begun);

  RequestFlow stream = NewFlow();
  stream.OnAttempt("a", At(1), MoveStreams::kExact);
  stream.OnEvent(Tokens({7}), At(2));
  EXPECT_EQ(stream.OnAttemptDone(absl::UnavailableError("gone"), At(3)),
            std::nullopt);
  stream.OnAttempt("b", At(4), MoveStreams::kExact);
  EXPECT_EQ(stream.OnAttemptDone(Full(), At(5)), std::nullopt);
  EXPECT_TRUE(stream.Waits());
  EXPECT_TRUE(stream.waiting().begun);
  EXPECT_EQ(stream.waiting().arrival, kStart);
}

TEST(RequestFlowTest, ADeadlineThatPassesDuringTheWaitIsDeadlineExceeded) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("gone"), At(4)),
            std::nullopt);
  EXPECT_THAT(flow.NoReplica(absl::UnavailableError("no replica")),
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
  EXPECT_THAT(flow.NoReplica(absl::DeadlineExceededError("late")),
              StatusIs(absl::StatusCode::kDeadlineExceeded, "late"));
}

TEST(RequestFlowTest, AStreamDoesNotMoveAfterItsDeadlineOrACancel) {
  RequestFlow late = NewFlow();
  late.OnAttempt("a", At(1), MoveStreams::kExact);
  late.OnEvent(Tokens({7}), At(2));
  EXPECT_TRUE(late.OnAttemptDone(absl::UnavailableError("gone"), At(10000))
                  .has_value());
  RequestFlow cancelled = NewFlow();
  cancelled.OnAttempt("a", At(1), MoveStreams::kExact);
  cancelled.OnEvent(Tokens({7}), At(2));
  cancelled.Cancel(CancelReason::kClient, At(3));
  EXPECT_TRUE(cancelled.OnAttemptDone(absl::UnavailableError("gone"), At(4))
                  .has_value());
}

TEST(RequestFlowTest, ARequestThatTwoWorkersDiedOfIsNotSentToAThird) {
  for (const bool delivered : {false, true}) {
    RequestFlow flow = NewFlow(1, /*max_attempts=*/6);
    flow.OnAttempt("a", At(1), MoveStreams::kExact);
    if (delivered) flow.OnEvent(Tokens({7}), At(2));
    EXPECT_EQ(flow.OnAttemptDone(Full(), At(3)), std::nullopt)
        << "a refusal is no loss";
    flow.OnAttempt("unreachable", At(4), MoveStreams::kExact);
    EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("refused"), At(4)),
              std::nullopt)
        << "a worker that has not received the request did not die of it";
    flow.OnAttempt("b", At(4), MoveStreams::kExact);
    flow.OnEvent(Accepted(), At(4));
    EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("gone"), At(5)),
              std::nullopt);
    flow.OnAttempt("c", At(6), MoveStreams::kExact);
    flow.OnEvent(Accepted(), At(6));
    EXPECT_THAT(*flow.OnAttemptDone(absl::UnavailableError("gone"), At(7)),
                StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
  }
}

TEST(RequestFlowTest,
     AStreamThatNoOtherWorkerAcceptsEndsAsLostAndNotAsRefused) {
  for (const absl::Status& error :
       {Full(), absl::InvalidArgumentError("max_model_len is 5")}) {
    RequestFlow flow = NewFlow();
    flow.OnAttempt("a", At(1), MoveStreams::kExact);
    flow.OnEvent(Tokens({7}), At(2));
    EXPECT_EQ(flow.OnAttemptDone(absl::UnavailableError("gone"), At(3)),
              std::nullopt);
    flow.OnAttempt("b", At(4), MoveStreams::kExact);
    const auto end = flow.OnAttemptDone(error, At(5));
    const absl::Status status =
        end.has_value() ? *end : flow.NoReplica(absl::InternalError("x"));
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
    EXPECT_FALSE(proto::RefusalOf(status).has_value());
    EXPECT_EQ(flow.Record(status, At(5)).finish_reason, "lost");
  }
}

TEST(RequestFlowTest, NamesTheReasonForEachMoveAndItsTokens) {
  const absl::Status drains =
      proto::RefusedError(kvasir::v1::Refusal::DRAINING, "drains");
  for (const auto& [status, reason] :
       {std::pair(absl::OkStatus(), MoveReason::kAborted),
        std::pair(absl::UnavailableError("gone"), MoveReason::kLost),
        std::pair(drains, MoveReason::kDrained),
        std::pair(Full(), MoveReason::kRefused)}) {
    RequestFlow flow = NewFlow();
    flow.OnAttempt("a", At(1), MoveStreams::kExact);
    flow.OnEvent(Tokens({7, 8}), At(2));
    EXPECT_EQ(flow.OnAttemptDone(status, At(3)), std::nullopt);
    EXPECT_EQ(flow.move_reason(), reason) << status;
    EXPECT_EQ(flow.tokens_to_prefill(), 5u);
    EXPECT_EQ(flow.kept_bytes(), 8);
  }
  RequestFlow hung = NewFlow(/*n=*/2);
  hung.OnAttempt("a", At(1), MoveStreams::kExact);
  hung.OnEvent(Tokens({7, 8}), At(2));
  EXPECT_TRUE(hung.Leave(false, At(3)));
  EXPECT_EQ(hung.OnAttemptDone(absl::CancelledError(""), At(3)), std::nullopt);
  EXPECT_EQ(hung.move_reason(), MoveReason::kHung);
  EXPECT_EQ(hung.tokens_to_prefill(), 3u) << "samples are generated again";
}

// A worker that hangs did not die of the request, unless its engine is stuck.
TEST(RequestFlowTest, ARequestLeavesAWorkerThatHangs) {
  for (const bool blamed : {false, true}) {
    RequestFlow flow = NewFlow(1, /*max_attempts=*/9);
    for (int i = 0; i < 3; ++i) {
      flow.OnAttempt(std::string(1, static_cast<char>('a' + i)), At(4 * i),
                     MoveStreams::kExact);
      flow.OnEvent(Tokens({7}), At(4 * i + 1));
      // The last worker that a request may die of is not left.
      EXPECT_EQ(flow.Leave(blamed, At(4 * i + 2)), !blamed || i == 0);
      EXPECT_FALSE(flow.Leave(blamed, At(4 * i + 2))) << "it is left once";
      if (blamed && i > 0) break;
      // Tokens that were on their way are still delivered, and not repeated.
      EXPECT_EQ(flow.OnAttemptDone(absl::CancelledError(""), At(4 * i + 3)),
                std::nullopt);
    }
    EXPECT_EQ(flow.emitted().size(), (blamed ? 2u : 3u) * 4);
  }
}

TEST(RequestFlowTest, ARequestThatMayNotBeSentAgainStaysAtAWorkerThatHangs) {
  RequestFlow stream = NewFlow();
  stream.OnAttempt("a", At(1));
  stream.OnEvent(Tokens({7}), At(2));
  EXPECT_FALSE(stream.Leave(false, At(3)));
  RequestFlow late = NewFlow();
  late.OnAttempt("a", At(1));
  EXPECT_FALSE(late.Leave(false, At(10000)));
  RequestFlow cancelled = NewFlow();
  cancelled.OnAttempt("a", At(1));
  cancelled.Cancel(CancelReason::kClient, At(2));
  EXPECT_FALSE(cancelled.Leave(false, At(3)));
  RequestFlow last = NewFlow(1, /*max_attempts=*/1);
  last.OnAttempt("a", At(1));
  EXPECT_FALSE(last.Leave(false, At(2)));
}

TEST(RequestFlowTest, TheEndOfARequestThatLeftItsWorkerNamesTheCause) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.Leave(false, At(2)));
  EXPECT_EQ(flow.OnAttemptDone(absl::CancelledError(""), At(3)), std::nullopt);
  EXPECT_THAT(flow.NoReplica(absl::InternalError("x")),
              StatusIs(absl::StatusCode::kUnavailable, "the worker hangs"));
}

TEST(RequestFlowTest, TheNumberOfAttemptsIsLimited) {
  RequestFlow flow = NewFlow(1, 2);
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnAttemptDone(Full(), At(2)).has_value());
  flow.OnAttempt("b", At(3));
  const auto end = flow.OnAttemptDone(Full(), At(4));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(flow.Record(*end, At(4)).finish_reason, "refused");
}

TEST(RequestFlowTest, AfterTheDeadlineNoOtherWorkerIsTried) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnAttemptDone(Full(), At(10000)).has_value());
}

TEST(RequestFlowTest, ACancelAtTheDeadlineCountsAsAPassedDeadline) {
  for (const int left_ms : {101, 100, 0, -5}) {
    RequestFlow flow = NewFlow();
    flow.OnAttempt("a", At(1));
    flow.Cancel(CancelReason::kClient, At(10000 - left_ms));
    const absl::Status end =
        *flow.OnAttemptDone(absl::CancelledError(""), At(10001));
    const bool passed = left_ms <= 100;
    EXPECT_EQ(absl::IsDeadlineExceeded(end), passed) << left_ms;
    EXPECT_EQ(flow.Record(end, At(10001)).finish_reason,
              passed ? "deadline" : "cancelled");
  }
}

// The transport reports UNAVAILABLE if the deadline passes while the worker is
// closing the connection (HTTP/2 GOAWAY).
TEST(RequestFlowTest, ACallThatTheDeadlineEndedDoesNotCountAsALostWorker) {
  for (const absl::Status& status :
       {absl::CancelledError(""),
        absl::UnavailableError("Stream removed (GOAWAY received)")}) {
    RequestFlow flow = NewFlow();
    flow.OnAttempt("a", At(1));
    const auto end = flow.OnAttemptDone(status, At(10000));
    EXPECT_THAT(*end, StatusIs(absl::StatusCode::kDeadlineExceeded,
                               "the request's deadline passed"));
    EXPECT_EQ(flow.Record(*end, At(10000)).finish_reason, "deadline");
  }
}

TEST(RequestFlowTest, AfterTheClientsOwnTimeoutNoOtherWorkerIsTried) {
  RequestFlow flow = NewFlow(1, 3, absl::Milliseconds(50));
  EXPECT_EQ(flow.QueueTimeoutLeft(At(20)), absl::Milliseconds(30));
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnAttemptDone(Full(), At(49)).has_value());
  flow.OnAttempt("b", At(49));
  const auto end = flow.OnAttemptDone(Full(), At(50));
  ASSERT_TRUE(end.has_value());
  EXPECT_THAT(*end, StatusIs(absl::StatusCode::kDeadlineExceeded,
                             HasSubstr("own timeout of 50ms")));
}

TEST(RequestFlowTest, AWorkerLostAfterTheFirstTokenIsNotReportedAsATimeout) {
  RequestFlow flow = NewFlow(1, 3, absl::Milliseconds(50));
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  const auto end = flow.OnAttemptDone(absl::UnavailableError("gone"), At(90));
  EXPECT_THAT(*end,
              StatusIs(absl::StatusCode::kUnavailable, "the worker is lost"));
}

TEST(RequestFlowTest, ARequestThatFitsNoWorkerIsNotSentToAnotherWorker) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  const auto end = flow.OnAttemptDone(
      proto::RefusedError(kvasir::v1::Refusal::NEVER_FITS, "900 pages"), At(2));
  EXPECT_THAT(*end, StatusIs(absl::StatusCode::kInvalidArgument, "900 pages"));
}

TEST(RequestFlowTest,
     AStreamThatEndsBeforeItsSamplesFinishCountsAsALostWorker) {
  RequestFlow flow = NewFlow(2);
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  flow.OnEvent(Finish(0), At(3));
  EXPECT_THAT(*flow.OnAttemptDone(absl::OkStatus(), At(4)),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("the worker ended the stream early")));
}

TEST(RequestFlowTest, AResetByTheWorkerDoesNotCountAsACancelByTheClient) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.OnEvent(Tokens({7}), At(2));
  EXPECT_THAT(*flow.OnAttemptDone(absl::CancelledError("RST"), At(3)),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("the worker reset the stream")));
}

TEST(RequestFlowTest, ARequestThatAWorkerAbortsIsSentToAnotherWorker) {
  for (const kvasir::v1::FinishReason reason :
       {kvasir::v1::FINISH_ABORT, kvasir::v1::FINISH_REASON_UNSPECIFIED}) {
    RequestFlow flow = NewFlow();
    GenerateEvent abort = Finish();
    abort.mutable_finish()->set_reason(reason);
    flow.OnAttempt("a", At(1));
    EXPECT_FALSE(flow.OnEvent(abort, At(2)).deliver);
    EXPECT_FALSE(flow.OnAttemptDone(absl::OkStatus(), At(3)).has_value());
    flow.OnAttempt("b", At(4));
    EXPECT_TRUE(flow.OnEvent(Tokens({7}), At(5)).deliver);
    EXPECT_FALSE(flow.OnEvent(abort, At(6)).deliver);
    EXPECT_THAT(*flow.OnAttemptDone(absl::OkStatus(), At(7)),
                StatusIs(absl::StatusCode::kUnavailable,
                         HasSubstr("the worker ended the stream early")));
  }
}

TEST(RequestFlowTest, ARequestWithAFinishedSampleIsNotSentToAnotherWorker) {
  RequestFlow flow = NewFlow(2);
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnEvent(Finish(0), At(2)).deliver);
  EXPECT_THAT(*flow.OnAttemptDone(Full(), At(3)),
              StatusIs(absl::StatusCode::kResourceExhausted, "full"));
}

TEST(RequestFlowTest, AWorkerThatExceedsMaxTokensBreaksTheProtocol) {
  RequestFlow flow = NewFlow(2);
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 8, 9}, 0), At(2)).deliver);
  EXPECT_TRUE(flow.OnEvent(Tokens({7, 8}, 1), At(2)).deliver);
  const auto over = flow.OnEvent(Tokens({1, 2}, 1), At(3));
  EXPECT_FALSE(over.deliver);
  EXPECT_TRUE(over.reset_attempt);
  EXPECT_FALSE(flow.OnEvent(Finish(0), At(4)).deliver);
  const auto end = flow.OnAttemptDone(absl::CancelledError("reset"), At(5));
  ASSERT_TRUE(end.has_value());
  EXPECT_THAT(*end, StatusIs(absl::StatusCode::kInternal,
                             "the worker sent 4 tokens of sample 1, but "
                             "max_tokens is 3"));
  EXPECT_EQ(flow.Record(*end, At(5)).finish_reason, "error");
  EXPECT_EQ(flow.Record(*end, At(5)).output_tokens, 5u);
}

TEST(RequestFlowTest, AnEventOfAnUnknownKindIsIgnored) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnEvent(GenerateEvent(), At(2)).deliver);
  EXPECT_FALSE(flow.OnEvent(Tokens({}), At(2)).deliver);
  EXPECT_TRUE(flow.OnEvent(Tokens({7}), At(3)).time_to_first_token.has_value());
}

TEST(RequestFlowTest, AShutdownEndsARequestAsRefusedAndNotAsCancelled) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  flow.Cancel(CancelReason::kShutdown, At(2));
  const auto end = flow.OnAttemptDone(absl::CancelledError("reset"), At(2));
  ASSERT_TRUE(end.has_value());
  EXPECT_THAT(*end, StatusIs(absl::StatusCode::kUnavailable,
                             HasSubstr("shutting down")));
  ASSERT_TRUE(proto::RefusalOf(*end).has_value());
  EXPECT_EQ(proto::RefusalOf(*end)->reason(), kvasir::v1::Refusal::DRAINING);
}

TEST(RequestFlowTest, ACancelledRequestGetsNeitherTokensNorAnotherWorker) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.Cancel(CancelReason::kClient, At(2)));
  EXPECT_FALSE(flow.Cancel(CancelReason::kSlowReader, At(2)));
  EXPECT_FALSE(flow.OnEvent(Tokens({7}), At(2)).deliver);
  const auto end = flow.OnAttemptDone(absl::UnavailableError("gone"), At(3));
  EXPECT_THAT(*end, StatusIs(absl::StatusCode::kCancelled, ::testing::_));
  EXPECT_EQ(flow.Record(*end, At(3)).finish_reason, "cancelled");
}

TEST(RequestFlowTest, TheLogNamesTheReasonOfEachCancelledRequest) {
  const std::pair<CancelReason, const char*> cases[] = {
      {CancelReason::kClient, "cancelled"},
      {CancelReason::kStopString, "stop"},
      {CancelReason::kSlowReader, "slow_reader"},
      {CancelReason::kShutdown, "shutdown"}};
  for (const auto& [reason, name] : cases) {
    RequestFlow flow = NewFlow();
    flow.Cancel(reason, At(2));
    EXPECT_EQ(flow.Record(flow.CancelledStatus(), At(1)).finish_reason, name);
  }
}

TEST(RequestFlowTest, EventsOfASampleThatWasNotRequestedAreDropped) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnEvent(Tokens({7}, 4000000000u), At(2)).deliver);
  EXPECT_FALSE(flow.OnEvent(Finish(1), At(2)).deliver);
}

TEST(RequestFlowTest, EventsOfASampleThatHasFinishedAreDropped) {
  RequestFlow flow = NewFlow();
  flow.OnAttempt("a", At(1));
  EXPECT_TRUE(flow.OnEvent(Finish(), At(2)).deliver);
  EXPECT_FALSE(flow.OnEvent(Finish(), At(3)).deliver);
  EXPECT_FALSE(flow.OnEvent(Tokens({7}), At(3)).deliver);
}

TEST(RequestFlowTest, IfNoOtherReplicaIsLeftTheLastErrorIsReported) {
  RequestFlow flow = NewFlow();
  const absl::Status none = absl::UnavailableError("none is ready");
  EXPECT_EQ(flow.NoReplica(none), none);
  flow.OnAttempt("a", At(1));
  EXPECT_FALSE(flow.OnAttemptDone(Full(), At(2)).has_value());
  EXPECT_EQ(flow.NoReplica(none), Full());
}

}  // namespace
}  // namespace kvasir::router
