// Tests of Generate without gRPC: the test sends a message and the engine's
// events, and checks the responses.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/vllm_engine/answer.h"
#include "router/facades/vllm_engine/prepare.h"
#include "router/facades/vllm_engine/request.h"
#include "router/testing/call_testing.h"
#include "router/testing/callers_testing.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using vllm::grpc::engine::GenerateRequest;
using vllm::grpc::engine::GenerateResponse;

class VllmEngineCallTest : public SingleCallTest<VllmEngineAnswer> {
 protected:
  void Send(const GenerateRequest& message) {
    Begin(message, ParseVllmEngineRequest, PrepareVllmEngineCall);
  }

  static GenerateRequest Message(bool stream, const std::string& text = "hi") {
    GenerateRequest message;
    message.set_request_id("r1");
    message.set_stream(stream);
    for (const int32_t id : ByteCodec::Ids(text)) {
      message.mutable_tokenized()->add_input_ids(static_cast<uint32_t>(id));
    }
    return message;
  }
  // Returns the tokens in the chunks of one sample, in order, as text.
  std::string Streamed(uint32_t index = 0) const {
    std::string text;
    for (const GenerateResponse& response : writer_.writes) {
      if (!response.has_chunk() || response.chunk().index() != index) continue;
      for (const uint32_t id : response.chunk().token_ids()) {
        text.push_back(static_cast<char>(id));
      }
    }
    return text;
  }
  std::vector<vllm::grpc::engine::GenerateComplete> Completes() const {
    std::vector<vllm::grpc::engine::GenerateComplete> completes;
    for (const GenerateResponse& response : writer_.writes) {
      if (response.has_complete()) completes.push_back(response.complete());
    }
    return completes;
  }
};

TEST_F(VllmEngineCallTest,
       StreamsEveryTokenAndThenACompleteMessageWithoutTokens) {
  Send(Message(true));
  Engine().Emit("ab");
  RunWrites();
  Engine().Complete("c");
  RunWrites();
  EXPECT_EQ(Streamed(), "abc");
  const auto& first = writer_.writes[0].chunk();
  EXPECT_EQ(first.prompt_tokens(), 2);
  EXPECT_EQ(first.completion_tokens(), 2) << "of this chunk only";
  ASSERT_EQ(Completes().size(), 1);
  EXPECT_EQ(Completes()[0].finish_reason(), "length");
  EXPECT_EQ(Completes()[0].completion_tokens(), 3) << "of the whole sample";
  EXPECT_THAT(Completes()[0].output_ids(), IsEmpty());
  EXPECT_TRUE(writer_.writes.back().has_complete());
  KVASIR_EXPECT_OK(*writer_.end);
}

TEST_F(VllmEngineCallTest, ASampleWithoutTokensStillGetsItsCompleteMessage) {
  Send(Message(true));
  Engine().Finish(kvasir::v1::FINISH_STOP);
  Engine().Done();
  RunWrites();
  ASSERT_EQ(writer_.writes.size(), 1);
  EXPECT_EQ(Completes()[0].finish_reason(), "stop");
}

TEST_F(VllmEngineCallTest,
       WithoutStreamingEachSampleGetsOneCompleteMessageWhenAllHaveEnded) {
  GenerateRequest message = Message(false);
  message.mutable_sampling_params()->set_n(2);
  message.mutable_sampling_params()->set_logprobs(0);
  Send(message);
  Engine().Emit("ab", 0);
  Engine().Finish(kvasir::v1::FINISH_STOP, 0);
  RunWrites();
  EXPECT_THAT(writer_.writes, IsEmpty()) << "it can still fail as a whole";
  Engine().Emit("c", 1);
  Engine().Finish(kvasir::v1::FINISH_LENGTH, 1);
  Engine().Done();
  RunWrites();
  std::map<uint32_t, vllm::grpc::engine::GenerateComplete> by_index;
  for (const auto& complete : Completes()) {
    by_index[complete.index()] = complete;
  }
  ASSERT_EQ(by_index.size(), 2);
  ASSERT_EQ(writer_.writes.size(), 2);
  EXPECT_THAT(by_index[0].output_ids(), ElementsAre('a', 'b'));
  EXPECT_EQ(by_index[0].finish_reason(), "stop");
  EXPECT_THAT(by_index[0].output_logprobs().token_logprobs(),
              ElementsAre(-0.5f, -0.5f));
  EXPECT_THAT(by_index[0].output_logprobs().token_ids(), ElementsAre('a', 'b'));
  EXPECT_THAT(by_index[1].output_ids(), ElementsAre('c'));
  EXPECT_EQ(by_index[1].finish_reason(), "length");
}

