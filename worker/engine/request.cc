#include "worker/engine/request.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace kvasir::worker {
namespace {

absl::Status Wrong(absl::string_view field, const auto& value,
                   absl::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", want ", want));
}

absl::Status CheckTokenIds(absl::string_view field, size_t count,
                           const auto& ids, int32_t vocab_size) {
  for (size_t i = 0; i < count; ++i) {
    if (const int32_t id = ids[i]; id < 0 || id >= vocab_size) {
      return Wrong(absl::StrCat(field, "[", i, "]"), id,
                   absl::StrCat("0 <= id < vocabulary size ", vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCount(absl::string_view field, size_t count, size_t limit) {
  if (count <= limit) return absl::OkStatus();
  return Wrong(absl::StrCat("number of ", field), count,
               absl::StrCat("at most ", limit));
}

// The comparisons are written so that NaN is refused.
absl::Status CheckDistribution(const kvasir::v1::SamplingParams& p) {
  if (!(p.temperature() >= 0.0f && std::isfinite(p.temperature()))) {
    return Wrong("temperature", p.temperature(), "a finite number >= 0");
  }
  if (!(p.top_p() > 0.0f && p.top_p() <= 1.0f)) {
    return Wrong("top_p", p.top_p(), "0 < top_p <= 1");
  }
  if (p.top_k() < 0) return Wrong("top_k", p.top_k(), "0 (off) or more");
  if (!(p.min_p() >= 0.0f && p.min_p() <= 1.0f)) {
    return Wrong("min_p", p.min_p(), "0 <= min_p <= 1");
  }
  if (!(p.repetition_penalty() >= kMinRepetitionPenalty &&
        p.repetition_penalty() <= kMaxRepetitionPenalty)) {
    return Wrong(
        "repetition_penalty", p.repetition_penalty(),
        absl::StrCat(kMinRepetitionPenalty, " to ", kMaxRepetitionPenalty));
  }
  if (!(p.presence_penalty() >= -2.0f && p.presence_penalty() <= 2.0f)) {
    return Wrong("presence_penalty", p.presence_penalty(), "-2 to 2");
  }
  if (!(p.frequency_penalty() >= -2.0f && p.frequency_penalty() <= 2.0f)) {
    return Wrong("frequency_penalty", p.frequency_penalty(), "-2 to 2");
  }
  return absl::OkStatus();
}

absl::Status CheckLogitBias(const kvasir::v1::SamplingParams& p,
                            const RequestLimits& limits) {
  KVASIR_RETURN_IF_ERROR(CheckCount("logit_bias",
                                    static_cast<size_t>(p.logit_bias_size()),
                                    limits.max_logit_bias));
  for (const auto& [id, bias] : p.logit_bias()) {
    if (id < 0 || id >= limits.vocab_size) {
      return Wrong(
          "logit_bias token id", id,
          absl::StrCat("0 <= id < vocabulary size ", limits.vocab_size));
    }
    if (!std::isfinite(bias)) {
      return Wrong(absl::StrCat("logit_bias[", id, "]"), bias,
                   "a finite number");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCounts(const kvasir::v1::SamplingParams& p,
                         const RequestLimits& limits) {
  if (p.n() < 1 || p.n() > limits.max_n) {
    return Wrong("n", p.n(), absl::StrCat("1 to ", limits.max_n));
  }
  if (p.max_tokens() < 1)
    return Wrong("max_tokens", p.max_tokens(), "at least 1");
  if (p.min_tokens() > p.max_tokens()) {
    return Wrong("min_tokens", p.min_tokens(),
                 absl::StrCat("at most max_tokens ", p.max_tokens()));
  }
  if (p.logprobs() > limits.max_logprobs) {
    return Wrong("logprobs", p.logprobs(),
                 absl::StrCat("at most ", limits.max_logprobs));
  }
  if (p.prompt_logprobs() > limits.max_prompt_logprobs) {
    return Wrong("prompt_logprobs", p.prompt_logprobs(),
                 absl::StrCat("at most ", limits.max_prompt_logprobs));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckCount("stop_token_ids", static_cast<size_t>(p.stop_token_ids_size()),
                 limits.max_stop_token_ids));
  return CheckTokenIds("stop_token_ids",
                       static_cast<size_t>(p.stop_token_ids_size()),
                       p.stop_token_ids().data(), limits.vocab_size);
}

absl::Status CheckTokens(const Request& request, const RequestLimits& limits) {
  const size_t prompt = request.prompt.size_tokens();
  const size_t emitted = request.emitted.size_tokens();
  if (prompt == 0) {
    return absl::InvalidArgumentError("prompt is empty, want at least 1 token");
  }
  if (prompt + emitted > limits.max_model_len) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prompt has ", prompt, " tokens and emitted has ", emitted,
        ", want a sum of at most max_model_len ", limits.max_model_len));
  }
  if (emitted > request.sampling.max_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "emitted has ", emitted, " tokens, want at most max_tokens ",
        request.sampling.max_tokens()));
  }
  if (emitted > 0 && request.sampling.n() != 1) {
    return Wrong("n", request.sampling.n(),
                 "1 if the request has emitted tokens");
  }
  KVASIR_RETURN_IF_ERROR(
      CheckTokenIds("prompt", prompt, request.prompt, limits.vocab_size));
  return CheckTokenIds("emitted", emitted, request.emitted, limits.vocab_size);
}

}  // namespace

absl::Status ValidateRequest(const Request& request,
                             const RequestLimits& limits) {
  if (request.request_id.empty() ||
      request.request_id.size() > limits.max_request_id_bytes) {
    return Wrong("length of request_id", request.request_id.size(),
                 absl::StrCat("1 to ", limits.max_request_id_bytes, " bytes"));
  }
  if (request.queue_timeout < absl::ZeroDuration()) {
    return Wrong("queue_timeout", absl::FormatDuration(request.queue_timeout),
                 "0 (the default) or more");
  }
  KVASIR_RETURN_IF_ERROR(CheckDistribution(request.sampling));
  KVASIR_RETURN_IF_ERROR(CheckLogitBias(request.sampling, limits));
  KVASIR_RETURN_IF_ERROR(CheckCounts(request.sampling, limits));
  if (!request.sampling.token_mask().empty() && !limits.token_masks) {
    return absl::UnimplementedError(
        absl::StrCat("token_mask is \"", request.sampling.token_mask(),
                     "\", but this worker does not support token masks"));
  }
  KVASIR_RETURN_IF_ERROR(CheckTokens(request, limits));
  if (!request.eviction_budget.has_value()) return absl::OkStatus();
  const auto prompt = static_cast<int64_t>(request.prompt.size_tokens());
  return CheckEvictionBudget(
      *request.eviction_budget,
      {.prompt_tokens = prompt,
       .total_tokens = std::min(prompt + int64_t{request.sampling.max_tokens()},
                                int64_t{limits.max_model_len})},
      limits.eviction);
}

}  // namespace kvasir::worker
