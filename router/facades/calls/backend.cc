#include "router/facades/calls/backend.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/refusal.h"

namespace kvasir::router {

absl::StatusOr<Caller> IdentifyCaller(const FacadeBackend& backend,
                                      const CallIdentity& call,
                                      Caller* refused) {
  if (backend.callers != nullptr) {
    return backend.callers->Identify(call.credentials, kvasir::v1::CLIENT,
                                     call.tenant, refused);
  }
  KVASIR_RETURN_IF_ERROR(CheckTenantName(call.tenant));
  return Caller{.tenant = call.tenant};
}

ArrivedMessage Arrive(const FacadeBackend& backend, const CallIdentity& call,
                      size_t message_bytes) {
  Caller refused;
  absl::StatusOr<Caller> caller = IdentifyCaller(backend, call, &refused);
  if (!caller.ok()) return {std::move(refused), caller.status()};
  ArrivedMessage arrived{*std::move(caller), nullptr};
  if (backend.budget != nullptr) {
    arrived.bytes = backend.budget->Take(2 * message_bytes);
  }
  if (arrived.bytes.ok() && arrived.caller.quota != nullptr) {
    arrived.bytes = backend.callers->TakeBytes(
        arrived.caller, 2 * message_bytes, *std::move(arrived.bytes));
  }
  return arrived;
}

absl::StatusOr<std::shared_ptr<RequestPlace>> EnterQuota(
    const FacadeBackend& backend, const Caller& caller) {
  if (caller.quota == nullptr) return nullptr;
  return backend.callers->Enter(caller);
}

absl::Status CountSamples(const FacadeBackend& backend, RequestPlace* place,
                          uint32_t n) {
  if (place == nullptr) return absl::OkStatus();
  return backend.callers->CountSamples(place, n);
}

absl::Status CheckNumSamples(uint32_t n, const kvasir::v1::WorkerInfo& info,
                             const FacadeLimits& limits) {
  const uint32_t limit = LargestN(info, limits.max_n);
  if (n <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("n (the number of samples) is ", n, ", want 1 to ", limit));
}

absl::Status NeedsTokenizer(const std::string& field,
                            const std::string& instead) {
  return absl::UnimplementedError(absl::StrCat(
      field, " needs a tokenizer, and this server has none for the model; ",
      instead));
}

absl::StatusOr<proto::TokenBytes> EncodePrompt(const TextCodec& codec,
                                               const std::string& text,
                                               uint32_t max_model_len) {
  const size_t most = max_model_len == 0 ? std::numeric_limits<size_t>::max()
                                         : size_t{max_model_len} - 1;
  absl::StatusOr<std::vector<int32_t>> ids = codec.EncodePrompt(text, most);
  if (absl::IsOutOfRange(ids.status())) {
    return proto::RefusedError(
        kvasir::v1::Refusal::NEVER_FITS,
        absl::StrCat("the prompt has more than ", most,
                     " tokens; prompt and output together may have at most ",
                     max_model_len));
  }
  KVASIR_RETURN_IF_ERROR(ids.status());
  if (ids->empty()) {
    return absl::InvalidArgumentError("the prompt has no tokens");
  }
  return proto::TokenBytes::Adopt(*std::move(ids));
}

std::string TokenizerTurn(const FacadeBackend& backend, const Caller& caller,
                          const std::string& peer) {
  if (backend.callers != nullptr) return caller.tenant;
  return peer.substr(0, peer.rfind(':'));
}

absl::Status TokenizerIsFull(const FacadeLimits& limits) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the tokenizer's queue has ", limits.max_tokenizer_queue,
                   " places, but none is free for this client: try again "
                   "later"));
}

uint32_t MostTokens(uint32_t wanted, uint64_t prompt_tokens,
                    uint32_t max_model_len) {
  if (max_model_len == 0) return wanted;
  // The router will refuse this prompt, because it leaves no room for output.
  if (prompt_tokens >= max_model_len) return 0;
  return static_cast<uint32_t>(
      std::min<uint64_t>(wanted, max_model_len - prompt_tokens));
}

absl::Status SetMaxTokens(const std::string& field, uint64_t prompt_tokens,
                          uint32_t max_model_len, uint64_t fits,
                          const FacadeLimits& limits,
                          kvasir::v1::SamplingParams* sampling) {
  const bool asked = sampling->max_tokens() > 0;
  const uint32_t wanted = asked               ? sampling->max_tokens()
                          : max_model_len > 0 ? max_model_len
                                              : limits.default_max_tokens;
  const uint32_t most = MostTokens(wanted, prompt_tokens, max_model_len);
  if (most > fits && asked) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, ": want at most ", fits, ", have ", wanted,
        ": one response cannot hold more tokens with ", sampling->logprobs(),
        " log probabilities each; ask for fewer or stream the answer"));
  }
  if (!asked) {
    // If the prompt leaves no room for output, set 1. The router then refuses
    // the request.
    sampling->set_max_tokens(static_cast<uint32_t>(
        std::max<uint64_t>(1, std::min<uint64_t>(most, fits))));
  }
  return absl::OkStatus();
}

const char* FinishReasonText(kvasir::v1::FinishReason reason) {
  switch (reason) {
    case kvasir::v1::FINISH_STOP:
      return "stop";
    case kvasir::v1::FINISH_LENGTH:
      return "length";
    default:
      return "abort";
  }
}

}  // namespace kvasir::router