TEST_F(VllmEngineCallTest, TokensOfSeveralSamplesAreStreamedInTurn) {
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->set_n(2);
  Send(message);
  for (const uint32_t index : {0U, 1U}) {
    Engine().Emit("xy", index);
    Engine().Finish(kvasir::v1::FINISH_LENGTH, index);
  }
  Engine().Done();
  RunWrites();
  EXPECT_EQ(Streamed(0), "xy");
  EXPECT_EQ(Streamed(1), "xy");
  EXPECT_EQ(Completes().size(), 2);
}

TEST_F(VllmEngineCallTest,
       AStopStringEndsItsSampleWithTheTokenThatCompletesIt) {
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->add_stop("bc");
  Send(message);
  Engine().Emit("ab");
  Engine().Emit("cd");
  RunWrites();
  EXPECT_EQ(Streamed(), "abc");
  ASSERT_EQ(Completes().size(), 1);
  EXPECT_EQ(Completes()[0].finish_reason(), "stop");
  EXPECT_EQ(Completes()[0].matched_stop_str(), "bc");
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_EQ(Engine().reason(), CancelReason::kStopString);
  KVASIR_EXPECT_OK(*writer_.end);
}

TEST_F(VllmEngineCallTest, OnlyStopTokenIdsOfTheRequestAreReportedAsMatched) {
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->add_stop_token_ids('z');
  message.mutable_sampling_params()->set_n(2);
  VllmEngineAnswer answer(*ParseVllmEngineRequest(message),
                          proto::TokenBytes::FromIds({1}), nullptr);
  kvasir::v1::GenerateEvent::Finish finish;
  finish.set_reason(kvasir::v1::FINISH_STOP);
  finish.set_matched_token_id('z');
  finish.set_cached_tokens(1);
  answer.OnFinish(finish);
  finish.set_index(1);
  finish.set_matched_token_id(kByteEos);
  answer.OnFinish(finish);
  int matched = 0;
  while (answer.HasResponse()) {
    const auto complete = answer.Take().complete();
    EXPECT_EQ(complete.cached_tokens(), 1);
    if (complete.index() == 0) {
      EXPECT_EQ(complete.matched_token_id(), 'z');
    }
    matched += complete.matched_stop_case() !=
               vllm::grpc::engine::GenerateComplete::MATCHED_STOP_NOT_SET;
  }
  EXPECT_EQ(matched, 1);
}

TEST_F(VllmEngineCallTest, TheListsOfLogprobsInAChunkHaveOneElementPerToken) {
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->set_logprobs(1);
  message.mutable_sampling_params()->set_prompt_logprobs(0);
  VllmEngineAnswer answer(*ParseVllmEngineRequest(message),
                          proto::TokenBytes::FromIds({7, 8}), nullptr);
  kvasir::v1::GenerateEvent::Tokens tokens;
  tokens.add_prompt_logprobs()->set_logprob(-3.0f);
  tokens.add_token_ids(5);
  auto* logprob = tokens.add_logprobs();
  logprob->set_logprob(-1.0f);
  logprob->add_top()->set_token_id(6);
  logprob->mutable_top(0)->set_logprob(-0.25f);
  answer.OnTokens(tokens);
  const auto first = answer.Take().chunk();
  EXPECT_THAT(first.output_logprobs().token_logprobs(), ElementsAre(-1.0f));
  EXPECT_THAT(first.output_logprobs().token_ids(), ElementsAre(5));
  ASSERT_EQ(first.output_logprobs().top_logprobs_size(), 1);
  EXPECT_THAT(first.output_logprobs().top_logprobs(0).values(),
              ElementsAre(-0.25f));
  EXPECT_THAT(first.output_logprobs().top_logprobs(0).token_ids(),
              ElementsAre(6));
  EXPECT_THAT(first.input_logprobs().token_ids(), ElementsAre(7, 8));
  EXPECT_FALSE(first.input_logprobs().token_logprobs(0).has_value());
  EXPECT_EQ(first.input_logprobs().token_logprobs(1).value(), -3.0f);
  tokens.clear_prompt_logprobs();
  answer.OnTokens(tokens);
  const auto second = answer.Take().chunk();
  EXPECT_EQ(second.output_logprobs().token_ids_size(), 1);
  EXPECT_FALSE(second.has_input_logprobs());
}

TEST_F(VllmEngineCallTest, ATextPromptIsTokenizedByTheServer) {
  GenerateRequest message;
  message.set_text("hey");
  Send(message);
  EXPECT_THAT(Engine().request().prompt.ToIds(),
              ElementsAreArray(ByteCodec::Ids("hey")));
}

