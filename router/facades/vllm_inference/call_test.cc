// Tests of GenerateStream and Generate without gRPC: the test sends a message
// and the engine's events, and checks the responses.
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/vllm_inference/answer.h"
#include "router/facades/vllm_inference/models.h"
#include "router/facades/vllm_inference/prepare.h"
#include "router/facades/vllm_inference/request.h"
#include "router/testing/call_testing.h"
#include "router/testing/callers_testing.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using vllm::FinishInfo;
using vllm::GenerateRequest;
using vllm::GenerateResponse;

class VllmInferenceCallTest : public SingleCallTest<VllmInferenceAnswer> {
 protected:
  void Send(const GenerateRequest& message, bool streaming = true) {
    Begin(
        message,
        [streaming](const GenerateRequest& m) {
          return ParseVllmInferenceRequest(m, streaming);
        },
        PrepareVllmInferenceCall);
  }
  static GenerateRequest Message(const std::string& text = "hi") {
    GenerateRequest message;
    message.set_request_id("r1");
    for (const int32_t id : ByteCodec::Ids(text)) {
      message.mutable_token_ids()->add_ids(static_cast<uint32_t>(id));
    }
    return message;
  }
  std::string Text(uint32_t index = 0) const {
    std::string text;
    for (const GenerateResponse& response : writer_.writes) {
      if (response.outputs().index() == index)
        text += response.outputs().text();
    }
    return text;
  }
  // Checks the counts in the responses as clients do, which abort if a count
  // is wrong.
  void ExpectCountsToHold(const GenerateRequest& message) const {
    std::map<uint32_t, uint32_t> tokens;
    std::map<uint32_t, uint32_t> reported;
    bool first = true;
    for (const GenerateResponse& response : writer_.writes) {
      EXPECT_EQ(response.has_prompt_info(), first);
      first = false;
      const vllm::SequenceOutput& out = response.outputs();
      EXPECT_FALSE(reported.count(out.index())) << "output after the finish";
      tokens[out.index()] += out.num_tokens();
      const auto num = static_cast<int>(out.num_tokens());
      const auto& want = message.response();
      EXPECT_EQ(out.token_ids_size(), want.output_token_ids() ? num : 0);
      EXPECT_EQ(out.logprobs_size(), want.output_logprobs() ? num : 0);
      EXPECT_EQ(out.ranks_size(), want.output_logprobs() ? num : 0);
      EXPECT_EQ(out.candidate_tokens_size(), want.output_logprobs() ? num : 0);
      if (out.has_finish_info()) {
        reported[out.index()] = out.finish_info().num_output_tokens();
      }
    }
    EXPECT_EQ(reported, tokens);
  }
  const FinishInfo& LastFinish() const {
    return writer_.writes.back().outputs().finish_info();
  }
};

TEST_F(VllmInferenceCallTest, StreamsTextTokenIdsAndCounts) {
  GenerateRequest message = Message();
  message.mutable_response()->set_output_token_ids(true);
  message.mutable_response()->set_prompt_token_ids(true);
  Send(message);
  Engine().Emit("ab");
  RunWrites();
  Engine().Complete("c");
  RunWrites();
  EXPECT_EQ(Text(), "abc");
  ASSERT_EQ(writer_.writes.size(), 2);
  EXPECT_EQ(writer_.writes[0].prompt_info().num_prompt_tokens(), 2);
  EXPECT_THAT(writer_.writes[0].prompt_info().token_ids(),
              ElementsAre('h', 'i'));
  EXPECT_THAT(writer_.writes[0].outputs().token_ids(), ElementsAre('a', 'b'));
  EXPECT_EQ(LastFinish().finish_reason(), FinishInfo::LENGTH);
  ExpectCountsToHold(message);
  KVASIR_EXPECT_OK(*writer_.end);
}

// vllm-router requests only ids and converts them to text itself.
TEST_F(VllmInferenceCallTest, ARequestForTokenIdsOnlyNeedsNoTokenizer) {
  backend_->codec = nullptr;
  GenerateRequest message = Message();
  message.mutable_response()->set_output_text(false);
  message.mutable_response()->set_output_token_ids(true);
  Send(message);
  Engine().Complete("ab");
  RunWrites();
  EXPECT_EQ(Text(), "");
  EXPECT_THAT(writer_.writes[0].outputs().token_ids(), ElementsAre('a', 'b'));
  ExpectCountsToHold(message);
}

