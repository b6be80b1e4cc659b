#include "router/facades/kserve/stream.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/call_testing.h"
#include "router/testing/callers_testing.h"
#include "router/testing/fake_router.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class FakeSink final
    : public FakeWriter<inference::ModelStreamInferResponse, KserveStreamSink> {
 public:
  void Read() override { ++reads; }

  int reads = 0;
};

// Test fixture for one call, without other threads. The test decides when
// posted tasks run and when writes finish.
class KserveStreamTest : public ::testing::Test {
 protected:
  void Start(KserveCall call = {}) {
    backend_->router = &router_;
    backend_->facade = "kserve";
    backend_->codec = std::make_shared<ByteCodec>();
    backend_->tokenizer = tokenizer_;
    stream_ = std::make_shared<KserveStream>(backend_, std::move(call), strand_,
                                             &sink_);
  }
  // Ends requests that still run. Otherwise the fake router would keep their
  // sinks and calls alive.
  void TearDown() override {
    if (stream_ == nullptr) return;
    stream_->OnCancelled();
    Run();
    if (sink_.writing) {
      sink_.writing = false;
      stream_->OnWritten(false);
      Run();
    }
    EXPECT_TRUE(sink_.end.has_value());
  }
  // Runs tasks until none is left. Writes do not finish meanwhile.
  void Run() {
    while (strand_->RunOne() || tokenizer_->RunOne()) {
    }
  }
  // Runs tasks and finishes writes until none is left.
  void RunWrites() {
    Run();
    while (sink_.writing) {
      sink_.writing = false;
      stream_->OnWritten(true);
      Run();
    }
  }
  void Send(const InferRequestBuilder& builder) {
    stream_->OnRead(
        std::make_shared<inference::ModelInferRequest>(builder.Build()));
    Run();
  }
  static InferRequestBuilder Vllm(const std::string& id,
                                  const std::string& text = "hi") {
    InferRequestBuilder builder("tiny", id);
    builder.Text("text_input", text).Bool("stream", true);
    return builder;
  }
  static InferRequestBuilder StopRequest(const std::string& id) {
    InferRequestBuilder builder("tiny", id);
    builder.Bool("stop", true);
    return builder;
  }
  std::shared_ptr<FakeRouter::Request> Engine(size_t index) {
    EXPECT_GT(router_.num_requests(), index);
    return router_.WaitFor(index);
  }
  // Returns "id:text" for every response that was written. "!" marks an error
  // and "$" the last response of a request.
  std::vector<std::string> Written() const {
    std::vector<std::string> lines;
    for (const auto& response : sink_.writes) {
      const auto& answer = response.infer_response();
      std::string line = answer.id() + ":";
      if (!response.error_message().empty()) line += "!";
      for (const std::string& text : StringOutput(answer, "text_output")) {
        line += text;
      }
      if (FinalFlag(answer) == true) line += "$";
      lines.push_back(line);
    }
    return lines;
  }
  std::string LastError() const { return sink_.writes.back().error_message(); }

  FakeRouter router_;
  std::shared_ptr<ManualRunner> strand_ = std::make_shared<ManualRunner>();
  std::shared_ptr<ManualRunner> tokenizer_ = std::make_shared<ManualRunner>();
  std::shared_ptr<KserveBackend> backend_ = std::make_shared<KserveBackend>();
  FakeSink sink_;
  std::shared_ptr<KserveStream> stream_;
};

TEST_F(KserveStreamTest, ARequestReachesTheRouterAndItsTokensReachTheClient) {
  KserveCall call;
  call.peer = "ipv4:1.2.3.4:5";
  call.traceparent = "00-abc";
  call.deadline = absl::FromUnixSeconds(5);
  Start(call);
  Send(Vllm("a").Text("sampling_parameters",
                      R"({"max_tokens": 4, "eviction_budget": 256})"));
  EXPECT_EQ(sink_.reads, 1);
  const CanonicalRequest& request = Engine(0)->request();
  EXPECT_EQ(request.model, "tiny");
  EXPECT_EQ(request.client_request_id, "a");
  EXPECT_EQ(request.facade, "kserve");
  EXPECT_EQ(request.peer, "ipv4:1.2.3.4:5");
  EXPECT_EQ(request.traceparent, "00-abc");
  EXPECT_EQ(request.deadline, absl::FromUnixSeconds(5));
  EXPECT_EQ(request.sampling.max_tokens(), 4u);
  EXPECT_EQ(request.eviction_budget, proto::EvictionBudget{.tokens = 256});
  EXPECT_THAT(request.prompt.ToIds(), ElementsAre('h', 'i'));
  Engine(0)->Emit("x");
  RunWrites();
  Engine(0)->Complete("y");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("a:x", "a:y$"));
  EXPECT_FALSE(Engine(0)->cancelled());
  EXPECT_FALSE(sink_.end.has_value());
}

