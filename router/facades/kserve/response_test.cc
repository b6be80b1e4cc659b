#include "router/facades/kserve/response.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class KserveResponseTest : public ::testing::Test {
 protected:
  static KserveAnswer Answer(const InferRequestBuilder& builder,
                             bool in_stream = true) {
    absl::StatusOr<KserveRequest> request =
        ParseKserveRequest(builder.Build(), /*unary=*/!in_stream);
    EXPECT_TRUE(request.ok()) << request.status();
    KserveAnswerContext context;
    context.codec = std::make_shared<ByteCodec>();
    context.prompt =
        request->schema == KserveSchema::kTrtTokens
            ? request->token_ids
            : proto::TokenBytes::Adopt(ByteCodec::Ids(request->text));
    context.eos_ids = {kByteEos};
    context.in_stream = in_stream;
    return KserveAnswer(*std::move(request), std::move(context));
  }

  static InferRequestBuilder Vllm(bool stream) {
    InferRequestBuilder builder;
    builder.Text("text_input", "Q:").Bool("stream", stream);
    return builder;
  }
  static InferRequestBuilder Trt(bool stream) {
    InferRequestBuilder builder;
    builder.Text("text_input", "Q:")
        .Int("max_tokens", 9)
        .Bool("stream", stream);
    return builder;
  }
  static InferRequestBuilder Tokens(bool stream) {
    InferRequestBuilder builder;
    builder.Numbers<int32_t>("input_ids", "INT32", {1, 2}, {70, 71})
        .Int("request_output_len", 9)
        .Bool("streaming", stream);
    return builder;
  }

  static kvasir::v1::GenerateEvent::Tokens Ids(const std::vector<int32_t>& ids,
                                               uint32_t index = 0) {
    kvasir::v1::GenerateEvent::Tokens tokens;
    tokens.set_index(index);
    for (const int32_t id : ids) {
      tokens.add_token_ids(id);
      tokens.add_logprobs()->set_logprob(-0.5f);
    }
    return tokens;
  }
  static kvasir::v1::GenerateEvent::Tokens Text(const std::string& text,
                                                uint32_t index = 0) {
    return Ids(ByteCodec::Ids(text), index);
  }
  static kvasir::v1::GenerateEvent::Finish Finish(
      kvasir::v1::FinishReason reason = kvasir::v1::FINISH_LENGTH,
      uint32_t index = 0) {
    kvasir::v1::GenerateEvent::Finish finish;
    finish.set_index(index);
    finish.set_reason(reason);
    return finish;
  }
};

TEST_F(KserveResponseTest, TheLastStreamedResponseHasTheFinalFlag) {
  KserveAnswer answer = Answer(Vllm(true));
  EXPECT_FALSE(answer.HasResponse());
  answer.OnTokens(Text("ab"));
  ASSERT_TRUE(answer.HasResponse());
  const auto first = answer.Take();
  EXPECT_EQ(first.id(), "r1");
  EXPECT_EQ(first.model_name(), "tiny");
  EXPECT_THAT(StringOutput(first, "text_output"), ElementsAre("ab"));
  EXPECT_EQ(FinalFlag(first), false);
  EXPECT_FALSE(answer.HasResponse());
  answer.OnTokens(Text("c"));
  answer.OnFinish(Finish());
  ASSERT_TRUE(answer.HasResponse());
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "text_output"), ElementsAre("c"));
  EXPECT_EQ(FinalFlag(last), true);
  EXPECT_TRUE(answer.complete());
  EXPECT_FALSE(answer.HasResponse());
}

TEST_F(KserveResponseTest, TokensThatWaitForASlowReaderAreSentInOneResponse) {
  KserveAnswer answer = Answer(Vllm(true));
  answer.OnTokens(Text("a"));
  answer.OnTokens(Text("b"));
  EXPECT_EQ(answer.waiting_bytes(), 2u);
  EXPECT_THAT(StringOutput(answer.Take(), "text_output"), ElementsAre("ab"));
  EXPECT_EQ(answer.waiting_bytes(), 0u);
}

