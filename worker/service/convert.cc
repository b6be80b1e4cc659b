#include "worker/service/convert.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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

constexpr size_t kBytesPerTokenId = 4;

absl::StatusOr<std::vector<int32_t>> DecodeIds(absl::string_view field,
                                               const std::string& bytes) {
  if (bytes.size() % kBytesPerTokenId != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", bytes.size(), " bytes, want a multiple of ",
                     kBytesPerTokenId));
  }
  std::vector<int32_t> ids(bytes.size() / kBytesPerTokenId);
  const auto* from = reinterpret_cast<const unsigned char*>(bytes.data());
  for (int32_t& id : ids) {
    const uint32_t value = static_cast<uint32_t>(from[0]) |
                           static_cast<uint32_t>(from[1]) << 8 |
                           static_cast<uint32_t>(from[2]) << 16 |
                           static_cast<uint32_t>(from[3]) << 24;
    id = static_cast<int32_t>(value);
    from += kBytesPerTokenId;
  }
  return ids;
}

// What is asked for beyond any limit stays beyond any limit.
int32_t Count(uint32_t value) {
  return static_cast<int32_t>(
      std::min<uint32_t>(value, std::numeric_limits<int32_t>::max()));
}

SamplingParams ToSampling(const kvasir::v1::SamplingParams& from) {
  SamplingParams to;
  to.temperature = from.temperature();
  to.top_p = from.top_p();
  to.top_k = from.top_k();
  to.min_p = from.min_p();
  to.repetition_penalty = from.repetition_penalty();
  to.presence_penalty = from.presence_penalty();
  to.frequency_penalty = from.frequency_penalty();
  to.logit_bias.assign(from.logit_bias().begin(), from.logit_bias().end());
  // The wire's map has no order; what is computed from it must have one.
  std::sort(to.logit_bias.begin(), to.logit_bias.end());
  to.seed = from.seed();
  to.n = from.n();
  to.max_tokens = from.max_tokens();
  to.min_tokens = from.min_tokens();
  to.stop_token_ids.assign(from.stop_token_ids().begin(),
                           from.stop_token_ids().end());
  to.ignore_eos = from.ignore_eos();
  to.num_logprobs = from.has_logprobs() ? Count(from.logprobs()) : -1;
  to.num_prompt_logprobs =
      from.has_prompt_logprobs() ? Count(from.prompt_logprobs()) : -1;
  to.token_mask = from.token_mask();
  return to;
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
      to.prompt_ids, DecodeIds("prompt_token_ids", from.prompt_token_ids()));
  KVASIR_ASSIGN_OR_RETURN(
      to.emitted_ids, DecodeIds("emitted_token_ids", from.emitted_token_ids()));
  to.sampling = ToSampling(from.sampling());
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
