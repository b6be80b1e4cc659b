#include "worker/service/convert.h"

#include <google/protobuf/util/message_differencer.h>

#include <limits>

#include "base/status_matchers.h"
#include "proto/refusal.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(ConvertTest, EveryFieldOfAGenerateRequestIsConverted) {
  kvasir::v1::GenerateRequest from;
  from.set_request_id("r");
  from.set_attempt(2);
  from.set_tenant("t");
  from.set_cache_salt("salt");
  from.set_prompt_token_ids(std::string("\4\3\2\1\7\0\0\0", 8));
  from.set_emitted_token_ids(std::string("\1\0\0\0", 4));
  from.set_priority(-3);
  from.set_queue_timeout_ms(1500);
  from.mutable_eviction_budget()->set_share(0.25);
  kvasir::v1::SamplingParams* params = from.mutable_sampling();
  params->set_temperature(0.5f);
  params->set_top_p(0.9f);
  params->set_top_k(40);
  params->set_min_p(0.1f);
  params->set_repetition_penalty(1.1f);
  params->set_presence_penalty(0.2f);
  params->set_frequency_penalty(0.3f);
  (*params->mutable_logit_bias())[9] = 1.0f;
  (*params->mutable_logit_bias())[2] = -1.0f;
  params->set_seed(77);
  params->set_n(3);
  params->set_max_tokens(16);
  params->set_min_tokens(4);
  params->add_stop_token_ids(5);
  params->set_ignore_eos(true);
  params->set_logprobs(0);
  params->set_token_mask("json");
  const absl::Time deadline = absl::FromUnixSeconds(1000);

  KVASIR_ASSERT_OK_AND_ASSIGN(const Request to, ToRequest(from, deadline));
  EXPECT_EQ(to.request_id, "r");
  EXPECT_EQ(to.attempt, 2u);
  EXPECT_EQ(to.tenant, "t");
  EXPECT_EQ(to.cache_salt, "salt");
  EXPECT_THAT(to.prompt.ToIds(), ElementsAre(0x01020304, 7));
  EXPECT_THAT(to.emitted.ToIds(), ElementsAre(1));
  EXPECT_EQ(to.priority, -3);
  EXPECT_EQ(to.queue_timeout, absl::Milliseconds(1500));
  EXPECT_EQ(to.eviction_budget, (proto::EvictionBudget{.ratio = 0.25}));
  EXPECT_EQ(to.deadline, deadline);
  EXPECT_TRUE(
      google::protobuf::util::MessageDifferencer::Equals(to.sampling, *params))
      << to.sampling.DebugString();
}

TEST(ConvertTest, EveryFieldOfALoadIsConverted) {
  const kvasir::v1::LoadReport report = ToLoadReport({.step = 1,
                                                      .running = 2,
                                                      .waiting = 3,
                                                      .free_pages = 4,
                                                      .total_pages = 5,
                                                      .draining = true,
                                                      .queued_tokens = 7,
                                                      .step_limit_ms = 8});
  EXPECT_EQ(report.step(), 1u);
  EXPECT_EQ(report.running(), 2u);
  EXPECT_EQ(report.waiting(), 3u);
  EXPECT_EQ(report.free_pages(), 4u);
  EXPECT_EQ(report.total_pages(), 5u);
  EXPECT_TRUE(report.draining());
  EXPECT_EQ(report.queued_tokens(), 7u);
  EXPECT_EQ(report.step_limit_ms(), 8u);
}

TEST(ConvertTest, AnEvictionBudgetIsConvertedIfTheRequestHasOne) {
  kvasir::v1::GenerateRequest from;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Request none,
                              ToRequest(from, absl::InfiniteFuture()));
  EXPECT_FALSE(none.eviction_budget.has_value());
  from.mutable_eviction_budget()->set_slots(256);
  KVASIR_ASSERT_OK_AND_ASSIGN(const Request slots,
                              ToRequest(from, absl::InfiniteFuture()));
  EXPECT_EQ(slots.eviction_budget, (proto::EvictionBudget{.tokens = 256}));
}

TEST(ConvertTest, TheErrorForBytesThatEndInsideATokenIdNamesTheField) {
  kvasir::v1::GenerateRequest from;
  from.set_prompt_token_ids("123456");
  EXPECT_THAT(
      ToRequest(from, absl::InfiniteFuture()),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("prompt_token_ids: the list of token ids has 6 bytes")));
  from.set_prompt_token_ids("1234");
  from.set_emitted_token_ids("1");
  EXPECT_THAT(
      ToRequest(from, absl::InfiniteFuture()),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("emitted_token_ids: the list of token ids has 1 bytes")));
}

TEST(ConvertTest, OnlyAStatusWithARefusalReasonCarriesARefusalMessage) {
  const absl::Status full = ToStatus({absl::ResourceExhaustedError("64 wait"),
                                      kvasir::v1::Refusal::RETRY_ELSEWHERE});
  EXPECT_EQ(proto::RefusalOf(full)->reason(),
            kvasir::v1::Refusal::RETRY_ELSEWHERE);
  EXPECT_EQ(proto::RefusalOf(full)->detail(), "64 wait");
  EXPECT_FALSE(
      proto::RefusalOf(ToStatus({absl::InternalError("x"),
                                 kvasir::v1::Refusal::REFUSAL_UNSPECIFIED}))
          .has_value());
}

}  // namespace
}  // namespace kvasir::worker