TEST_F(KserveResponseTest,
       TheLastResponseHasItsOutputTensorsEvenIfNoTextIsLeft) {
  KserveAnswer answer = Answer(Vllm(true));
  answer.OnTokens(Text("a"));
  answer.Take();
  answer.OnFinish(Finish());
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "text_output"), ElementsAre(""));
  EXPECT_EQ(FinalFlag(last), true);
}

TEST_F(KserveResponseTest,
       AnEmptyFinalResponseIsSentOnlyIfRequestedAndNoOutputIsLeft) {
  KserveAnswer nothing_left = Answer(Vllm(true).WantsEmptyFinal());
  nothing_left.OnTokens(Text("a"));
  nothing_left.Take();
  nothing_left.OnFinish(Finish());
  const auto empty = nothing_left.Take();
  EXPECT_EQ(empty.outputs_size(), 0);
  EXPECT_EQ(FinalFlag(empty), true);

  KserveAnswer with_data = Answer(Vllm(true).WantsEmptyFinal());
  with_data.OnTokens(Text("a"));
  with_data.OnFinish(Finish());
  const auto data = with_data.Take();
  EXPECT_THAT(StringOutput(data, "text_output"), ElementsAre("a"));
  EXPECT_EQ(FinalFlag(data), true);
  EXPECT_TRUE(with_data.complete());
}

TEST_F(KserveResponseTest, TheLastResponseHasTheCountsThatWereNotSentYet) {
  KserveAnswer answer =
      Answer(Vllm(true)
                 .Text("sampling_parameters", R"({"logprobs": 0})")
                 .Bool("return_num_output_tokens", true)
                 .Bool("return_cumulative_logprob", true)
                 .Bool("return_logprobs", true)
                 .WantsEmptyFinal());
  answer.OnTokens(Text("a"));
  answer.Take();
  answer.OnTokens(Ids({kByteEos}));
  EXPECT_FALSE(answer.HasResponse());
  answer.OnFinish(Finish(kvasir::v1::FINISH_STOP));
  const auto last = answer.Take();
  EXPECT_EQ(FinalFlag(last), true);
  EXPECT_THAT(NumberOutput<uint32_t>(last, "num_output_tokens"),
              ElementsAre(1u));
  EXPECT_THAT(NumberOutput<float>(last, "cumulative_logprob"),
              ElementsAre(-1.0f));
  EXPECT_THAT(StringOutput(last, "logprobs"), ElementsAre(HasSubstr("256")));
}

TEST_F(KserveResponseTest, LogprobsOfAStopStringsTokensAreSentToTheClient) {
  KserveAnswer answer = Answer(Trt(true)
                                   .Int("num_return_sequences", 2)
                                   .Text("stop_words", "END")
                                   .Bool("return_log_probs", true)
                                   .WantsEmptyFinal());
  for (const uint32_t sample : {0u, 1u}) {
    answer.OnTokens(Text("a", sample));
    answer.Take();
    answer.OnTokens(Text("END", sample));
  }
  ASSERT_TRUE(answer.finished());
  const auto first = answer.Take();
  EXPECT_THAT(NumberOutput<int32_t>(first, "sequence_index"), ElementsAre(0));
  EXPECT_THAT(NumberOutput<float>(first, "output_log_probs"),
              ElementsAre(-0.5f, -0.5f, -0.5f));
  EXPECT_EQ(FinalFlag(first), false);
  const auto second = answer.Take();
  EXPECT_THAT(NumberOutput<int32_t>(second, "sequence_index"), ElementsAre(1));
  EXPECT_THAT(NumberOutput<float>(second, "output_log_probs"),
              ElementsAre(-0.5f, -0.5f, -0.5f));
  EXPECT_EQ(FinalFlag(second), true);
}