TEST_F(KserveStreamTest,
       AHugeNumberOfSamplesIsRefusedBeforeMemoryForThemIsAllocated) {
  Start();
  Send(Vllm("a").Text("sampling_parameters", R"({"n": 2000000000})"));
  RunWrites();
  EXPECT_EQ(LastError(),
            "INVALID_ARGUMENT: n (the number of samples) is 2000000000, want 1 "
            "to 128");
  EXPECT_EQ(router_.num_requests(), 0u);
  router_.SetMaxN(16);
  Send(Vllm("c").Text("sampling_parameters", R"({"n": 17})"));
  RunWrites();
  EXPECT_EQ(LastError(),
            "INVALID_ARGUMENT: n (the number of samples) is 17, want 1 to 16");
  router_.SetMaxN(0);
  Send(Vllm("b").Text("sampling_parameters", R"({"n": 128})"));
  EXPECT_EQ(router_.num_requests(), 1u);
}

TEST_F(KserveStreamTest, TheLogprobSizeCheckDoesNotOverflow) {
  Start();
  // The response would take 1677721600 tokens * 128 samples * 80 bytes * 2^31
  // candidates. This is a multiple of 2^64, so in 64 bits it would overflow
  // to 0.
  Send(InferRequestBuilder("tiny", "a")
           .Text("text_input", "hi")
           .Bool("return_logprobs", true)
           .Text("sampling_parameters", R"({"n": 128, "logprobs": 2147483647,
                 "max_tokens": 1677721600})"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("bytes of one response"));
  EXPECT_EQ(router_.num_requests(), 0u);
}

// Regression test: six hundred concurrent prompts of a megabyte each once used
// a gigabyte of memory.
TEST_F(KserveStreamTest, AllRequestsTakeTheirBytesFromOneBudget) {
  backend_->budget = std::make_shared<ByteBudget>(3000);
  Start();
  const InferRequestBuilder large = Vllm("a", std::string(1000, 'x'));
  const size_t bytes = 2 * large.Build().ByteSizeLong();
  stream_->OnRead(
      std::make_shared<inference::ModelInferRequest>(large.Build()));
  // The message is counted before it is read.
  EXPECT_EQ(backend_->budget->used_bytes(), bytes);
  Run();
  // Each byte of the prompt is a token, and each token takes 4 bytes.
  EXPECT_EQ(backend_->budget->used_bytes(), bytes + 4 * 1000);
  Send(Vllm("b"));
  RunWrites();
  EXPECT_EQ(router_.num_requests(), 1u);
  EXPECT_THAT(LastError(), AllOf(HasSubstr("RESOURCE_EXHAUSTED"),
                                 HasSubstr("of at most 3000 bytes")));
  // Output that waits for the client counts as used bytes.
  Engine(0)->Emit("xyz");
  Run();
  Engine(0)->Emit("xyz");
  Run();
  EXPECT_GT(backend_->budget->used_bytes(), bytes + 4 * 1000);
  RunWrites();
  EXPECT_EQ(backend_->budget->used_bytes(), bytes + 4 * 1000);
}

TEST_F(KserveStreamTest, ADrainEndsAStreamAsSoonAsItHasNoRequests) {
  Start();
  Send(Vllm("a"));
  stream_->OnDrain();
  RunWrites();
  EXPECT_FALSE(sink_.end.has_value());
  Send(Vllm("b"));
  RunWrites();
  EXPECT_EQ(router_.num_requests(), 1u);
  EXPECT_THAT(LastError(), HasSubstr("UNAVAILABLE: the server is draining"));
  Engine(0)->Complete("x");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("b:!$", "a:x$"));
  ASSERT_TRUE(sink_.end.has_value());
  EXPECT_TRUE(absl::IsUnavailable(*sink_.end));
  EXPECT_THAT(sink_.end->message(), HasSubstr("draining"));
}