TEST_F(VllmInferenceCallTest,
       WithoutATokenizerTheErrorForATextRequestNamesTheAlternative) {
  backend_->codec = nullptr;
  const auto refused = [this](const GenerateRequest& message) {
    writer_.end.reset();
    Send(message);
    return *writer_.end;
  };
  EXPECT_THAT(
      refused(Message()),
      StatusIs(absl::StatusCode::kUnimplemented,
               HasSubstr("response.output_text needs a tokenizer, and this "
                         "server has none for the model; ask for ids")));
  GenerateRequest text = Message();
  text.set_text("hi");
  EXPECT_THAT(refused(text), StatusIs(absl::StatusCode::kUnimplemented,
                                      HasSubstr("text needs a tokenizer")));
  GenerateRequest stop = Message();
  stop.mutable_stopping()->add_stop_strings("x");
  EXPECT_THAT(refused(stop),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("stopping.stop_strings needs a tokenizer")));
}

TEST_F(VllmInferenceCallTest, AnAnswerThatIsNotStreamedIsOneResponseAtTheEnd) {
  Send(Message(), /*streaming=*/false);
  Engine().Emit("ab");
  RunWrites();
  EXPECT_THAT(writer_.writes, IsEmpty()) << "it can still fail as a whole";
  EXPECT_TRUE(Engine().request().folded);
  Engine().Complete("c");
  RunWrites();
  ASSERT_EQ(writer_.writes.size(), 1);
  EXPECT_EQ(Text(), "abc");
  EXPECT_EQ(LastFinish().num_output_tokens(), 3);
  EXPECT_EQ(writer_.writes[0].prompt_info().num_prompt_tokens(), 2);
}

TEST_F(VllmInferenceCallTest, TokensOfSeveralSamplesAreStreamedInTurn) {
  GenerateRequest message = Message();
  message.mutable_sampling()->set_num_sequences(2);
  Send(message);
  for (const uint32_t index : {0U, 1U}) {
    Engine().Emit(index == 0 ? "xy" : "z", index);
    Engine().Finish(kvasir::v1::FINISH_LENGTH, index);
  }
  Engine().Done();
  RunWrites();
  EXPECT_EQ(Text(0), "xy");
  EXPECT_EQ(Text(1), "z");
  ExpectCountsToHold(message);
}

TEST_F(VllmInferenceCallTest, AStopStringEndsTheTextAndTheTokens) {
  for (const bool include : {false, true}) {
    GenerateRequest message = Message();
    message.mutable_stopping()->add_stop_strings("bc");
    message.mutable_stopping()->set_include_stop_strings(include);
    VllmInferenceAnswer answer(*ParseVllmInferenceRequest(message, true),
                               proto::TokenBytes::FromIds({1}), {},
                               std::make_shared<ByteCodec>());
    kvasir::v1::GenerateEvent::Tokens tokens;
    for (const char c : std::string("abcd")) tokens.add_token_ids(c);
    answer.OnTokens(tokens);
    ASSERT_TRUE(answer.finished());
    const auto out = answer.Take().outputs();
    EXPECT_EQ(out.text(), include ? "abc" : "a");
    EXPECT_EQ(out.num_tokens(), 3) << "up to the token that completes it";
    EXPECT_EQ(out.finish_info().stop_string(), "bc");
    EXPECT_EQ(out.finish_info().finish_reason(), FinishInfo::STOP);
    EXPECT_TRUE(answer.complete());
  }
}

// If the sample continues after a stop token, the token becomes text, which may
// even complete a stop string.
TEST_F(VllmInferenceCallTest,
       TheTextOfAStopTokenIsSentOnlyIfTheSampleContinuesAfterIt) {
  GenerateRequest message = Message();
  message.mutable_stopping()->add_stop_token_ids('z');
  message.mutable_stopping()->set_min_new_tokens(2);
  Send(message);
  Engine().Emit("z");
  RunWrites();
  EXPECT_EQ(Text(), "");
  EXPECT_EQ(writer_.writes[0].outputs().num_tokens(), 1);
  Engine().Emit("ab");
  RunWrites();
  EXPECT_EQ(Text(), "zab");
  kvasir::v1::GenerateEvent::Finish finish;
  Engine().Emit("z");
  Engine().Finish(kvasir::v1::FINISH_STOP);
  Engine().Done();
  RunWrites();
  EXPECT_EQ(Text(), "zab")
      << "the text of the stop token that ends the sample is left out";
  EXPECT_EQ(LastFinish().num_output_tokens(), 4);
  ExpectCountsToHold(message);
}