TEST_F(KserveResponseTest, AllSamplesOfARequestShareOneCopyOfThePrompt) {
  KserveAnswer text =
      Answer(Vllm(false).Text("sampling_parameters", R"({"n": 2})"));
  KserveAnswer tokens = Answer(Tokens(false).Int("num_return_sequences", 2));
  for (KserveAnswer* answer : {&text, &tokens}) {
    for (const uint32_t sample : {0u, 1u}) {
      answer->OnFinish(Finish(kvasir::v1::FINISH_LENGTH, sample));
    }
    EXPECT_EQ(answer->waiting_bytes(), 0u) << "the prompt does not count";
  }
  EXPECT_THAT(StringOutput(text.Take(), "text_output"),
              ElementsAre("Q:", "Q:"));
  const auto response = tokens.Take();
  EXPECT_THAT(NumberOutput<int32_t>(response, "output_ids"),
              ElementsAre(70, 71, 70, 71));
  EXPECT_THAT(NumberOutput<int32_t>(response, "sequence_length"),
              ElementsAre(2, 2));
}

TEST_F(KserveResponseTest,
       AnAnswerThatIsNotStreamedIsOneResponseWithThePrompt) {
  KserveAnswer answer = Answer(Vllm(false));
  answer.OnTokens(Text("ab"));
  EXPECT_FALSE(answer.HasResponse());
  EXPECT_EQ(answer.waiting_bytes(), 0u);
  answer.OnTokens(Text("c"));
  answer.OnFinish(Finish());
  const auto response = answer.Take();
  EXPECT_THAT(StringOutput(response, "text_output"), ElementsAre("Q:abc"));
  EXPECT_EQ(FinalFlag(response), true);
}

TEST_F(KserveResponseTest, UnaryResponsesHaveNoFinalFlag) {
  KserveAnswer answer = Answer(Vllm(false), /*in_stream=*/false);
  answer.OnFinish(Finish());
  EXPECT_EQ(FinalFlag(answer.Take()), std::nullopt);
}

TEST_F(KserveResponseTest, OptionalVllmOutputsAreSentOnlyIfRequested) {
  KserveAnswer answer =
      Answer(Vllm(true)
                 .Text("sampling_parameters", R"({"logprobs": 1})")
                 .Bool("return_finish_reason", true)
                 .Bool("return_cumulative_logprob", true)
                 .Bool("return_logprobs", true)
                 .Bool("return_num_input_tokens", true)
                 .Bool("return_num_output_tokens", true));
  auto tokens = Text("a");
  auto* top = tokens.mutable_logprobs(0)->add_top();
  top->set_token_id('b');
  top->set_logprob(-0.25f);
  answer.OnTokens(tokens);
  const auto first = answer.Take();
  EXPECT_THAT(StringOutput(first, "finish_reason"), ElementsAre("None"));
  EXPECT_THAT(NumberOutput<float>(first, "cumulative_logprob"),
              ElementsAre(-0.5f));
  EXPECT_THAT(NumberOutput<uint32_t>(first, "num_input_tokens"),
              ElementsAre(2u));
  EXPECT_THAT(NumberOutput<uint32_t>(first, "num_output_tokens"),
              ElementsAre(1u));
  EXPECT_THAT(
      StringOutput(first, "logprobs"),
      ElementsAre(R"([{"97":{"logprob":-0.5,"rank":null,"decoded_token":"a"},)"
                  R"("98":{"logprob":-0.25,"rank":1,"decoded_token":"b"}}])"));
  answer.OnTokens(Text("c"));
  answer.OnFinish(Finish());
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "finish_reason"), ElementsAre("length"));
  EXPECT_THAT(NumberOutput<float>(last, "cumulative_logprob"),
              ElementsAre(-1.0f));
  EXPECT_THAT(NumberOutput<uint32_t>(last, "num_output_tokens"),
              ElementsAre(1u));
}

TEST_F(KserveResponseTest, LogprobsAreNullUnlessRequested) {
  KserveAnswer answer = Answer(Vllm(true).Bool("return_logprobs", true));
  answer.OnTokens(Text("a"));
  EXPECT_THAT(StringOutput(answer.Take(), "logprobs"), ElementsAre("null"));
}

TEST_F(KserveResponseTest, AStopStringEndsTheAnswerBeforeTheEngineFinishes) {
  KserveAnswer answer =
      Answer(Vllm(true)
                 .Text("sampling_parameters", R"({"stop": "END"})")
                 .Bool("return_finish_reason", true));
  answer.OnTokens(Text("abEN"));
  EXPECT_FALSE(answer.finished());
  EXPECT_THAT(StringOutput(answer.Take(), "text_output"), ElementsAre("ab"));
  answer.OnTokens(Text("Dxyz"));
  EXPECT_TRUE(answer.finished());
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "text_output"), ElementsAre(""));
  EXPECT_THAT(StringOutput(last, "finish_reason"), ElementsAre("stop"));
  EXPECT_EQ(FinalFlag(last), true);
}