TEST_F(KserveStreamTest,
       ATenantNameThatIsTooLongOrHasForbiddenCharactersIsRefused) {
  KserveCall call;
  call.tenant = "a,b";
  Start(call);
  Send(Vllm("a"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("INVALID_ARGUMENT: metadata "
                                      "'x-tenant-id'"));
  call.tenant = std::string(129, 'x');
  stream_->OnCancelled();
  Run();
  sink_ = FakeSink();
  Start(call);
  Send(Vllm("b"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("at most 128 bytes, have 129"));
  EXPECT_EQ(router_.num_requests(), 0u);
}

TEST_F(KserveStreamTest,
       AfterAHalfCloseRunningRequestsAreAnsweredAndTheCallEndsOk) {
  Start();
  Send(Vllm("a"));
  stream_->OnHalfClose();
  RunWrites();
  EXPECT_FALSE(sink_.end.has_value());
  EXPECT_FALSE(Engine(0)->cancelled());
  Engine(0)->Complete("xyz");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("a:xyz$"));
  EXPECT_EQ(sink_.end, absl::OkStatus());
}

TEST_F(KserveStreamTest, AHalfCloseWithoutRequestsEndsAtOnce) {
  Start();
  stream_->OnHalfClose();
  Run();
  EXPECT_EQ(sink_.end, absl::OkStatus());
}

TEST_F(KserveStreamTest, TheResponsesOfAStreamsRequestsTakeTurns) {
  Start();
  Send(Vllm("a"));
  Send(Vllm("b"));
  Engine(0)->Emit("1");
  Run();  // the write of the first response has started and not finished
  Engine(0)->Emit("2");
  Engine(0)->Emit("3");
  Engine(1)->Emit("4");
  RunWrites();
  // The two tokens of request `a` that came during the write are in
  // one response.
  EXPECT_THAT(Written(), ElementsAre("a:1", "b:4", "a:23"));
}

TEST_F(KserveStreamTest, AResetOfTheStreamCancelsAllItsRequests) {
  Start();
  Send(Vllm("a"));
  Send(Vllm("b"));
  Engine(0)->Emit("x");
  Run();
  ASSERT_TRUE(sink_.writing);
  stream_->OnCancelled();
  Run();
  EXPECT_FALSE(sink_.end.has_value());  // the write has not finished yet
  EXPECT_TRUE(Engine(0)->cancelled());
  EXPECT_TRUE(Engine(1)->cancelled());
  EXPECT_EQ(Engine(1)->reason(), CancelReason::kClient);
  sink_.writing = false;
  stream_->OnWritten(false);
  Run();
  EXPECT_EQ(sink_.end->code(), absl::StatusCode::kCancelled);
  // Events that come after the end have no effect.
  Engine(0)->Emit("y");
  Engine(0)->Done(absl::CancelledError(""));
  Run();
}

TEST_F(KserveStreamTest, AnErrorOfOneRequestDoesNotEndTheStream) {
  Start();
  Send(InferRequestBuilder("tiny", "bad"));
  Send(InferRequestBuilder("other", "who").Text("text_input", "x"));
  Send(Vllm("a"));
  Engine(0)->Complete("x");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("bad:!$", "who:!$", "a:x$"));
  EXPECT_THAT(sink_.writes[0].error_message(),
              StartsWith("INVALID_ARGUMENT: the request has neither"));
  EXPECT_THAT(sink_.writes[1].error_message(),
              HasSubstr("NOT_FOUND: model 'other' is unknown"));
  EXPECT_EQ(sink_.reads, 3);
}

TEST_F(KserveStreamTest, AnErrorOfOneRequestEndsTheCallIfTheClientAskedForIt) {
  KserveCall call;
  call.errors_end_call = true;
  Start(call);
  Send(Vllm("a"));
  Send(InferRequestBuilder("tiny", "bad"));
  EXPECT_EQ(sink_.end->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Engine(0)->cancelled());
}

TEST_F(KserveStreamTest, RefusalsOfRouterAndEngineReachTheClient) {
  Start();
  router_.Refuse(absl::ResourceExhaustedError("queue full (4)"));
  Send(Vllm("a"));
  RunWrites();
  EXPECT_EQ(LastError(), "RESOURCE_EXHAUSTED: queue full (4)");
  router_.Refuse(absl::OkStatus());
  Send(Vllm("b"));
  Engine(0)->Done(absl::UnavailableError("draining"));
  RunWrites();
  EXPECT_EQ(LastError(), "UNAVAILABLE: draining");
  // The id may be used again.
  Send(Vllm("b"));
  EXPECT_EQ(router_.num_requests(), 2u);
}

TEST_F(KserveStreamTest,
       RunningRequestsMustHaveDifferentIdsUnlessTheIdIsEmpty) {
  Start();
  Send(Vllm("a"));
  Send(Vllm("a"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("ALREADY_EXISTS: "));
  Send(Vllm(""));
  Send(Vllm(""));
  EXPECT_EQ(router_.num_requests(), 3u);
}

TEST_F(KserveStreamTest, AStoppedRequestStillSendsItsLastOutput) {
  Start();
  Send(Vllm("a"));
  Send(Vllm("b"));
  Engine(0)->Emit("x");
  Run();
  Engine(0)->Emit("yz");
  Send(StopRequest("a"));
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("a:x", "a:yz$", "a:$"));
  EXPECT_EQ(sink_.writes.back().infer_response().outputs_size(), 0);
  EXPECT_TRUE(Engine(0)->cancelled());
  EXPECT_FALSE(Engine(1)->cancelled());
}

TEST_F(KserveStreamTest, AStopRequestForAnIdThatIsNotRunningIsAnswered) {
  Start();
  Send(StopRequest("gone"));
  Send(StopRequest(""));
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("gone:$", ":$"));
}

TEST_F(KserveStreamTest,
       ARequestThatIsStoppedDuringTokenizationNeverReachesTheEngine) {
  Start();
  stream_->OnRead(
      std::make_shared<inference::ModelInferRequest>(Vllm("a").Build()));
  while (strand_->RunOne()) {
  }
  stream_->OnRead(
      std::make_shared<inference::ModelInferRequest>(StopRequest("a").Build()));
  while (strand_->RunOne()) {
  }
  RunWrites();
  EXPECT_EQ(router_.num_requests(), 0u);
  EXPECT_THAT(Written(), ElementsAre("a:$", "a:$"));
}

