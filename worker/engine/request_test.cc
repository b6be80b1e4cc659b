#include "worker/engine/request.h"

#include <cmath>
#include <limits>

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

RequestLimits Limits() {
  RequestLimits limits;
  limits.vocab_size = 100;
  limits.max_model_len = 32;
  limits.max_n = 4;
  limits.max_logprobs = 5;
  limits.max_logit_bias = 2;
  limits.max_stop_token_ids = 2;
  return limits;
}

Request Good() {
  Request request;
  request.request_id = "r";
  request.prompt = proto::TokenBytes::FromIds({1, 2, 3});
  request.sampling.set_max_tokens(16);
  return request;
}

TEST(ValidateRequestTest, ARequestWithDefaultSamplingParametersIsValid) {
  KVASIR_EXPECT_OK(ValidateRequest(Good(), Limits()));
}

TEST(ValidateRequestTest, ValuesAtTheirBoundsAreValid) {
  Request r = Good();
  r.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(31, 99));
  r.sampling.set_temperature(0.0f);
  r.sampling.set_top_p(1.0f);
  r.sampling.set_min_p(1.0f);
  r.sampling.set_repetition_penalty(0.01f);
  r.sampling.set_presence_penalty(-2.0f);
  r.sampling.set_frequency_penalty(2.0f);
  r.sampling.set_n(4);
  r.sampling.set_logprobs(5);
  r.sampling.set_prompt_logprobs(0);
  r.sampling.set_min_tokens(r.sampling.max_tokens());
  (*r.sampling.mutable_logit_bias())[0] = -100.0f;
  (*r.sampling.mutable_logit_bias())[99] = 100.0f;
  r.sampling.add_stop_token_ids(0);
  r.sampling.add_stop_token_ids(99);
  KVASIR_EXPECT_OK(ValidateRequest(r, Limits()));
}

struct BadCase {
  const char* name;
  void (*break_it)(Request*);
  const char* message;
};

