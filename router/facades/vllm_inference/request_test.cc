#include "router/facades/vllm_inference/request.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using vllm::GenerateRequest;

GenerateRequest Message() {
  GenerateRequest message;
  message.mutable_token_ids()->add_ids(7);
  return message;
}

VllmInferenceRequest Parse(const GenerateRequest& message) {
  auto request = ParseVllmInferenceRequest(message, /*streaming=*/true);
  KVASIR_EXPECT_OK(request);
  return request.ok() ? *std::move(request) : VllmInferenceRequest();
}

absl::Status Refusal(const std::function<void(GenerateRequest*)>& change,
                     bool streaming = true) {
  GenerateRequest message = Message();
  change(&message);
  return ParseVllmInferenceRequest(message, streaming).status();
}

TEST(VllmInferenceRequestTest,
     FieldsThatAreZeroOrAbsentGetTheDefaultsOfTheProtocol) {
  const VllmInferenceRequest request = Parse(Message());
  EXPECT_THAT(request.token_ids.ToIds(), ElementsAre(7));
  EXPECT_EQ(request.sampling.temperature(), 0.0f) << "greedy";
  EXPECT_EQ(request.sampling.top_p(), 1.0f);
  EXPECT_EQ(request.sampling.top_k(), 0);
  EXPECT_EQ(request.sampling.repetition_penalty(), 1.0f);
  EXPECT_EQ(request.sampling.n(), 1);
  EXPECT_EQ(request.sampling.max_tokens(), 0);
  EXPECT_FALSE(request.sampling.has_logprobs());
  EXPECT_FALSE(request.seed.has_value());
  EXPECT_TRUE(request.wants_text);
  EXPECT_FALSE(request.wants_ids);
  EXPECT_TRUE(request.skip_special_tokens);
}

TEST(VllmInferenceRequestTest, ImplementedFieldsOfTheRequestAreParsed) {
  GenerateRequest message = Message();
  message.set_text("hello");
  message.set_temperature(0.5f);
  message.set_priority(-3);
  message.set_session_id("s");
  message.mutable_sampling()->set_num_sequences(2);
  message.mutable_sampling()->set_top_k(1U << 31);
  message.mutable_sampling()->set_top_p(0.5f);
  message.mutable_sampling()->set_min_p(0.25f);
  message.mutable_sampling()->set_seed(-1);
  message.mutable_decoding()->set_presence_penalty(0.5f);
  message.mutable_decoding()->set_frequency_penalty(0.25f);
  message.mutable_decoding()->set_repetition_penalty(1.5f);
  (*message.mutable_decoding()->mutable_logit_bias())[5] = 1.0f;
  message.mutable_decoding()->set_json_object(false);
  message.mutable_stopping()->set_max_new_tokens(9);
  message.mutable_stopping()->set_min_new_tokens(2);
  message.mutable_stopping()->add_stop_token_ids(11);
  message.mutable_stopping()->add_stop_strings("end");
  message.mutable_stopping()->set_include_stop_strings(true);
  message.mutable_stopping()->set_ignore_eos(true);
  message.mutable_response()->set_prompt_token_ids(true);
  message.mutable_response()->set_output_text(false);
  message.mutable_response()->set_output_token_ids(true);
  message.mutable_response()->set_output_logprobs(true);
  message.mutable_response()->mutable_output_candidates()->set_top_n(3);
  message.mutable_response()->set_skip_special_tokens(false);
  message.mutable_kv()->set_cache_salt("pepper");
  const VllmInferenceRequest request = Parse(message);
  EXPECT_EQ(request.text, "hello");
  EXPECT_EQ(request.sampling.temperature(), 0.5f);
  EXPECT_EQ(request.priority, -3);
  EXPECT_EQ(request.session, "s");
  EXPECT_EQ(request.sampling.n(), 2);
  EXPECT_EQ(request.sampling.top_k(), 0)
      << "the largest uint32 means all tokens";
  EXPECT_EQ(request.sampling.top_p(), 0.5f);
  EXPECT_EQ(request.sampling.min_p(), 0.25f);
  EXPECT_EQ(request.seed, ~uint64_t{0});
  EXPECT_EQ(request.sampling.presence_penalty(), 0.5f);
  EXPECT_EQ(request.sampling.frequency_penalty(), 0.25f);
  EXPECT_EQ(request.sampling.repetition_penalty(), 1.5f);
  EXPECT_EQ(request.sampling.logit_bias().at(5), 1.0f);
  EXPECT_EQ(request.sampling.max_tokens(), 9);
  EXPECT_EQ(request.sampling.min_tokens(), 2);
  EXPECT_THAT(request.sampling.stop_token_ids(), ElementsAre(11));
  EXPECT_THAT(request.stop_strings, ElementsAre("end"));
  EXPECT_TRUE(request.include_stop_string);
  EXPECT_TRUE(request.sampling.ignore_eos());
  EXPECT_TRUE(request.wants_prompt_ids);
  EXPECT_FALSE(request.wants_text);
  EXPECT_TRUE(request.wants_ids);
  EXPECT_TRUE(request.wants_logprobs);
  EXPECT_EQ(request.sampling.logprobs(), 3);
  EXPECT_FALSE(request.skip_special_tokens);
  EXPECT_EQ(request.cache_salt, "pepper");
}

