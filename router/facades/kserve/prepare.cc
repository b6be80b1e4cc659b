#include "router/facades/kserve/prepare.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "router/facades/calls/backend.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

// An estimate of the bytes of one token's log probability in JSON, with the
// token's id and text.
constexpr uint64_t kLogprobJsonBytes = 80;

absl::Status BanWords(const TextCodec& codec, KserveRequest* request) {
  for (const std::string& word : request->bad_words) {
    if (word.empty()) continue;
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            codec.EncodeWord(word));
    if (ids.size() != 1) {
      return absl::UnimplementedError(absl::StrCat(
          "bad_words: one of the words has ", ids.size(),
          " tokens; only words of exactly one token are implemented"));
    }
    (*request->sampling.mutable_logit_bias())[ids[0]] = kBannedTokenBias;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreparedRequest> PrepareRequest(
    KserveRequest request, std::shared_ptr<const TextCodec> codec,
    const kvasir::v1::WorkerInfo& info, bool in_stream) {
  KserveAnswerContext context;
  context.eos_ids.assign(info.eos_token_ids().begin(),
                         info.eos_token_ids().end());
  context.in_stream = in_stream;
  if (request.schema == KserveSchema::kTrtTokens) {
    context.prompt = request.token_ids;
  } else {
    KVASIR_ASSIGN_OR_RETURN(context.prompt, EncodePrompt(*codec, request.text,
                                                         info.max_model_len()));
    KVASIR_RETURN_IF_ERROR(BanWords(*codec, &request));
    KVASIR_RETURN_IF_ERROR(
        StopAtSpecialTokens(*codec, request.skip_special_tokens,
                            &request.stop_strings, &request.sampling));
  }
  if (context.prompt.empty()) {
    return absl::InvalidArgumentError("the prompt has no tokens");
  }
  context.codec = std::move(codec);
  PreparedRequest prepared;
  prepared.prompt = context.prompt;
  prepared.sampling = request.sampling;
  prepared.seed = request.seed;
  prepared.eviction_budget = request.eviction_budget;
  prepared.priority = request.priority;
  prepared.queue_timeout = request.queue_timeout;
  prepared.answer =
      std::make_unique<KserveAnswer>(std::move(request), std::move(context));
  return prepared;
}

uint32_t MostTokens(const KserveRequest& request, uint32_t default_max_tokens,
                    uint32_t max_model_len) {
  const uint32_t wanted = request.sampling.max_tokens() > 0
                              ? request.sampling.max_tokens()
                              : default_max_tokens;
  return MostTokens(wanted,
                    std::max<uint64_t>(1, request.token_ids.size_tokens()),
                    max_model_len);
}

absl::Status CheckResponseSize(const KserveRequest& request,
                               size_t max_response_bytes, uint32_t max_tokens) {
  if (request.streaming || !request.sampling.has_logprobs()) {
    return absl::OkStatus();
  }
  const uint64_t per_token =
      request.outputs.logprobs
          ? kLogprobJsonBytes * (uint64_t{1} + request.sampling.logprobs())
          : sizeof(float);
  // `num_tokens` cannot overflow: it is the product of two 32-bit factors. Its
  // product with `per_token` could, so the comparison divides instead.
  const uint64_t num_tokens = uint64_t{max_tokens} * request.sampling.n();
  if (num_tokens <= max_response_bytes / per_token) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the log probabilities of ", request.sampling.n(), " samples of ",
      max_tokens, " tokens may take ", per_token,
      " bytes per token, together more than the ", max_response_bytes,
      " bytes of one response: ask for fewer or stream the answer"));
}

}  // namespace kvasir::router