class BadRequestTest : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadRequestTest, TheErrorStatesTheFieldItsValueAndTheLimit) {
  Request r = Good();
  GetParam().break_it(&r);
  EXPECT_THAT(ValidateRequest(r, Limits()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(GetParam().message)));
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Fields, BadRequestTest,
    ::testing::Values(
        BadCase{"NoId", [](Request* r) { r->request_id.clear(); },
                "length of request_id is 0, want 1 to 256 bytes"},
        BadCase{"LongId", [](Request* r) { r->request_id.assign(257, 'x'); },
                "length of request_id is 257"},
        BadCase{"NegativeQueueTimeout",
                [](Request* r) { r->queue_timeout = -absl::Seconds(1); },
                "queue_timeout is -1s"},
        BadCase{"NegativeTemperature",
                [](Request* r) { r->sampling.set_temperature(-0.5f); },
                "temperature is -0.5, want a finite number >= 0"},
        BadCase{"NanTemperature",
                [](Request* r) { r->sampling.set_temperature(kNan); },
                "temperature is nan"},
        BadCase{"InfTemperature",
                [](Request* r) { r->sampling.set_temperature(kInf); },
                "temperature is inf"},
        BadCase{"ZeroTopP", [](Request* r) { r->sampling.set_top_p(0.0f); },
                "top_p is 0, want 0 < top_p <= 1"},
        BadCase{"LargeTopP", [](Request* r) { r->sampling.set_top_p(1.5f); },
                "top_p is 1.5"},
        BadCase{"NegativeTopK", [](Request* r) { r->sampling.set_top_k(-1); },
                "top_k is -1, want 0 (off) or more"},
        BadCase{"LargeMinP", [](Request* r) { r->sampling.set_min_p(1.25f); },
                "min_p is 1.25, want 0 <= min_p <= 1"},
        BadCase{"NanMinP", [](Request* r) { r->sampling.set_min_p(kNan); },
                "min_p is nan"},
        BadCase{"ZeroRepetition",
                [](Request* r) { r->sampling.set_repetition_penalty(0.0f); },
                "repetition_penalty is 0, want 0.01 to 100"},
        BadCase{"RepetitionThatOverflowsALogit",
                [](Request* r) { r->sampling.set_repetition_penalty(1e-38f); },
                "repetition_penalty is 1e-38, want 0.01 to 100"},
        BadCase{"LargeRepetition",
                [](Request* r) { r->sampling.set_repetition_penalty(101.0f); },
                "repetition_penalty is 101"},
        BadCase{"NanRepetition",
                [](Request* r) { r->sampling.set_repetition_penalty(kNan); },
                "repetition_penalty is nan"},
        BadCase{"PresenceRange",
                [](Request* r) { r->sampling.set_presence_penalty(2.5f); },
                "presence_penalty is 2.5, want -2 to 2"},
        BadCase{"FrequencyRange",
                [](Request* r) { r->sampling.set_frequency_penalty(-2.5f); },
                "frequency_penalty is -2.5, want -2 to 2"},
        BadCase{
            "BiasOutsideVocabulary",
            [](Request* r) { (*r->sampling.mutable_logit_bias())[100] = 1.0f; },
            "logit_bias token id is 100, want 0 <= id < vocabulary size "
            "100"},
        BadCase{
            "BiasNotFinite",
            [](Request* r) { (*r->sampling.mutable_logit_bias())[7] = kInf; },
            "logit_bias[7] is inf, want a finite number"},
        BadCase{"TooManyBiases",
                [](Request* r) {
                  for (int id : {1, 2, 3}) {
                    (*r->sampling.mutable_logit_bias())[id] = 0.f;
                  }
                },
                "number of logit_bias is 3, want at most 2"},
        BadCase{"ZeroN", [](Request* r) { r->sampling.set_n(0); },
                "n is 0, want 1 to 4"},
        BadCase{"LargeN", [](Request* r) { r->sampling.set_n(5); },
                "n is 5, want 1 to 4"},
        BadCase{"ZeroMaxTokens",
                [](Request* r) { r->sampling.set_max_tokens(0); },
                "max_tokens is 0, want at least 1"},
        BadCase{"MinAboveMax",
                [](Request* r) {
                  r->sampling.set_max_tokens(3);
                  r->sampling.set_min_tokens(4);
                },
                "min_tokens is 4, want at most max_tokens 3"},
        BadCase{"Logprobs", [](Request* r) { r->sampling.set_logprobs(6); },
                "logprobs is 6, want at most 5"},
        BadCase{"PromptLogprobs",
                [](Request* r) { r->sampling.set_prompt_logprobs(1); },
                "prompt_logprobs is 1, want at most 0"},
        BadCase{"StopIdOutsideVocabulary",
                [](Request* r) {
                  for (int id : {5, -1}) r->sampling.add_stop_token_ids(id);
                },
                "stop_token_ids[1] is -1"},
        BadCase{"TooManyStopIds",
                [](Request* r) {
                  for (int id : {5, 6, 7}) r->sampling.add_stop_token_ids(id);
                },
                "number of stop_token_ids is 3, want at most 2"},
        BadCase{"EmptyPrompt", [](Request* r) { r->prompt = {}; },
                "prompt is empty"},
        BadCase{"PromptIdOutsideVocabulary",
                [](Request* r) {
                  r->prompt = proto::TokenBytes::FromIds({1, 2, 100});
                },
                "prompt[2] is 100, want 0 <= id < vocabulary size 100"},
        BadCase{"EmittedIdOutsideVocabulary",
                [](Request* r) {
                  r->emitted = proto::TokenBytes::FromIds({4, -3});
                },
                "emitted[1] is -3"},
        BadCase{"TooManyEmitted",
                [](Request* r) {
                  r->emitted =
                      proto::TokenBytes::Adopt(std::vector<int32_t>(17, 1));
                },
                "emitted has 17 tokens, want at most max_tokens 16"},
        BadCase{"EmittedBeyondModel",
                [](Request* r) {
                  r->sampling.set_max_tokens(100);
                  r->emitted =
                      proto::TokenBytes::Adopt(std::vector<int32_t>(30, 1));
                },
                "prompt has 3 tokens and emitted has 30, want a sum of at most "
                "max_model_len 32"},
        BadCase{"EmittedWithSamples",
                [](Request* r) {
                  r->sampling.set_n(2);
                  r->emitted = proto::TokenBytes::FromIds({1});
                },
                "n is 2, want 1 if the request has emitted tokens"}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(ValidateRequestTest, AnEvictionBudgetIsCheckedAgainstThePromptsLength) {
  Request r = Good();
  r.eviction_budget = {.tokens = 2};
  EXPECT_THAT(ValidateRequest(r, Limits()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("eviction_budget is 2, but the served plan "
                                 "evicts nothing")));
  RequestLimits limits = Limits();
  limits.eviction.groups = {
      {.pages = {.page_tokens = 4,
                 .eviction = {.budget_ratio = 0.5, .every_tokens = 1}},
       .least_slots = 1,
       .num_pages = 8}};
  KVASIR_EXPECT_OK(ValidateRequest(r, limits));
  r.prompt = proto::TokenBytes::Adopt(std::vector<int32_t>(20, 1));
  EXPECT_THAT(
      ValidateRequest(r, limits),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("keeps 2 slots at 20 prompt tokens, want at least "
                         "10")));
  r.eviction_budget.reset();
  KVASIR_EXPECT_OK(ValidateRequest(r, limits));
}

TEST(ValidateRequestTest, ATokenMaskIsRefusedWithoutATokenMaskProvider) {
  Request r = Good();
  r.sampling.set_token_mask("json");
  EXPECT_THAT(ValidateRequest(r, Limits()),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("json")));
  RequestLimits limits = Limits();
  limits.token_masks = true;
  KVASIR_EXPECT_OK(ValidateRequest(r, limits));
}

}  // namespace
}  // namespace kvasir::worker