TEST(VllmInferenceRequestTest, TheErrorForAFieldThatIsNotImplementedNamesIt) {
  using Change = std::function<void(GenerateRequest*)>;
  const std::vector<std::pair<std::string, Change>> cases = {
      {"truncate_prompt_tokens",
       [](auto* m) { m->set_truncate_prompt_tokens(1); }},
      {"media", [](auto* m) { m->add_media(); }},
      {"lora_name", [](auto* m) { m->set_lora_name("l"); }},
      {"kv.bypass_prefix_cache",
       [](auto* m) { m->mutable_kv()->set_bypass_prefix_cache(true); }},
      {"kv.kv_transfer_params",
       [](auto* m) { m->mutable_kv()->mutable_kv_transfer_params(); }},
      {"kv.ec_transfer_params",
       [](auto* m) { m->mutable_kv()->mutable_ec_transfer_params(); }},
      {"response.prompt_logprobs",
       [](auto* m) { m->mutable_response()->set_prompt_logprobs(true); }},
      {"response.prompt_candidates",
       [](auto* m) { m->mutable_response()->mutable_prompt_candidates(); }},
      {"response.output_candidates.all",
       [](auto* m) {
         m->mutable_response()->mutable_output_candidates()->set_all(true);
       }},
      {"response.output_candidates.token_ids",
       [](auto* m) {
         m->mutable_response()
             ->mutable_output_candidates()
             ->mutable_token_ids()
             ->add_ids(1);
       }},
      {"decoding.allowed_token_ids",
       [](auto* m) { m->mutable_decoding()->add_allowed_token_ids(1); }},
      {"decoding.json", [](auto* m) { m->mutable_decoding()->set_json("{}"); }},
      {"decoding.regex",
       [](auto* m) { m->mutable_decoding()->set_regex("a"); }},
      {"decoding.choice",
       [](auto* m) { m->mutable_decoding()->mutable_choice(); }},
      {"decoding.grammar",
       [](auto* m) { m->mutable_decoding()->set_grammar("a"); }},
      {"decoding.json_object",
       [](auto* m) { m->mutable_decoding()->set_json_object(true); }},
      {"decoding.structural_tag",
       [](auto* m) { m->mutable_decoding()->set_structural_tag("a"); }},
  };
  for (const auto& [name, change] : cases) {
    EXPECT_THAT(Refusal(change),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(name + " is not implemented")));
  }
}

// A field of a later version of the protocol, in any part of the message, may
// ask for something that changes the result.
TEST(VllmInferenceRequestTest,
     TheErrorForAnUnknownFieldHasItsNumberAndTheNameOfItsMessage) {
  const auto unknown = [](google::protobuf::Message* message) {
    message->GetReflection()->MutableUnknownFields(message)->AddVarint(77, 1);
  };
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of GenerateRequest")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_token_ids()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of TokenIds")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_sampling()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of RandomSampling")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_decoding()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of DecodingParameters")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_stopping()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of StoppingCriteria")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_response()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of ResponseOptions")));
  EXPECT_THAT(Refusal([&](auto* m) { unknown(m->mutable_kv()); }),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("field 77 of KVCacheParameters")));
}

TEST(VllmInferenceRequestTest,
     TheErrorForAWrongFieldNamesItTheWantedAndTheGivenValue) {
  const auto is = [](const std::string& text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_THAT(
      Refusal([](auto* m) { m->clear_prompt(); }),
      is("the request has neither 'token_ids' nor 'text': set one of them"));
  EXPECT_THAT(Refusal([](auto* m) { m->mutable_token_ids()->clear_ids(); }),
              is("token_ids.ids: want at least one token, have none"));
  EXPECT_THAT(
      Refusal([](auto* m) { m->mutable_token_ids()->add_ids(1U << 31); }),
      is("token_ids.ids: want token ids below 2^31, have 2147483648"));
  EXPECT_THAT(Refusal([](auto* m) { m->set_temperature(__builtin_nanf("")); }),
              is("temperature: want a finite number, have nan"));
  EXPECT_THAT(Refusal([](auto* m) {
                (*m->mutable_decoding()->mutable_logit_bias())[1U << 31] = 1;
              }),
              is("decoding.logit_bias: want token ids below 2^31"));
  EXPECT_THAT(Refusal([](auto* m) {
                (*m->mutable_decoding()->mutable_logit_bias())[1] =
                    __builtin_inff();
              }),
              is("decoding.logit_bias[1]: want a finite number, have inf"));
  EXPECT_THAT(
      Refusal([](auto* m) { m->mutable_stopping()->add_stop_strings(""); }),
      is("stopping.stop_strings: one of the strings is empty"));
  EXPECT_THAT(Refusal([](auto* m) {
                m->mutable_stopping()->add_stop_token_ids(1U << 31);
              }),
              is("stopping.stop_token_ids: want token ids below 2^31"));
  EXPECT_THAT(Refusal([](auto* m) {
                m->mutable_kv()->set_cache_salt(std::string(257, 's'));
              }),
              is("kv.cache_salt: want at most 256 bytes, have 257"));
  EXPECT_THAT(
      Refusal([](auto* m) { m->set_session_id(std::string(257, 's')); }),
      is("session_id: want at most 256 bytes, have 257"));
  EXPECT_THAT(
      Refusal([](auto* m) { m->mutable_sampling()->set_num_sequences(2); },
              /*streaming=*/false),
      is("sampling.num_sequences: want 1 in a call of Generate"));
  EXPECT_THAT(
      Refusal([](auto* m) {
        m->mutable_response()->mutable_output_candidates()->set_top_n(2);
      }),
      is("response.output_candidates: requires response.output_logprobs"));
}

}  // namespace
}  // namespace kvasir::router
