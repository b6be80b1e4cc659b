#include "worker/service/convert.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "proto/refusal.h"

namespace kvasir::worker {
namespace {

static_assert(static_cast<int>(FinishReason::kStop) == kvasir::v1::FINISH_STOP);
static_assert(static_cast<int>(FinishReason::kLength) ==
              kvasir::v1::FINISH_LENGTH);
static_assert(static_cast<int>(FinishReason::kAbort) ==
              kvasir::v1::FINISH_ABORT);
static_assert(static_cast<int>(RefusalReason::kRetryElsewhere) ==
              kvasir::v1::Refusal::RETRY_ELSEWHERE);
static_assert(static_cast<int>(RefusalReason::kNeverFits) ==
              kvasir::v1::Refusal::NEVER_FITS);
static_assert(static_cast<int>(RefusalReason::kDraining) ==
              kvasir::v1::Refusal::DRAINING);

// Shared from here on: the message dies with its call.
absl::StatusOr<proto::TokenBytes> ToTokens(absl::string_view field,
                                           const std::string& bytes) {
  absl::StatusOr<proto::TokenBytes> tokens =
      proto::TokenBytes::FromBytes(bytes);
  if (tokens.ok()) return tokens;
  return absl::Status(tokens.status().code(),
                      absl::StrCat(field, ": ", tokens.status().message()));
}

uint64_t Microseconds(absl::Duration duration) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, absl::ToInt64Microseconds(duration)));
}

}  // namespace

absl::StatusOr<Request> ToRequest(const kvasir::v1::GenerateRequest& from,
                                  absl::Time deadline) {
  Request to;
  to.request_id = from.request_id();
  to.attempt = from.attempt();
  to.tenant = from.tenant();
  to.cache_salt = from.cache_salt();
  KVASIR_ASSIGN_OR_RETURN(
      to.prompt, ToTokens("prompt_token_ids", from.prompt_token_ids()));
  KVASIR_ASSIGN_OR_RETURN(
      to.emitted, ToTokens("emitted_token_ids", from.emitted_token_ids()));
  to.sampling = from.sampling();
  if (from.has_eviction_budget()) {
    to.eviction_budget = {.tokens = from.eviction_budget().slots(),
                          .ratio = from.eviction_budget().share()};
  }
  to.priority = from.priority();
  to.deadline = deadline;
  to.queue_timeout = absl::Milliseconds(from.queue_timeout_ms());
  return to;
}

void AppendTokens(const TokenChunk& from,
                  kvasir::v1::GenerateEvent::Tokens* to) {
  to->set_index(from.index);
  to->mutable_token_ids()->Add(from.token_ids.begin(), from.token_ids.end());
  for (const TokenLogprob& logprob : from.logprobs) {
    kvasir::v1::TokenLogprob* out = to->add_logprobs();
    out->set_logprob(logprob.logprob);
    for (const TopToken& top : logprob.top) {
      kvasir::v1::TokenLogprob::Top* entry = out->add_top();
      entry->set_token_id(top.token_id);
      entry->set_logprob(top.logprob);
    }
  }
  for (const float logprob : from.prompt_logprobs) {
    to->add_prompt_logprobs()->set_logprob(logprob);
  }
}

kvasir::v1::GenerateEvent::Finish ToFinish(const FinishInfo& from) {
  kvasir::v1::GenerateEvent::Finish to;
  to.set_index(from.index);
  to.set_reason(static_cast<kvasir::v1::FinishReason>(from.reason));
  if (from.matched_token_id.has_value()) {
    to.set_matched_token_id(*from.matched_token_id);
  }
  to.set_prompt_tokens(from.prompt_tokens);
  to.set_output_tokens(from.output_tokens);
  to.set_cached_tokens(from.cached_tokens);
  to.set_queue_us(Microseconds(from.queue));
  to.set_prefill_us(Microseconds(from.prefill));
  to.set_decode_us(Microseconds(from.decode));
  to.set_preemptions(from.preemptions);
  return to;
}

kvasir::v1::LoadReport ToLoadReport(const LoadSnapshot& from) {
  kvasir::v1::LoadReport to;
  to.set_step(from.step);
  to.set_running(from.running);
  to.set_waiting(from.waiting);
  to.set_free_pages(from.free_pages);
  to.set_total_pages(from.total_pages);
  to.set_draining(from.draining);
  to.set_queued_tokens(from.queued_tokens);
  return to;
}

absl::Status ToStatus(const Refusal& refusal) {
  absl::Status status = refusal.status;
  if (!status.ok() && refusal.reason != RefusalReason::kNone) {
    kvasir::v1::Refusal payload;
    payload.set_reason(
        static_cast<kvasir::v1::Refusal::Reason>(refusal.reason));
    payload.set_detail(std::string(refusal.status.message()));
    proto::SetRefusal(payload, &status);
  }
  return status;
}

}  // namespace kvasir::worker
