#include "router/facades/vllm_engine/request.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/sampling.h"
#include "router/facades/calls/fields.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using vllm::grpc::engine::GenerateRequest;

GenerateRequest Tokens(const std::vector<uint32_t>& ids = {5, 6}) {
  GenerateRequest message;
  message.set_request_id("r1");
  for (const uint32_t id : ids) message.mutable_tokenized()->add_input_ids(id);
  return message;
}

VllmEngineRequest Parsed(const GenerateRequest& message) {
  auto request = ParseVllmEngineRequest(message);
  EXPECT_TRUE(request.ok()) << request.status();
  return request.ok() ? *std::move(request) : VllmEngineRequest();
}

TEST(VllmEngineRequestTest, AZeroFieldMeansThatTheFieldIsNotSet) {
  GenerateRequest message = Tokens();
  message.mutable_sampling_params();
  const VllmEngineRequest request = Parsed(message);
  EXPECT_THAT(request.token_ids.ToIds(), ElementsAre(5, 6));
  EXPECT_EQ(request.sampling.SerializeAsString(),
            proto::NeutralSampling().SerializeAsString());
  EXPECT_FALSE(request.seed.has_value());
  EXPECT_FALSE(request.streaming);
  EXPECT_EQ(request.sampling.max_tokens(), 0);
}

TEST(VllmEngineRequestTest, AnUnsetTemperatureMeansOneAndNotZero) {
  GenerateRequest message = Tokens();
  EXPECT_EQ(Parsed(message).sampling.temperature(), 1.0f);
  message.mutable_sampling_params()->set_temperature(0.0f);
  EXPECT_EQ(Parsed(message).sampling.temperature(), 0.0f);
}

TEST(VllmEngineRequestTest, EveryImplementedFieldOfTheRequestReachesTheEngine) {
  GenerateRequest message = Tokens();
  message.set_stream(true);
  auto* sampling = message.mutable_sampling_params();
  sampling->set_temperature(0.5f);
  sampling->set_top_p(0.9f);
  sampling->set_top_k(7);
  sampling->set_min_p(0.1f);
  sampling->set_frequency_penalty(0.2f);
  sampling->set_presence_penalty(-0.3f);
  sampling->set_repetition_penalty(1.2f);
  sampling->set_max_tokens(9);
  sampling->set_min_tokens(2);
  sampling->add_stop("\n");
  sampling->add_stop_token_ids(3);
  sampling->set_skip_special_tokens(true);
  sampling->set_ignore_eos(true);
  sampling->set_n(3);
  sampling->set_logprobs(4);
  sampling->set_prompt_logprobs(0);
  sampling->set_seed(-1);
  (*sampling->mutable_logit_bias())[8] = -2.0f;
  const VllmEngineRequest request = Parsed(message);
  EXPECT_TRUE(request.streaming);
  EXPECT_TRUE(request.skip_special_tokens);
  EXPECT_THAT(request.stop_strings, ElementsAre("\n"));
  EXPECT_EQ(request.seed, std::numeric_limits<uint64_t>::max());
  const kvasir::v1::SamplingParams& have = request.sampling;
  EXPECT_EQ(have.temperature(), 0.5f);
  EXPECT_EQ(have.top_p(), 0.9f);
  EXPECT_EQ(have.top_k(), 7);
  EXPECT_EQ(have.min_p(), 0.1f);
  EXPECT_EQ(have.frequency_penalty(), 0.2f);
  EXPECT_EQ(have.presence_penalty(), -0.3f);
  EXPECT_EQ(have.repetition_penalty(), 1.2f);
  EXPECT_EQ(have.max_tokens(), 9);
  EXPECT_EQ(have.min_tokens(), 2);
  EXPECT_THAT(have.stop_token_ids(), ElementsAre(3));
  EXPECT_TRUE(have.ignore_eos());
  EXPECT_EQ(have.n(), 3);
  EXPECT_EQ(have.logprobs(), 4);
  EXPECT_TRUE(have.has_prompt_logprobs());
  EXPECT_THAT(have.logit_bias(), UnorderedElementsAre(Pair(8, -2.0f)));
}

TEST(VllmEngineRequestTest, TopKWithAllBitsSetMeansAllTokens) {
  GenerateRequest message = Tokens();
  message.mutable_sampling_params()->set_top_k(0xFFFFFFFF);
  EXPECT_EQ(Parsed(message).sampling.top_k(), 0);
}

TEST(VllmEngineRequestTest, ThePromptMayBeTextInsteadOfTokenIds) {
  GenerateRequest message;
  message.set_text("hi");
  EXPECT_EQ(Parsed(message).text, "hi");
}

// A field that this build does not know may ask for something that changes the
// result, so it must not be ignored.
TEST(VllmEngineRequestTest,
     TheErrorForAnUnknownFieldOfALaterVersionHasItsNumber) {
  GenerateRequest message = Tokens();
  message.GetReflection()->MutableUnknownFields(&message)->AddVarint(77, 1);
  EXPECT_THAT(ParseVllmEngineRequest(message),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("field 77 of GenerateRequest")));
  GenerateRequest inner = Tokens();
  auto* sampling = inner.mutable_sampling_params();
  sampling->GetReflection()->MutableUnknownFields(sampling)->AddVarint(78, 1);
  EXPECT_THAT(ParseVllmEngineRequest(inner),
              base::StatusIs(absl::StatusCode::kUnimplemented,
                             HasSubstr("field 78 of SamplingParams")));
}

