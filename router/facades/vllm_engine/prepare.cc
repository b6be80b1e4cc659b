#include "router/facades/vllm_engine/prepare.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

absl::Status NeedsTokenizer(const char* field, const char* instead) {
  return absl::UnimplementedError(
      absl::StrCat(field, ": the model has no tokenizer.json here; ", instead));
}

absl::StatusOr<proto::TokenBytes> PromptOf(const VllmEngineRequest& request,
                                           const TextCodec* codec) {
  if (!request.text) return request.token_ids;
  if (codec == nullptr) {
    return NeedsTokenizer("text", "send token ids as 'tokenized'");
  }
  KVASIR_ASSIGN_OR_RETURN(std::vector<int32_t> ids,
                          codec->EncodePrompt(*request.text));
  if (ids.empty()) {
    return absl::InvalidArgumentError("the prompt has no tokens");
  }
  return proto::TokenBytes::Adopt(std::move(ids));
}

// Sets max_tokens where the client has not: as far as the context goes, and as
// one response holds where there is but one. INVALID_ARGUMENT for answers that
// no response holds.
absl::Status SetMaxTokens(uint64_t prompt_tokens, uint32_t max_model_len,
                          const FacadeLimits& limits,
                          VllmEngineRequest* request) {
  kvasir::v1::SamplingParams& sampling = request->sampling;
  const uint64_t of_prompt = VllmEnginePromptBytes(sampling, prompt_tokens);
  if (of_prompt > limits.max_response_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling_params.prompt_logprobs: those of ",
                     prompt_tokens, " tokens may take ", of_prompt,
                     " bytes, one response holds ", limits.max_response_bytes));
  }
  const uint64_t fits = request->streaming
                            ? std::numeric_limits<uint32_t>::max()
                            : (limits.max_response_bytes - of_prompt) /
                                  VllmEngineBytesPerToken(sampling);
  const bool asked = sampling.max_tokens() > 0;
  // Without a length to go by, the operator's default.
  const uint32_t wanted = asked               ? sampling.max_tokens()
                          : max_model_len > 0 ? max_model_len
                                              : limits.default_max_tokens;
  const uint32_t most = MostTokens(wanted, prompt_tokens, max_model_len);
  if (most > fits && asked) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling_params.max_tokens: want at most ", fits, " with ",
        sampling.logprobs(), " log probabilities in one response, have ", most,
        ": ask for fewer or stream"));
  }
  if (!asked) {
    // At least 1: the router refuses a prompt that leaves no room.
    sampling.set_max_tokens(static_cast<uint32_t>(
        std::max<uint64_t>(1, std::min<uint64_t>(most, fits))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreparedCall<VllmEngineAnswer>> PrepareVllmEngineCall(
    VllmEngineRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits) {
  KVASIR_RETURN_IF_ERROR(CheckNumSamples(request.sampling.n(), info, limits));
  KVASIR_ASSIGN_OR_RETURN(const proto::TokenBytes prompt,
                          PromptOf(request, codec.get()));
  if (!request.stop_strings.empty()) {
    if (codec == nullptr) {
      return NeedsTokenizer("sampling_params.stop",
                            "stop by token ids (stop_token_ids)");
    }
    KVASIR_RETURN_IF_ERROR(
        StopAtSpecialTokens(*codec, request.skip_special_tokens,
                            &request.stop_strings, &request.sampling));
  }
  KVASIR_RETURN_IF_ERROR(SetMaxTokens(prompt.size_tokens(),
                                      info.max_model_len(), limits, &request));
  PreparedCall<VllmEngineAnswer> prepared;
  prepared.prompt = prompt;
  prepared.sampling = request.sampling;
  prepared.seed = request.seed;
  prepared.folded = !request.streaming;
  prepared.answer = std::make_unique<VllmEngineAnswer>(
      std::move(request), prompt, std::move(codec));
  return prepared;
}

}  // namespace kvasir::router