TEST_F(VllmInferenceCallTest, TheFinishMessageHasTheTokenThatEndedTheSample) {
  GenerateRequest message = Message();
  message.mutable_stopping()->add_stop_token_ids('z');
  message.mutable_sampling()->set_num_sequences(2);
  VllmInferenceAnswer answer(*ParseVllmInferenceRequest(message, true),
                             proto::TokenBytes::FromIds({1}), {kByteEos},
                             std::make_shared<ByteCodec>());
  kvasir::v1::GenerateEvent::Finish finish;
  finish.set_reason(kvasir::v1::FINISH_STOP);
  finish.set_matched_token_id('z');
  answer.OnFinish(finish);
  finish.set_index(1);
  finish.set_matched_token_id(kByteEos);
  answer.OnFinish(finish);
  while (answer.HasResponse()) {
    const auto out = answer.Take().outputs();
    if (out.index() == 0) {
      EXPECT_EQ(out.finish_info().stop_token_id(), 'z');
    } else {
      EXPECT_EQ(out.finish_info().eos_token_id(), kByteEos);
    }
  }
}

TEST_F(VllmInferenceCallTest,
       ListsOfLogprobsRanksAndCandidatesHaveOneElementPerToken) {
  GenerateRequest message = Message();
  message.mutable_response()->set_output_logprobs(true);
  message.mutable_response()->mutable_output_candidates()->set_top_n(2);
  VllmInferenceAnswer answer(*ParseVllmInferenceRequest(message, true),
                             proto::TokenBytes::FromIds({7, 8}), {},
                             std::make_shared<ByteCodec>());
  kvasir::v1::GenerateEvent::Tokens tokens;
  for (const int32_t id : {5, 9}) {
    tokens.add_token_ids(id);
    auto* logprob = tokens.add_logprobs();
    logprob->set_logprob(id == 5 ? -1.0f : -7.0f);
    for (const int32_t top : {6, 5}) {
      logprob->add_top()->set_token_id(top);
    }
  }
  answer.OnTokens(tokens);
  const auto out = answer.Take().outputs();
  EXPECT_THAT(out.logprobs(), ElementsAre(-1.0f, -7.0f));
  EXPECT_THAT(out.ranks(), ElementsAre(2, 0)) << "0: not among the likeliest";
  ASSERT_EQ(out.candidate_tokens_size(), 2);
  ASSERT_EQ(out.candidate_tokens(0).tokens_size(), 1)
      << "the sampled token itself is not a candidate";
  EXPECT_EQ(out.candidate_tokens(0).tokens(0).id(), 6);
  EXPECT_EQ(out.candidate_tokens(0).tokens(0).rank(), 1);
  EXPECT_EQ(out.candidate_tokens(1).tokens_size(), 2);
}

TEST_F(VllmInferenceCallTest,
       AMultiByteCharacterIsNotSplitBetweenTwoResponses) {
  GenerateRequest message = Message();
  Send(message);
  Engine().Emit("\xc3");
  RunWrites();
  EXPECT_EQ(Text(), "");
  Engine().Complete("\xa9");
  RunWrites();
  EXPECT_EQ(Text(), "\xc3\xa9");
  ExpectCountsToHold(message);
}

TEST_F(VllmInferenceCallTest,
       TheDefaultOfMaxTokensIsWhatFitsTheContextOrOneResponse) {
  router_.SetMaxModelLen(100);
  Send(Message());
  EXPECT_EQ(Engine().request().sampling.max_tokens(), 98);
  TearDown();
  backend_->limits.max_response_bytes = 80;
  writer_.end.reset();
  Send(Message(), /*streaming=*/false);
  EXPECT_EQ(router_.WaitFor(1)->request().sampling.max_tokens(), 10);
  TearDown();
  GenerateRequest asks = Message();
  asks.mutable_stopping()->set_max_new_tokens(11);
  writer_.end.reset();
  Send(asks, /*streaming=*/false);
  EXPECT_THAT(*writer_.end,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("stopping.max_new_tokens: want at most 10")));
}

TEST_F(VllmInferenceCallTest,
       TheCacheSaltAndThePriorityOfARequestReachTheRouter) {
  identity_.tenant = "t";
  GenerateRequest message = Message();
  message.mutable_kv()->set_cache_salt("pepper");
  message.set_priority(4);
  Send(message);
  const CanonicalRequest& request = Engine().request();
  EXPECT_EQ(request.cache_salt, CacheSaltOf("t", "pepper"));
  EXPECT_EQ(request.priority, 4);
  // A client must not get another tenant's salt by choosing its own.
  EXPECT_NE(CacheSaltOf("", "tenant/t"), CacheSaltOf("t"));
  EXPECT_NE(CacheSaltOf("t", "a"), CacheSaltOf("", "atenant/t"));
}