TEST_F(VllmEngineCallTest,
       AServerWithoutATokenizerRefusesTextPromptsAndStopStrings) {
  backend_->codec = nullptr;
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->add_stop("x");
  Send(message);
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kUnimplemented,
                                     HasSubstr("sampling_params.stop")));
  EXPECT_EQ(router_.refused().size(), 1);
}

TEST_F(VllmEngineCallTest, IfMaxTokensIsNotSetTheAnswerMayFillTheContext) {
  router_.SetMaxModelLen(100);
  Send(Message(true));
  EXPECT_EQ(Engine().request().sampling.max_tokens(), 98);
}

TEST_F(VllmEngineCallTest, MaxTokensIsLimitedToWhatOneResponseHolds) {
  router_.SetMaxModelLen(1000);
  backend_->limits.max_response_bytes = 14 * 20;
  GenerateRequest message = Message(false);
  message.mutable_sampling_params()->set_logprobs(0);
  Send(message);
  EXPECT_EQ(Engine().request().sampling.max_tokens(), 20);
  call_->OnCancelled();
  Run();
  for (const uint32_t wanted : {21u, 5000u}) {
    message.mutable_sampling_params()->set_max_tokens(wanted);
    writer_.end.reset();
    Send(message);
    EXPECT_THAT(*writer_.end,
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat(
                             "max_tokens: want at most 20, have ", wanted))));
  }
}

TEST_F(VllmEngineCallTest, AnAbortEndsTheCallAndCancelsTheEnginesRequest) {
  Send(Message(true));
  Engine().Emit("a");
  RunWrites();
  const auto found = backend_->running_ids->Find("", "r1");
  ASSERT_EQ(found.size(), 1);
  EXPECT_THAT(backend_->running_ids->Find("", "r"), IsEmpty())
      << "ids match exactly";
  EXPECT_THAT(backend_->running_ids->Find("other", "r1"), IsEmpty());
  found[0].first.lock()->OnStop(found[0].second);
  RunWrites();
  ASSERT_EQ(Completes().size(), 1);
  EXPECT_EQ(Completes()[0].finish_reason(), "abort");
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_EQ(Engine().reason(), CancelReason::kClient);
  KVASIR_EXPECT_OK(*writer_.end);
  EXPECT_THAT(backend_->running_ids->Find("", "r1"), IsEmpty());
}

TEST_F(VllmEngineCallTest, AResetOfTheCallCancelsTheEnginesRequest) {
  Send(Message(true));
  call_->OnCancelled();
  Run();
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kCancelled,
                                     HasSubstr("by the client")));
  EXPECT_THAT(backend_->running_ids->Find("", "r1"), IsEmpty());
}

TEST_F(VllmEngineCallTest, ARefusedRequestFailsBeforeAnyResponseIsWritten) {
  router_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  Send(Message(true));
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kResourceExhausted,
                                     HasSubstr("the queue is full")));
  EXPECT_THAT(writer_.writes, IsEmpty());
}

TEST_F(VllmEngineCallTest, TheLossOfAWorkerEndsTheCallWithTheRoutersStatus) {
  Send(Message(true));
  Engine().Emit("a");
  Engine().Done(absl::UnavailableError("its worker was lost"));
  RunWrites();
  EXPECT_THAT(*writer_.end,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("was lost")));
  EXPECT_THAT(Completes(), IsEmpty());
}

TEST_F(VllmEngineCallTest,
       IfTheTokenizersQueueIsFullTheCallEndsWithResourceExhausted) {
  tokenizer_->max_queued = 0;
  Send(Message(true));
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kResourceExhausted,
                                     HasSubstr("tokenizer's queue")));
  EXPECT_EQ(router_.refused().size(), 1);
}

TEST_F(VllmEngineCallTest, ARequestTakesItsBytesFromTheSharedBudget) {
  backend_->budget = std::make_shared<ByteBudget>(3000);
  const GenerateRequest message = Message(true, std::string(400, 'x'));
  const size_t taken = 2 * message.ByteSizeLong() + 4 * 400;
  Send(message);
  EXPECT_EQ(backend_->budget->used_bytes(), taken);
  // Output that waits for the client counts as used bytes.
  Engine().Emit("xyz");
  Run();
  Engine().Emit("xyz");
  Run();
  EXPECT_GT(backend_->budget->used_bytes(), taken);
  RunWrites();
  EXPECT_EQ(backend_->budget->used_bytes(), taken);
}