TEST_F(KserveResponseTest, TheTextOfTheStopTokenThatEndsASampleIsNotSent) {
  const std::string json =
      R"({"stop_token_ids": [46], "include_stop_str_in_output": false})";
  KserveAnswer answer = Answer(Vllm(true)
                                   .Text("sampling_parameters", json)
                                   .Bool("return_num_output_tokens", true));
  answer.OnTokens(Text("a."));
  EXPECT_THAT(StringOutput(answer.Take(), "text_output"), ElementsAre("a"));
  // Another token follows, so the held-back token did not end the sample. It is
  // part of the text.
  answer.OnTokens(Text("b."));
  EXPECT_THAT(StringOutput(answer.Take(), "text_output"), ElementsAre(".b"));
  answer.OnFinish(Finish(kvasir::v1::FINISH_STOP));
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "text_output"), ElementsAre(""));
  EXPECT_THAT(NumberOutput<uint32_t>(last, "num_output_tokens"),
              ElementsAre(1u));
}

TEST_F(KserveResponseTest, ResponsesInTheVllmSchemaHaveOneElementPerSample) {
  KserveAnswer answer = Answer(Vllm(true)
                                   .Text("sampling_parameters", R"({"n": 2})")
                                   .Bool("return_finish_reason", true));
  answer.OnTokens(Text("a", 1));
  EXPECT_THAT(StringOutput(answer.Take(), "text_output"), ElementsAre("", "a"));
  answer.OnTokens(Text("b", 0));
  answer.OnFinish(Finish(kvasir::v1::FINISH_STOP, 1));
  const auto second = answer.Take();
  EXPECT_THAT(StringOutput(second, "finish_reason"),
              ElementsAre("None", "stop"));
  EXPECT_EQ(FinalFlag(second), false);
  answer.OnFinish(Finish(kvasir::v1::FINISH_LENGTH, 0));
  EXPECT_EQ(FinalFlag(answer.Take()), true);
}

TEST_F(KserveResponseTest, EachResponseInATensorRtLlmStreamHasOneSample) {
  KserveAnswer answer = Answer(Trt(true).Int("num_return_sequences", 2));
  answer.OnTokens(Text("a", 0));
  answer.OnTokens(Text("b", 1));
  answer.OnFinish(Finish(kvasir::v1::FINISH_LENGTH, 0));
  answer.OnFinish(Finish(kvasir::v1::FINISH_LENGTH, 1));
  const auto first = answer.Take();
  EXPECT_THAT(StringOutput(first, "text_output"), ElementsAre("a"));
  EXPECT_THAT(NumberOutput<int32_t>(first, "sequence_index"), ElementsAre(0));
  EXPECT_EQ(FinalFlag(first), false);
  const auto second = answer.Take();
  EXPECT_THAT(StringOutput(second, "text_output"), ElementsAre("b"));
  EXPECT_THAT(NumberOutput<int32_t>(second, "sequence_index"), ElementsAre(1));
  EXPECT_EQ(FinalFlag(second), true);
}

TEST_F(KserveResponseTest, TheTextIsTheFirstOutputTensorOfAResponse) {
  KserveAnswer answer = Answer(Trt(true));
  answer.OnTokens(Text("a"));
  const auto response = answer.Take();
  EXPECT_EQ(response.outputs(0).name(), "text_output");
  EXPECT_EQ(response.raw_output_contents_size(), response.outputs_size());
}

