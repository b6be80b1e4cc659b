#include "router/facades/vllm_engine/prepare.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

absl::StatusOr<proto::TokenBytes> PromptOf(const VllmEngineRequest& request,
                                           const TextCodec* codec,
                                           uint32_t max_model_len) {
  if (!request.text) return request.token_ids;
  if (codec == nullptr) {
    return NeedsTokenizer("text", "send token ids as 'tokenized'");
  }
  return EncodePrompt(*codec, *request.text, max_model_len);
}

// Sets max_tokens if the client has not set it. Returns INVALID_ARGUMENT if one
// response cannot hold the answer or the prompt's log probabilities.
absl::Status FitAnswer(uint64_t prompt_tokens, uint32_t max_model_len,
                       const FacadeLimits& limits, VllmEngineRequest* request) {
  kvasir::v1::SamplingParams& sampling = request->sampling;
  const uint64_t of_prompt = VllmEnginePromptBytes(sampling, prompt_tokens);
  if (of_prompt > limits.max_response_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling_params.prompt_logprobs: the log probabilities of ",
        prompt_tokens, " prompt tokens may take ", of_prompt,
        " bytes, but one response holds only ", limits.max_response_bytes,
        " bytes"));
  }
  const uint64_t fits = request->streaming
                            ? std::numeric_limits<uint32_t>::max()
                            : (limits.max_response_bytes - of_prompt) /
                                  VllmEngineBytesPerToken(sampling);
  return SetMaxTokens("sampling_params.max_tokens", prompt_tokens,
                      max_model_len, fits, limits, &sampling);
}

}  // namespace

absl::StatusOr<PreparedCall<VllmEngineAnswer>> PrepareVllmEngineCall(
    VllmEngineRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits) {
  KVASIR_RETURN_IF_ERROR(CheckNumSamples(request.sampling.n(), info, limits));
  KVASIR_ASSIGN_OR_RETURN(const proto::TokenBytes prompt,
                          PromptOf(request, codec.get(), info.max_model_len()));
  if (!request.stop_strings.empty()) {
    if (codec == nullptr) {
      return NeedsTokenizer("sampling_params.stop",
                            "stop by token ids (stop_token_ids)");
    }
    KVASIR_RETURN_IF_ERROR(
        StopAtSpecialTokens(*codec, request.skip_special_tokens,
                            &request.stop_strings, &request.sampling));
  }
  KVASIR_RETURN_IF_ERROR(
      FitAnswer(prompt.size_tokens(), info.max_model_len(), limits, &request));
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