TEST_F(VllmEngineCallTest,
       AMessageLargerThanTheBudgetOfBytesIsRefusedBeforeItIsParsed) {
  backend_->budget = std::make_shared<ByteBudget>(300);
  GenerateRequest message = Message(true, std::string(400, 'x'));
  message.mutable_sampling_params()->set_n(1 << 30);
  // The parser would refuse this field with another error.
  message.mutable_sampling_params()->add_stop("");
  Send(message);
  RunWrites();
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("at most 300 together")));
  EXPECT_EQ(router_.num_requests(), 0u);
  EXPECT_EQ(backend_->budget->used_bytes(), 0u);
}

TEST_F(VllmEngineCallTest, TheCallOfASlowReaderIsReset) {
  backend_->limits.max_waiting_bytes_per_stream = 20;
  Send(Message(true));
  Engine().Emit("a");
  Run();
  ASSERT_TRUE(writer_.writing);
  Engine().Emit("0123456789");
  Run();
  EXPECT_TRUE(writer_.was_reset);
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_EQ(Engine().reason(), CancelReason::kSlowReader);
}

TEST_F(VllmEngineCallTest, EachTenantHasItsOwnPrefixCache) {
  identity_.tenant = "acme";
  Send(Message(true));
  EXPECT_EQ(Engine().request().tenant, "acme");
  EXPECT_EQ(Engine().request().cache_salt, "tenant/acme");
  EXPECT_EQ(Engine().request().facade, "vllm");
  EXPECT_EQ(Engine().request().client_request_id, "r1");
  call_->OnCancelled();
  Run();
  writer_.end.reset();
  identity_.tenant = "a b";
  Send(Message(true));
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kInvalidArgument,
                                     HasSubstr("x-tenant-id")));
}

// Test fixture: callers belong to a tenant whose quota is one
// concurrent request.
class VllmEngineQuotaTest : public VllmEngineCallTest {
 protected:
  VllmEngineQuotaTest() {
    backend_->callers =
        CallersOf(TenantEntry("red", R"("quota": {"concurrent_requests": 1})"));
    identity_.credentials = TokenOf("red");
  }
  uint32_t Running() const { return RunningOf(*backend_->callers, "red"); }
  // Ends the current call and begins another one.
  void SendAgain(const GenerateRequest& message) {
    writer_.end.reset();
    Send(message);
  }
};

TEST_F(VllmEngineQuotaTest,
       ARequestNoLongerCountsInTheQuotaWhenItsLastResponseIsSent) {
  Send(Message(true));
  EXPECT_EQ(Running(), 1);
  EXPECT_EQ(Engine().request().tenant, "red");
  EXPECT_EQ(Engine().request().caller, "t");
  EXPECT_EQ(Engine().request().cache_salt, "tenant/red");
  Engine().Emit("a");
  RunWrites();
  EXPECT_EQ(Running(), 1);
  Engine().Finish();
  Run();
  ASSERT_TRUE(writer_.writing);
  EXPECT_EQ(Running(), 0) << "a client that asks at once is not refused";
  Engine().Done();
  RunWrites();
  EXPECT_EQ(Running(), 0);
  KVASIR_EXPECT_OK(*writer_.end);
}

TEST_F(VllmEngineCallTest, ATextThatCannotFitTheModelIsRefused) {
  GenerateRequest message = Message(true);
  message.set_text(std::string(5000, 'x'));
  Send(message);
  EXPECT_THAT(*writer_.end,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the prompt has more than 1023 tokens")));
}

TEST_F(VllmEngineQuotaTest, EachSampleOfARequestCountsInTheQuota) {
  backend_->callers =
      CallersOf(TenantEntry("red", R"("quota": {"concurrent_requests": 3})"));
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->set_n(4);
  Send(message);
  EXPECT_THAT(*writer_.end,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("n is 4, but the quota of tenant 'red'")));
  EXPECT_EQ(Running(), 0);
  message.mutable_sampling_params()->set_n(2);
  SendAgain(message);
  EXPECT_EQ(Running(), 2);
  Engine().Finish(kvasir::v1::FINISH_STOP, 0);
  RunWrites();
  EXPECT_EQ(Running(), 2);
  Engine().Finish(kvasir::v1::FINISH_STOP, 1);
  RunWrites();
  EXPECT_EQ(Running(), 0);
  Engine().Done();
}

TEST_F(VllmEngineQuotaTest,
       ARequestEndedByAStopStringNoLongerCountsInTheQuota) {
  GenerateRequest message = Message(true);
  message.mutable_sampling_params()->add_stop("b");
  Send(message);
  Engine().Emit("ab");
  RunWrites();
  EXPECT_EQ(Running(), 0);
  Engine().Done(absl::CancelledError("cancelled"));
}