// A client's next call may come from another port, because the server closes
// old connections.
TEST_F(KserveStreamTest,
       AStopRequestEndsARequestOfAnotherCallFromTheSameClientAddress) {
  KserveCall call;
  call.peer = "ipv4:1.2.3.4:5";
  call.unary = true;
  Start(call);
  Send(Vllm("a"));
  Engine(0)->Emit("x");
  FakeSink other_sink;
  call.peer = "ipv4:1.2.3.4:6";
  auto other =
      std::make_shared<KserveStream>(backend_, call, strand_, &other_sink);
  other->OnRead(
      std::make_shared<inference::ModelInferRequest>(StopRequest("a").Build()));
  other->OnHalfClose();
  stream_->OnHalfClose();
  RunWrites();
  EXPECT_TRUE(Engine(0)->cancelled());
  ASSERT_EQ(sink_.writes.size(), 1u);
  EXPECT_THAT(StringOutput(sink_.writes[0].infer_response(), "text_output"),
              ElementsAre("x"));
  EXPECT_EQ(sink_.end, absl::OkStatus());
  EXPECT_EQ(other_sink.writes.size(), 1u);
}

TEST_F(KserveStreamTest, AStopRequestOfAnotherTenantDoesNotEndTheRequest) {
  KserveCall call;
  call.peer = "proxy";
  call.tenant = "red";
  Start(call);
  Send(Vllm("a"));
  call.tenant = "blue";
  FakeSink other_sink;
  auto other =
      std::make_shared<KserveStream>(backend_, call, strand_, &other_sink);
  other->OnRead(
      std::make_shared<inference::ModelInferRequest>(StopRequest("a").Build()));
  other->OnHalfClose();
  Run();
  EXPECT_EQ(other_sink.writes.size(), 1u) << "the stop request is answered";
  EXPECT_FALSE(Engine(0)->cancelled());
  other_sink.writing = false;
  other->OnWritten(true);
  Run();
}

TEST_F(KserveStreamTest,
       AStopRequestFromAnotherClientAddressDoesNotEndTheRequest) {
  KserveCall call;
  call.peer = "ipv4:1.2.3.4:5";
  Start(call);
  Send(Vllm("a"));
  FakeSink other_sink;
  call.peer = "ipv4:1.2.3.5:5";
  auto other =
      std::make_shared<KserveStream>(backend_, call, strand_, &other_sink);
  other->OnRead(
      std::make_shared<inference::ModelInferRequest>(StopRequest("a").Build()));
  Run();
  EXPECT_FALSE(Engine(0)->cancelled());
}

TEST_F(KserveStreamTest, AStopStringCancelsTheEnginesRequest) {
  Start();
  Send(Vllm("a").Text("sampling_parameters", R"({"stop": ["END"]})"));
  Engine(0)->Emit("xEND and more");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("a:x$"));
  EXPECT_TRUE(Engine(0)->cancelled());
  EXPECT_EQ(Engine(0)->reason(), CancelReason::kStopString);
  Engine(0)->Done(absl::CancelledError("stop string"));
  RunWrites();
  EXPECT_EQ(sink_.writes.size(), 1u);
}

TEST_F(KserveStreamTest, TheCallOfASlowReaderIsResetAtTheLimitOfWaitingBytes) {
  backend_->limits.max_waiting_bytes_per_stream = 10;
  Start();
  Send(Vllm("a"));
  Engine(0)->Emit("x");
  Run();
  Engine(0)->Emit("1234567890");
  Run();
  EXPECT_FALSE(sink_.was_reset);
  Engine(0)->Emit("1");
  Run();
  EXPECT_TRUE(sink_.was_reset);
  EXPECT_EQ(Engine(0)->reason(), CancelReason::kSlowReader);
  sink_.writing = false;
  stream_->OnWritten(false);
  Run();
  EXPECT_EQ(sink_.end->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(sink_.end->message()), HasSubstr("11 bytes"));
}

TEST_F(KserveStreamTest,
       AnswersThatAreNotStreamedDoNotCountInTheLimitOfWaitingBytes) {
  backend_->limits.max_waiting_bytes_per_stream = 10;
  Start();
  for (const char* id : {"a", "b", "c"}) {
    InferRequestBuilder builder("tiny", id);
    Send(builder.Text("text_input", "hi")
             .Bool("stream", false)
             .Bool("exclude_input_in_output", true));
  }
  for (size_t i = 0; i < 3; ++i) Engine(i)->Complete("12345678");
  Run();
  EXPECT_TRUE(sink_.writing);
  EXPECT_FALSE(sink_.was_reset);
  RunWrites();
  EXPECT_THAT(Written(),
              ElementsAre("a:12345678$", "b:12345678$", "c:12345678$"));
}