TEST_F(KserveResponseTest, StreamedTokenIdsDoNotIncludeTheEndToken) {
  KserveAnswer answer = Answer(Tokens(true).Bool("return_log_probs", true));
  answer.OnTokens(Ids({5, 6}));
  const auto first = answer.Take();
  EXPECT_THAT(NumberOutput<int32_t>(first, "output_ids"), ElementsAre(5, 6));
  EXPECT_THAT(OutputShape(first, "output_ids"), ElementsAre(1, 1, 2));
  EXPECT_THAT(NumberOutput<int32_t>(first, "sequence_length"), ElementsAre(2));
  EXPECT_THAT(OutputShape(first, "sequence_length"), ElementsAre(1, 1));
  EXPECT_THAT(OutputShape(first, "output_log_probs"), ElementsAre(1, 1, 2));
  EXPECT_THAT(NumberOutput<float>(first, "cum_log_probs"), ElementsAre(-1.0f));
  answer.OnTokens(Ids({kByteEos}));
  EXPECT_FALSE(answer.HasResponse());
  answer.OnFinish(Finish(kvasir::v1::FINISH_STOP));
  const auto last = answer.Take();
  EXPECT_THAT(NumberOutput<int32_t>(last, "output_ids"), IsEmpty());
  EXPECT_THAT(OutputShape(last, "output_ids"), ElementsAre(1, 1, 0));
  EXPECT_EQ(FinalFlag(last), true);
}

TEST_F(KserveResponseTest,
       TokenIdsOfAnAnswerThatIsNotStreamedBeginWithThePromptUnlessExcluded) {
  KserveAnswer with = Answer(Tokens(false));
  with.OnTokens(Ids({5}));
  with.OnFinish(Finish());
  EXPECT_THAT(NumberOutput<int32_t>(with.Take(), "output_ids"),
              ElementsAre(70, 71, 5));
  KserveAnswer without =
      Answer(Tokens(false).Bool("exclude_input_in_output", true));
  without.OnTokens(Ids({5}));
  without.OnFinish(Finish());
  EXPECT_THAT(NumberOutput<int32_t>(without.Take(), "output_ids"),
              ElementsAre(5));
}

TEST_F(KserveResponseTest, SamplesInOneResponseArePaddedToTheSameLength) {
  KserveAnswer answer = Answer(Tokens(false)
                                   .Int("num_return_sequences", 2)
                                   .Int("pad_id", 3)
                                   .Bool("exclude_input_in_output", true));
  answer.OnTokens(Ids({5, 6}, 0));
  answer.OnTokens(Ids({7}, 1));
  answer.OnFinish(Finish(kvasir::v1::FINISH_LENGTH, 0));
  EXPECT_FALSE(answer.HasResponse());
  answer.OnFinish(Finish(kvasir::v1::FINISH_LENGTH, 1));
  const auto response = answer.Take();
  EXPECT_THAT(NumberOutput<int32_t>(response, "output_ids"),
              ElementsAre(5, 6, 7, 3));
  EXPECT_THAT(OutputShape(response, "output_ids"), ElementsAre(1, 2, 2));
  EXPECT_THAT(NumberOutput<int32_t>(response, "sequence_length"),
              ElementsAre(2, 1));
}

TEST_F(KserveResponseTest, AStoppedRequestStillSendsItsOutputSoFar) {
  KserveAnswer answer = Answer(Vllm(true).Bool("return_finish_reason", true));
  answer.OnTokens(Text("ab"));
  answer.Stop();
  const auto last = answer.Take();
  EXPECT_THAT(StringOutput(last, "text_output"), ElementsAre("ab"));
  EXPECT_THAT(StringOutput(last, "finish_reason"), ElementsAre("abort"));
  EXPECT_EQ(FinalFlag(last), true);
}

TEST_F(KserveResponseTest, EventsOfSamplesThatDoNotExistAreIgnored) {
  KserveAnswer answer = Answer(Vllm(true));
  answer.OnTokens(Text("a", 7));
  answer.OnFinish(Finish(kvasir::v1::FINISH_STOP, 7));
  EXPECT_FALSE(answer.HasResponse());
}

TEST_F(KserveResponseTest, AnEmptyFinalResponseHasOnlyItsIdAndTheFinalFlag) {
  const auto response = EmptyFinalResponse("tiny", "x");
  EXPECT_EQ(response.id(), "x");
  EXPECT_EQ(FinalFlag(response), true);
  EXPECT_EQ(response.outputs_size(), 0);
}

}  // namespace
}  // namespace kvasir::router