// Regression test: with a negative priority, any caller could once overtake
// all others.
TEST_F(VllmInferenceCallTest, APriorityBelowTheTenantsLeastPriorityIsRefused) {
  GenerateRequest message = Message();
  message.set_priority(-1);
  Send(message);
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_THAT(*writer_.end, StatusIs(absl::StatusCode::kPermissionDenied,
                                     HasSubstr("priority: -1 is below 0")));
}

TEST_F(VllmInferenceCallTest,
       ARequestWithTheLeastPriorityOfItsTenantIsAccepted) {
  backend_->callers = CallersOf(TenantEntry("red", R"("least_priority": -2)"));
  identity_.credentials = TokenOf("red");
  GenerateRequest message = Message();
  message.set_priority(-2);
  Send(message);
  EXPECT_EQ(Engine().request().priority, -2);
}

TEST_F(VllmInferenceCallTest,
       AnAbortEndsTheStreamWithAFinishMessageAndStatusOk) {
  Send(Message());
  Engine().Emit("ab");
  RunWrites();
  call_->OnStop(0);
  RunWrites();
  EXPECT_TRUE(Engine().cancelled());
  EXPECT_EQ(LastFinish().finish_reason(), FinishInfo::ABORTED);
  ExpectCountsToHold(Message());
  KVASIR_EXPECT_OK(*writer_.end);
}

TEST_F(VllmInferenceCallTest, TheCallOfAClientThatDoesNotReadIsReset) {
  backend_->limits.max_waiting_bytes_per_stream = 100;
  Send(Message());
  Engine().Emit("ab");
  Run();
  ASSERT_TRUE(writer_.writing);
  Engine().Emit(std::string(200, 'x'));
  Run();
  EXPECT_TRUE(writer_.was_reset);
  EXPECT_EQ(Engine().reason(), CancelReason::kSlowReader);
}

ModelStatus Served(const std::string& name) {
  ModelStatus model;
  model.name = name;
  model.info.emplace();
  model.info->set_page_tokens(64);
  model.info->set_max_model_len(512);
  model.load.total_tokens = 640;
  model.load.max_num_seqs = 8;
  return model;
}

TEST(VllmInferenceModelsTest,
     TheModelDescriptionHasTheFieldsThatClientsRequire) {
  const auto info = ControlServerInfoOf(Served("a"), "1.2.3");
  KVASIR_ASSERT_OK(info);
  EXPECT_EQ(info->api_version(), "vllm");
  EXPECT_EQ(info->engine_version(), "1.2.3");
  EXPECT_EQ(info->parallelism().data_parallel_size(), 1);
  EXPECT_EQ(info->total_kv_blocks() * info->kv_block_size(), 640);
  EXPECT_EQ(info->max_model_len(), 512);
  EXPECT_EQ(info->max_running_requests(), 8);
  const vllm::ModelInfo model =
      ControlModelInfoOf(Served("a"), {Served("a"), Served("b")}, true);
  EXPECT_EQ(model.model_id(), "a");
  EXPECT_EQ(model.served_model_name(), "a");
  EXPECT_THAT(model.served_model_aliases(), ElementsAre("b"));
  EXPECT_TRUE(model.supports_token_ids_input());
  EXPECT_TRUE(model.supports_text_input());
}

TEST(VllmInferenceModelsTest,
     DescriptionsAreUnavailableBeforeAWorkerIsReached) {
  ModelStatus model = Served("a");
  model.info.reset();
  EXPECT_THAT(ControlServerInfoOf(model, "1"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("no worker of model 'a'")));
}

TEST_F(VllmInferenceCallTest,
       ACancelledRequestCountsInTheQuotaUntilItsTokenizerTaskHasRun) {
  backend_->callers =
      CallersOf(TenantEntry("red", R"("quota": {"concurrent_requests": 1})"));
  identity_.credentials = TokenOf("red");
  tokenizer_->paused = true;
  Send(Message());
  call_->OnCancelled();
  Run();
  ASSERT_TRUE(writer_.end.has_value());
  EXPECT_EQ(RunningOf(*backend_->callers, "red"), 1);
  tokenizer_->paused = false;
  Run();
  EXPECT_EQ(RunningOf(*backend_->callers, "red"), 0);
}

}  // namespace
}  // namespace kvasir::router