TEST_F(KserveStreamTest,
       ACallIsResetIfWaitingOutputNoLongerFitsIntoOneResponse) {
  backend_->limits.max_response_bytes = 10;
  Start();
  Send(Vllm("a"));
  Engine(0)->Emit("x");
  Run();
  Engine(0)->Emit("12345678901");
  Run();
  EXPECT_TRUE(sink_.was_reset);
}

TEST_F(KserveStreamTest,
       ResponsesThatWereSentNoLongerCountAgainstTheLimitOfWaitingBytes) {
  backend_->limits.max_waiting_bytes_per_stream = 10;
  Start();
  Send(Vllm("a"));
  for (int i = 0; i < 100; ++i) {
    Engine(0)->Emit("12345");
    RunWrites();
  }
  EXPECT_FALSE(sink_.was_reset);
  EXPECT_EQ(sink_.writes.size(), 100u);
}

TEST_F(KserveStreamTest, TheNumberOfRunningRequestsPerStreamIsLimited) {
  backend_->limits.max_requests_per_stream = 1;
  Start();
  Send(Vllm("a"));
  Send(Vllm("b"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("the limit is 1"));
  Engine(0)->Complete("x");
  RunWrites();
  Send(Vllm("c"));
  EXPECT_EQ(router_.num_requests(), 2u);
}

TEST_F(KserveStreamTest, ARequestIsRefusedIfTheTokenizersQueueIsFull) {
  tokenizer_->max_queued = 0;
  Start();
  Send(Vllm("a"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("RESOURCE_EXHAUSTED: the tokenizer"));
}

TEST_F(KserveStreamTest, PromptsThatCannotBeTokenizedAreRefused) {
  Start();
  Send(Vllm("a", "bad\x01"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("INVALID_ARGUMENT: text has a byte 1"));
  Send(Vllm("a", ""));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("no tokens"));
}

TEST_F(KserveStreamTest, OnlyBadWordsOfASingleTokenAreAccepted) {
  Start();
  InferRequestBuilder builder("tiny", "a");
  builder.Text("text_input", "hi").Int("max_tokens", 3);
  Send(builder.Strings("bad_words", {"z", ""}, {2}));
  EXPECT_EQ(Engine(0)->request().sampling.logit_bias().at('z'),
            kBannedTokenBias);
  InferRequestBuilder longer("tiny", "b");
  longer.Text("text_input", "hi").Int("max_tokens", 3);
  Send(longer.Text("bad_words", "zz"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("UNIMPLEMENTED: bad_words"));
}

TEST_F(KserveStreamTest, AStopWordThatIsASpecialTokenStopsByItsId) {
  Start();
  InferRequestBuilder builder("tiny", "a");
  builder.Text("text_input", "hi").Int("max_tokens", 3);
  Send(builder.Text("stop_words", "</s>"));
  EXPECT_THAT(Engine(0)->request().sampling.stop_token_ids(),
              ElementsAre(kByteEos));
}

TEST_F(KserveStreamTest, ARequestForAnotherModelVersionIsNotFound) {
  Start();
  inference::ModelInferRequest request = Vllm("a").Build();
  request.set_model_version("2");
  stream_->OnRead(std::make_shared<inference::ModelInferRequest>(request));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("NOT_FOUND: "));
}

TEST_F(KserveStreamTest, LogprobsThatDoNotFitIntoOneResponseAreRefused) {
  Start();
  InferRequestBuilder builder("tiny", "a");
  Send(builder.Text("text_input", "hi")
           .Bool("return_logprobs", true)
           .Text("sampling_parameters",
                 R"({"logprobs": 20, "n": 100, "max_tokens": 1000})"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("100 samples of 1000 tokens"));
}

TEST_F(KserveStreamTest, TheCheckOfTheSizeOfLogprobsUsesTheDefaultOfMaxTokens) {
  router_.SetMaxModelLen(1 << 20);
  backend_->limits.default_max_tokens = 1000;
  Start();
  const auto with = [](const std::string& id, const std::string& sampling) {
    InferRequestBuilder builder("tiny", id);
    return builder.Text("text_input", "hi")
        .Bool("return_logprobs", true)
        .Text("sampling_parameters", sampling);
  };
  Send(with("a", R"({"logprobs": 1})"));
  EXPECT_EQ(router_.num_requests(), 1u);
  Send(with("b", R"({"logprobs": 20, "n": 100})"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("100 samples of 1000 tokens"));
  // The request asks for a million tokens, but is accepted because few fit
  // after the prompt.
  router_.SetMaxModelLen(1024);
  Send(with("c", R"({"logprobs": 1, "max_tokens": 1000000})"));
  EXPECT_EQ(router_.num_requests(), 2u);
}

TEST_F(KserveStreamTest, EveryRefusalOfTheFacadeIsLoggedAndCountedOnce) {
  KserveCall call;
  call.tenant = "red";
  call.peer = "p";
  call.traceparent = "00-abc";
  Start(call);
  tokenizer_->max_queued = 1;
  Send(InferRequestBuilder("tiny", "bad-tensors"));
  Send(InferRequestBuilder("other", "unknown").Text("text_input", "x"));
  Send(Vllm("twice"));
  Send(Vllm("twice"));
  Send(Vllm("bad-text", "\x01"));
  tokenizer_->max_queued = 0;
  Send(Vllm("full"));
  tokenizer_->max_queued = 1;
  backend_->codec = nullptr;
  Send(Vllm("no-tokenizer"));
  RunWrites();
  std::vector<std::string> ids;
  for (const auto& [request, why] : router_.refused()) {
    ids.push_back(request.client_request_id);
    EXPECT_FALSE(why.ok());
    EXPECT_EQ(request.tenant, "red");
    EXPECT_EQ(request.facade, "kserve");
    EXPECT_EQ(request.peer, "p");
    EXPECT_EQ(request.traceparent, "00-abc");
  }
  EXPECT_THAT(ids, ElementsAre("bad-tensors", "unknown", "twice", "bad-text",
                               "full", "no-tokenizer"));
  EXPECT_EQ(backend_->statistics.StatisticsOf("tiny")
                .inference_stats()
                .fail()
                .count(),
            5u);
  EXPECT_EQ(backend_->statistics.StatisticsOf("other")
                .inference_stats()
                .fail()
                .count(),
            0u);
}

TEST_F(KserveStreamTest, ARefusedUnaryCallIsLoggedWithoutItsBadTenant) {
  KserveCall call;
  call.unary = true;
  call.tenant = "not\na tenant";
  Start(call);
  Send(Vllm("a"));
  EXPECT_EQ(sink_.end->code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(router_.refused().size(), 1u);
  EXPECT_EQ(router_.refused()[0].first.tenant, "");
  EXPECT_EQ(router_.refused()[0].second.code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(KserveStreamTest, AModelWithoutATokenizerAcceptsOnlyTokenIds) {
  Start();
  backend_->codec = nullptr;
  Send(Vllm("a"));
  RunWrites();
  EXPECT_THAT(LastError(), HasSubstr("'input_ids'"));
  InferRequestBuilder builder("tiny", "b");
  Send(builder.Numbers<int32_t>("input_ids", "INT32", {2}, {5, 6})
           .Int("request_output_len", 2));
  EXPECT_THAT(Engine(0)->request().prompt.ToIds(), ElementsAre(5, 6));
}

TEST_F(KserveStreamTest, AUnaryCallEndsAfterItsOnlyResponse) {
  KserveCall call;
  call.unary = true;
  Start(call);
  Send(Vllm("a"));
  stream_->OnHalfClose();
  Engine(0)->Complete("xy");
  RunWrites();
  EXPECT_THAT(Written(), ElementsAre("a:xy"));
  EXPECT_EQ(sink_.end, absl::OkStatus());
  EXPECT_EQ(sink_.reads, 0);
}

TEST_F(KserveStreamTest, AnErrorOfAUnaryCallIsReturnedAsTheStatusOfTheCall) {
  KserveCall call;
  call.unary = true;
  Start(call);
  Send(InferRequestBuilder("nope", "a").Text("text_input", "x"));
  EXPECT_EQ(sink_.end->code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(sink_.writes.empty());
}

TEST_F(KserveStreamTest, TheStatisticsCountRequestsThatHaveEnded) {
  Start();
  Send(Vllm("a"));
  Engine(0)->Complete("x");
  Send(Vllm("b"));
  Engine(1)->Done(absl::UnavailableError(""));
  RunWrites();
  const auto statistics = backend_->statistics.StatisticsOf("tiny");
  EXPECT_EQ(statistics.inference_count(), 1u);
  EXPECT_EQ(statistics.inference_stats().success().count(), 1u);
  EXPECT_EQ(statistics.inference_stats().fail().count(), 1u);
}

TEST(KserveStatisticsTest,
     ComputeOutputIsTheRestOfTheTotalTimeAndNeverNegative) {
  KserveStatistics statistics;
  KserveStatistics::Outcome outcome;
  outcome.ok = true;
  outcome.total = absl::Milliseconds(100);
  outcome.input = absl::Milliseconds(5);
  outcome.queue = absl::Milliseconds(20);
  outcome.compute = absl::Milliseconds(60);
  statistics.Record("m", outcome);
  // The engine's clock may run at another speed, so the sum of the times may
  // exceed the total.
  outcome.compute = absl::Milliseconds(110);
  statistics.Record("m", outcome);
  const inference::InferStatistics stats =
      statistics.StatisticsOf("m").inference_stats();
  EXPECT_EQ(stats.compute_input().count(), 2u);
  EXPECT_EQ(stats.compute_infer().count(), 2u);
  EXPECT_EQ(stats.compute_output().count(), 2u);
  EXPECT_EQ(stats.compute_input().ns(), 10'000'000u);
  EXPECT_EQ(stats.compute_infer().ns(), 170'000'000u);
  EXPECT_EQ(stats.compute_output().ns(), 15'000'000u);
}

// Test fixture: callers belong to a tenant whose quota is two
// concurrent requests.
class KserveQuotaTest : public KserveStreamTest {
 protected:
  void StartRed() {
    backend_->callers = CallersOf(absl::StrCat(
        TenantEntry("red", R"("quota": {"concurrent_requests": 2})"), ",",
        TenantEntry("blue", R"("shared_prefix_cache": true)")));
    KserveCall call;
    call.credentials = TokenOf("red");
    Start(call);
  }
  uint32_t Running() const { return RunningOf(*backend_->callers, "red"); }
};

TEST_F(KserveQuotaTest,
       RefusesRequestsOfAStreamBeyondTheLimitOfConcurrentRequests) {
  StartRed();
  Send(Vllm("a"));
  Send(Vllm("b"));
  EXPECT_EQ(Running(), 2);
  Send(Vllm("c"));
  RunWrites();
  EXPECT_THAT(LastError(),
              StartsWith("RESOURCE_EXHAUSTED: tenant 'red' runs "
                         "2 requests (each sample counts as one)"));
  EXPECT_EQ(Running(), 2);
  // A stop request needs no quota. If it did, a caller that has used up its
  // quota could not end its requests.
  Send(StopRequest("a"));
  RunWrites();
  EXPECT_TRUE(Engine(0)->cancelled());
  EXPECT_EQ(Running(), 2)
      << "a stopped request counts until the engine has ended it";
  Engine(0)->Done(absl::CancelledError("stopped"));
  EXPECT_EQ(Running(), 1);
  Engine(1)->Emit("x");
  Engine(1)->Finish();
  Run();
  EXPECT_EQ(Running(), 0)
      << "the place is free before the client receives the last response";
  Engine(1)->Done();
  RunWrites();
  EXPECT_EQ(Running(), 0);
}

TEST_F(KserveStreamTest, ATextThatCannotFitTheModelIsRefused) {
  Start();
  Send(Vllm("a", std::string(5000, 'x')));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("INVALID_ARGUMENT: the prompt has more "
                                      "than 1023 tokens"));
  EXPECT_EQ(router_.num_requests(), 0u);
}

TEST_F(KserveQuotaTest, EachSampleOfARequestCountsInTheQuota) {
  StartRed();
  Send(Vllm("a").Text("sampling_parameters", R"({"n": 3})"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("INVALID_ARGUMENT: n is 3, but the quota "
                                      "of tenant 'red' allows 2"));
  EXPECT_EQ(Running(), 0);
  Send(Vllm("b").Text("sampling_parameters", R"({"n": 2})"));
  EXPECT_EQ(Running(), 2);
}

TEST_F(KserveQuotaTest, ARefusedRequestNoLongerCountsInTheQuota) {
  StartRed();
  tokenizer_->max_queued = 1;
  Send(InferRequestBuilder("other", "unknown").Text("text_input", "x"));
  Send(Vllm("bad-text", "\x01"));
  tokenizer_->max_queued = 0;
  Send(Vllm("full"));
  tokenizer_->max_queued = 1;
  router_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  Send(Vllm("refused"));
  RunWrites();
  EXPECT_EQ(router_.num_requests(), 0u);
  EXPECT_EQ(Running(), 0);
}

TEST_F(KserveQuotaTest,
       RequestsOfAResetStreamCountInTheQuotaUntilTheEngineEndsThem) {
  StartRed();
  Send(Vllm("a"));
  Send(Vllm("b"));
  stream_->OnCancelled();
  RunWrites();
  EXPECT_EQ(Running(), 2);
  Engine(0)->Done(absl::CancelledError("gone"));
  Engine(1)->Done(absl::UnavailableError("draining"));
  EXPECT_EQ(Running(), 0);
}

TEST_F(KserveQuotaTest,
       ARequestThatEndsBeforeItIsTokenizedStillCountsInTheQuota) {
  StartRed();
  tokenizer_->paused = true;
  Send(Vllm("a"));
  Send(StopRequest("a"));
  Send(Vllm("b"));
  RunWrites();
  EXPECT_EQ(Running(), 2) << "its task still waits for the tokenizer";
  Send(Vllm("c"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("RESOURCE_EXHAUSTED: tenant 'red' runs "
                                      "2 requests"));
  stream_->OnCancelled();
  Run();
  ASSERT_TRUE(sink_.end.has_value());
  EXPECT_EQ(Running(), 2);
  tokenizer_->paused = false;
  Run();
  EXPECT_EQ(Running(), 0);
  EXPECT_EQ(router_.num_requests(), 0u);
}

TEST_F(KserveQuotaTest,
       ASlowReadersRequestCountsInTheQuotaUntilTheEngineEndsIt) {
  backend_->limits.max_waiting_bytes_per_stream = 10;
  StartRed();
  Send(Vllm("a"));
  Engine(0)->Emit("x");
  Run();
  Engine(0)->Emit("0123456789a");
  Run();
  EXPECT_EQ(Engine(0)->reason(), CancelReason::kSlowReader);
  Engine(0)->Done(absl::CancelledError("slow"));
  EXPECT_EQ(Running(), 0);
}

TEST_F(KserveQuotaTest,
       ARequestForOneResponseCountsInTheQuotaUntilItsLastSampleEnds) {
  backend_->callers =
      CallersOf(TenantEntry("red", R"("quota": {"concurrent_requests": 1})"));
  KserveCall call;
  call.credentials = TokenOf("red");
  call.unary = true;
  Start(call);
  InferRequestBuilder builder("tiny", "a");
  Send(builder.Text("text_input", "hi"));
  EXPECT_EQ(Running(), 1);
  Engine(0)->Complete("answer");
  Run();
  EXPECT_EQ(Running(), 0);
}

TEST_F(KserveQuotaTest, ARequestOverTheQuotaIsRefusedBeforeItsTensorsAreRead) {
  StartRed();
  Send(Vllm("a"));
  Send(Vllm("b"));
  // The tensors of this request are invalid. The error shows that they are
  // not read.
  InferRequestBuilder senseless("tiny", "c");
  Send(senseless.Bool("text_input", true));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("RESOURCE_EXHAUSTED"));
  // A message whose tensor `stop` is false is not a stop request, so the
  // quota applies.
  Send(InferRequestBuilder("tiny", "d")
           .Bool("text_input", true)
           .Bool("stop", false));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("RESOURCE_EXHAUSTED"));
  inference::ModelInferRequest typed =
      InferRequestBuilder("tiny", "e").Bool("text_input", true).Build();
  typed.clear_raw_input_contents();
  auto* stop = typed.add_inputs();
  stop->set_name("stop");
  stop->set_datatype("BOOL");
  stop->add_shape(1);
  for (const bool value : {false, true}) {
    stop->mutable_contents()->clear_bool_contents();
    stop->mutable_contents()->add_bool_contents(value);
    stream_->OnRead(std::make_shared<inference::ModelInferRequest>(typed));
    RunWrites();
    EXPECT_THAT(LastError(),
                StartsWith(value ? "INVALID_ARGUMENT" : "RESOURCE_EXHAUSTED"));
  }
  EXPECT_EQ(router_.num_requests(), 2u);
  EXPECT_EQ(Running(), 2);
}

TEST_F(KserveQuotaTest, RefusalsOfCallersDoNotCountAsFailuresOfTheModel) {
  StartRed();
  backend_->callers = CallersOf(TenantEntry("blue"));
  Send(Vllm("a"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("UNAUTHENTICATED"));
  backend_->callers = CallersOf(TenantEntry("red", R"("roles": ["ADMIN"])"));
  Send(Vllm("b"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("PERMISSION_DENIED"));
  backend_->callers = CallersOf(TenantEntry(
      "red", R"("quota": {"requests_per_second": 0.0001, "burst": 1})"));
  Send(Vllm("c"));
  EXPECT_EQ(router_.num_requests(), 1u);
  Send(Vllm("d"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_EQ(router_.refused().size(), 3u);
  const auto fails = [this] {
    return backend_->statistics.StatisticsOf("tiny")
        .inference_stats()
        .fail()
        .count();
  };
  EXPECT_EQ(fails(), 0u);
  // An invalid request counts as a failure of the model, as in Triton.
  backend_->callers = CallersOf(TenantEntry("red"));
  Send(InferRequestBuilder("tiny", "e").Bool("text_input", true));
  EXPECT_EQ(fails(), 1u);
}

TEST_F(KserveQuotaTest,
       EachRequestOfAStreamIsCheckedAgainstTheCurrentIdentitiesFile) {
  StartRed();
  Send(Vllm("a"));
  EXPECT_EQ(Engine(0)->request().tenant, "red");
  EXPECT_EQ(Engine(0)->request().cache_salt, "tenant/red");
  backend_->callers = CallersOf(TenantEntry("blue"));
  Send(Vllm("b"));
  RunWrites();
  EXPECT_THAT(LastError(), StartsWith("UNAUTHENTICATED: metadata "
                                      "'authorization'"));
  EXPECT_EQ(router_.num_requests(), 1u);
  EXPECT_FALSE(Engine(0)->cancelled()) << "running requests continue";
}

TEST_F(KserveQuotaTest, ATenantThatSharesItsPrefixCacheGetsNoCacheSalt) {
  backend_->callers =
      CallersOf(TenantEntry("blue", R"("shared_prefix_cache": true)"));
  KserveCall call;
  call.credentials = TokenOf("blue");
  Start(call);
  Send(Vllm("a"));
  EXPECT_EQ(Engine(0)->request().tenant, "blue");
  EXPECT_EQ(Engine(0)->request().cache_salt, "");
}

}  // namespace
}  // namespace kvasir::router