struct Refused {
  const char* name;
  std::function<void(GenerateRequest*)> change;
  absl::StatusCode code;
  const char* text;
};

TEST(VllmEngineRequestTest, TheErrorForARefusedFieldNamesTheField) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const Refused cases[] = {
      {"kv", [](auto* m) { m->mutable_kv_transfer_params(); }, kUnimplemented,
       "kv_transfer_params"},
      {"kv json", [](auto* m) { m->set_kv_transfer_params_json("{}"); },
       kUnimplemented, "kv_transfer_params_json"},
      {"mm", [](auto* m) { m->mutable_mm_inputs(); }, kUnimplemented,
       "mm_inputs"},
      {"extra mm", [](auto* m) { m->add_extra_mm_inputs(); }, kUnimplemented,
       "extra_mm_inputs"},
      {"media", [](auto* m) { m->mutable_media_refs(); }, kUnimplemented,
       "media_refs"},
      {"rank", [](auto* m) { m->set_data_parallel_rank(1); }, kInvalid,
       "data_parallel_rank: want 0"},
      {"json schema",
       [](auto* m) { m->mutable_sampling_params()->set_json_schema("{}"); },
       kUnimplemented, "json_schema"},
      {"regex", [](auto* m) { m->mutable_sampling_params()->set_regex("a"); },
       kUnimplemented, "regex"},
      {"grammar",
       [](auto* m) { m->mutable_sampling_params()->set_grammar("a"); },
       kUnimplemented, "grammar"},
      {"structural tag",
       [](auto* m) { m->mutable_sampling_params()->set_structural_tag("a"); },
       kUnimplemented, "structural_tag"},
      {"json object",
       [](auto* m) { m->mutable_sampling_params()->set_json_object(true); },
       kUnimplemented, "json_object"},
      {"choice",
       [](auto* m) { m->mutable_sampling_params()->mutable_choice(); },
       kUnimplemented, "choice"},
      {"truncate",
       [](auto* m) {
         m->mutable_sampling_params()->set_truncate_prompt_tokens(5);
       },
       kUnimplemented, "truncate_prompt_tokens"},
      {"all logprobs",
       [](auto* m) { m->mutable_sampling_params()->set_logprobs(-1); },
       kUnimplemented, "logprobs -1"},
      {"negative logprobs",
       [](auto* m) { m->mutable_sampling_params()->set_logprobs(-2); },
       kInvalid, "logprobs: want at least 0, have -2"},
      {"prompt logprobs",
       [](auto* m) { m->mutable_sampling_params()->set_prompt_logprobs(1); },
       kUnimplemented, "prompt_logprobs above 0 (have 1)"},
      {"no tokens wanted",
       [](auto* m) { m->mutable_sampling_params()->set_max_tokens(0); },
       kInvalid, "max_tokens: want at least 1"},
      {"nan",
       [](auto* m) {
         m->mutable_sampling_params()->set_temperature(
             std::numeric_limits<float>::quiet_NaN());
       },
       kInvalid, "temperature: want a finite number"},
      {"infinite bias",
       [](auto* m) {
         (*m->mutable_sampling_params()->mutable_logit_bias())[4] =
             std::numeric_limits<float>::infinity();
       },
       kInvalid, "logit_bias[4]"},
      {"stop id",
       [](auto* m) {
         m->mutable_sampling_params()->add_stop_token_ids(1U << 31);
       },
       kInvalid, "stop_token_ids: want token ids below 2^31"},
      {"empty stop",
       [](auto* m) { m->mutable_sampling_params()->add_stop(""); }, kInvalid,
       "sampling_params.stop"},
      {"long stop",
       [](auto* m) {
         m->mutable_sampling_params()->add_stop(std::string(2000, 'x'));
       },
       kInvalid, "at most 1024 bytes, have one of 2000"},
      {"prompt id",
       [](auto* m) { m->mutable_tokenized()->add_input_ids(1U << 31); },
       kInvalid, "input_ids: want token ids below 2^31, have 2147483648"},
      {"no ids", [](auto* m) { m->mutable_tokenized()->clear_input_ids(); },
       kInvalid, "at least one token"},
      {"no prompt", [](auto* m) { m->clear_input(); }, kInvalid,
       "neither 'tokenized' nor 'text'"},
  };
  for (const Refused& refused : cases) {
    GenerateRequest message = Tokens();
    refused.change(&message);
    EXPECT_THAT(ParseVllmEngineRequest(message),
                base::StatusIs(refused.code, HasSubstr(refused.text)))
        << refused.name;
  }
}

TEST(VllmEngineRequestTest,
     UnsupportedFieldsAreAcceptedWithValuesThatHaveNoEffect) {
  GenerateRequest message = Tokens();
  message.set_data_parallel_rank(0);
  message.set_kv_transfer_params_json("");
  message.mutable_sampling_params()->set_json_object(false);
  message.mutable_sampling_params()->set_grammar_from_first_token(true);
  EXPECT_TRUE(ParseVllmEngineRequest(message).ok());
}

TEST(VllmEngineRequestTest, TheLengthOfARequestIdIsLimited) {
  EXPECT_TRUE(CheckVllmRequestId(std::string(256, 'x')).ok());
  EXPECT_THAT(CheckVllmRequestId(std::string(257, 'x')),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("at most 256 bytes, have 257")));
}

}  // namespace
}  // namespace kvasir::router
