#include "router/facades/vllm_inference/prepare.h"

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

absl::Status CheckCodec(const VllmInferenceRequest& request,
                        const TextCodec* codec) {
  if (codec != nullptr) return absl::OkStatus();
  if (request.text) return NeedsTokenizer("text", "send 'token_ids'");
  if (!request.stop_strings.empty()) {
    return NeedsTokenizer("stopping.stop_strings",
                          "stop by token ids (stop_token_ids)");
  }
  if (request.wants_text) {
    return NeedsTokenizer("response.output_text",
                          "ask for ids: output_text false, output_token_ids");
  }
  return absl::OkStatus();
}

absl::StatusOr<proto::TokenBytes> PromptOf(const VllmInferenceRequest& request,
                                           const TextCodec* codec,
                                           uint32_t max_model_len) {
  if (!request.text) return request.token_ids;
  return EncodePrompt(*codec, *request.text, max_model_len);
}

// Returns how many output tokens one response can hold in addition to the
// prompt's ids.
absl::StatusOr<uint64_t> TokensThatFit(const VllmInferenceRequest& request,
                                       uint64_t prompt_tokens,
                                       const FacadeLimits& limits) {
  const uint64_t of_prompt = VllmInferencePromptBytes(request, prompt_tokens);
  if (of_prompt >= limits.max_response_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("response.prompt_token_ids: the ids of ", prompt_tokens,
                     " prompt tokens may take ", of_prompt,
                     " bytes, which leaves no room for output in a response of "
                     "at most ",
                     limits.max_response_bytes, " bytes"));
  }
  if (request.streaming) return std::numeric_limits<uint32_t>::max();
  return (limits.max_response_bytes - of_prompt) /
         VllmInferenceBytesPerToken(request);
}

}  // namespace

absl::StatusOr<PreparedCall<VllmInferenceAnswer>> PrepareVllmInferenceCall(
    VllmInferenceRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits) {
  KVASIR_RETURN_IF_ERROR(CheckNumSamples(request.sampling.n(), info, limits));
  KVASIR_RETURN_IF_ERROR(CheckCodec(request, codec.get()));
  KVASIR_ASSIGN_OR_RETURN(const proto::TokenBytes prompt,
                          PromptOf(request, codec.get(), info.max_model_len()));
  if (!request.stop_strings.empty()) {
    KVASIR_RETURN_IF_ERROR(
        StopAtSpecialTokens(*codec, request.skip_special_tokens,
                            &request.stop_strings, &request.sampling));
  }
  if (!request.wants_text && request.stop_strings.empty()) codec = nullptr;
  KVASIR_ASSIGN_OR_RETURN(const uint64_t fits,
                          TokensThatFit(request, prompt.size_tokens(), limits));
  KVASIR_RETURN_IF_ERROR(
      SetMaxTokens("stopping.max_new_tokens", prompt.size_tokens(),
                   info.max_model_len(), fits, limits, &request.sampling));
  PreparedCall<VllmInferenceAnswer> prepared;
  prepared.prompt = prompt;
  prepared.sampling = request.sampling;
  prepared.seed = request.seed;
  prepared.priority = request.priority;
  prepared.cache_salt = request.cache_salt;
  prepared.session = request.session;
  prepared.folded = !request.streaming;
  prepared.answer = std::make_unique<VllmInferenceAnswer>(
      std::move(request), prompt,
      std::vector<int32_t>(info.eos_token_ids().begin(),
                           info.eos_token_ids().end()),
      std::move(codec));
  return prepared;
}

}  // namespace kvasir::router