TEST_F(VllmEngineQuotaTest,
       ARequestWhoseClientLeavesCountsInTheQuotaUntilTheEngineEndsIt) {
  Send(Message(true));
  call_->OnCancelled();
  RunWrites();
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_EQ(Running(), 1) << "the engine still works on it";
  Engine().Done(absl::CancelledError("cancelled"));
  EXPECT_EQ(Running(), 0);
}

TEST_F(VllmEngineQuotaTest,
       ARequestWhoseClientLeavesBeforeItIsTokenizedCountsInTheQuota) {
  tokenizer_->paused = true;
  for (const bool stopped : {false, true}) {
    writer_.end.reset();
    Send(Message(true));
    EXPECT_EQ(Running(), 1);
    if (stopped) {
      call_->OnStop(0);
    } else {
      call_->OnCancelled();
    }
    Run();
    ASSERT_TRUE(writer_.end.has_value());
    EXPECT_EQ(Running(), 1) << "its task still waits for the tokenizer";
    tokenizer_->paused = false;
    Run();
    EXPECT_EQ(Running(), 0);
    tokenizer_->paused = true;
  }
  EXPECT_EQ(router_.num_requests(), 0);
}

TEST_F(VllmEngineQuotaTest,
       RequestsEndedByAnErrorOrADrainNoLongerCountInTheQuota) {
  Send(Message(true));
  Engine().Done(absl::UnavailableError("the router is draining"));
  EXPECT_EQ(Running(), 0);
  RunWrites();
  EXPECT_FALSE(writer_.end->ok());
}

TEST_F(VllmEngineQuotaTest,
       ASlowReadersRequestCountsInTheQuotaUntilTheEngineEndsIt) {
  backend_->limits.max_waiting_bytes_per_stream = 20;
  Send(Message(true));
  Engine().Emit("a");
  Run();
  Engine().Emit("0123456789");
  Run();
  EXPECT_EQ(Engine().reason(), CancelReason::kSlowReader);
  Engine().Done(absl::CancelledError("slow"));
  EXPECT_EQ(Running(), 0);
}

TEST_F(VllmEngineQuotaTest,
       ARequestRefusedForAnyReasonNoLongerCountsInTheQuota) {
  GenerateRequest bad = Message(true);
  bad.mutable_sampling_params()->set_json_schema("{}");
  Send(bad);
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_EQ(Running(), 0) << "not read";
  GenerateRequest unfit = Message(true);
  unfit.mutable_sampling_params()->set_n(1000);
  SendAgain(unfit);
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_EQ(Running(), 0) << "not prepared";
  tokenizer_->max_queued = 0;
  SendAgain(Message(true));
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_EQ(Running(), 0) << "not tokenized";
  tokenizer_->max_queued = 1000;
  router_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  SendAgain(Message(true));
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_EQ(Running(), 0) << "not submitted";
}

TEST_F(VllmEngineQuotaTest,
       ARequestOverTheQuotaIsRefusedBeforeItsMessageIsRead) {
  Send(Message(true));
  const auto first = std::exchange(call_, nullptr);
  FakeWriter<GenerateResponse> second;
  bool looked = false;
  const auto call = std::make_shared<Call>(Call::Parts{.backend = backend_,
                                                       .identity = identity_,
                                                       .strand = strand_,
                                                       .writer = &second});
  call->Begin([&looked] {
    looked = true;
    return Call::Asked{.prepare = absl::UnknownError("looked at")};
  });
  Run();
  EXPECT_FALSE(looked);
  EXPECT_THAT(*second.end, StatusIs(absl::StatusCode::kResourceExhausted,
                                    HasSubstr("concurrent_requests is 1")));
  ASSERT_EQ(router_.refused().size(), 1);
  EXPECT_EQ(router_.refused()[0].first.tenant, "red");
  EXPECT_EQ(router_.refused()[0].first.facade, "vllm");
  EXPECT_EQ(Running(), 1);
  call_ = first;
}

TEST_F(VllmEngineQuotaTest, AnUnknownCallerIsRefusedAndLoggedWithoutATenant) {
  identity_.credentials = TokenOf("blue");
  identity_.tenant = "red";
  Send(Message(true));
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kUnauthenticated,
                                     HasSubstr("metadata 'authorization'")));
  ASSERT_EQ(router_.refused().size(), 1);
  EXPECT_EQ(router_.refused()[0].first.tenant, "");
  EXPECT_EQ(router_.num_requests(), 0);
}

}  // namespace
}  // namespace kvasir::router
