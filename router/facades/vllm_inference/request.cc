#include "router/facades/vllm_inference/request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/sampling.h"
#include "router/facades/calls/fields.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

absl::Status RefuseUnknownEverywhere(const vllm::GenerateRequest& message) {
  for (const google::protobuf::Message* part :
       std::initializer_list<const google::protobuf::Message*>{
           &message, &message.token_ids(), &message.sampling(),
           &message.decoding(), &message.stopping(), &message.response(),
           &message.response().output_candidates(), &message.kv()}) {
    KVASIR_RETURN_IF_ERROR(RefuseUnknownFields(*part));
  }
  return absl::OkStatus();
}

absl::Status RefuseNotBuilt(const vllm::GenerateRequest& message) {
  if (message.truncate_prompt_tokens() != 0) {
    return FieldNotBuilt("truncate_prompt_tokens");
  }
  if (message.media_size() > 0) return FieldNotBuilt("media");
  if (!message.lora_name().empty()) return FieldNotBuilt("lora_name");
  const vllm::KVCacheParameters& kv = message.kv();
  if (kv.bypass_prefix_cache()) return FieldNotBuilt("kv.bypass_prefix_cache");
  if (kv.has_kv_transfer_params())
    return FieldNotBuilt("kv.kv_transfer_params");
  if (kv.has_ec_transfer_params())
    return FieldNotBuilt("kv.ec_transfer_params");
  if (message.response().prompt_logprobs()) {
    return FieldNotBuilt("response.prompt_logprobs");
  }
  if (message.response().has_prompt_candidates()) {
    return FieldNotBuilt("response.prompt_candidates");
  }
  return RefuseUnknownEverywhere(message);
}

absl::Status RefuseConstraints(const vllm::DecodingParameters& decoding) {
  using Wire = vllm::DecodingParameters;
  if (decoding.allowed_token_ids_size() > 0) {
    return FieldNotBuilt("decoding.allowed_token_ids");
  }
  switch (decoding.structured_output_case()) {
    case Wire::kJson:
      return FieldNotBuilt("decoding.json");
    case Wire::kRegex:
      return FieldNotBuilt("decoding.regex");
    case Wire::kChoice:
      return FieldNotBuilt("decoding.choice");
    case Wire::kGrammar:
      return FieldNotBuilt("decoding.grammar");
    case Wire::kStructuralTag:
      return FieldNotBuilt("decoding.structural_tag");
    case Wire::kJsonObject:
      if (decoding.json_object()) return FieldNotBuilt("decoding.json_object");
      break;
    case Wire::STRUCTURED_OUTPUT_NOT_SET:
      break;
  }
  return absl::OkStatus();
}

absl::Status ParsePrompt(const vllm::GenerateRequest& message,
                         VllmInferenceRequest* out) {
  switch (message.prompt_case()) {
    case vllm::GenerateRequest::kText:
      out->text = message.text();
      return absl::OkStatus();
    case vllm::GenerateRequest::kTokenIds: {
      KVASIR_ASSIGN_OR_RETURN(
          out->token_ids,
          PromptIdsOf("token_ids.ids", message.token_ids().ids()));
      return absl::OkStatus();
    }
    case vllm::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "the request has neither 'token_ids' nor 'text': set one of them");
}

absl::Status ParseSampling(const vllm::GenerateRequest& message,
                           VllmInferenceRequest* out) {
  const vllm::RandomSampling& sampling = message.sampling();
  const vllm::DecodingParameters& decoding = message.decoding();
  struct Field {
    const char* name;
    float value;
  };
  for (const auto& [name, value] :
       {Field{"temperature", message.temperature()},
        Field{"sampling.top_p", sampling.top_p()},
        Field{"sampling.min_p", sampling.min_p()},
        Field{"decoding.presence_penalty", decoding.presence_penalty()},
        Field{"decoding.frequency_penalty", decoding.frequency_penalty()},
        Field{"decoding.repetition_penalty", decoding.repetition_penalty()}}) {
    KVASIR_RETURN_IF_ERROR(CheckFiniteField(name, value));
  }
  // The default temperature of this protocol is 0, which means greedy. In
  // vLLM's other protocols it is 1.
  out->sampling.set_temperature(message.temperature());
  out->sampling.set_top_k(TopKOf(sampling.top_k()));
  out->sampling.set_top_p(OrNeutral(sampling.top_p(), 1.0f));
  out->sampling.set_min_p(sampling.min_p());
  out->sampling.set_presence_penalty(decoding.presence_penalty());
  out->sampling.set_frequency_penalty(decoding.frequency_penalty());
  out->sampling.set_repetition_penalty(
      OrNeutral(decoding.repetition_penalty(), 1.0f));
  for (const auto& [id, bias] : decoding.logit_bias()) {
    if (id > kMaxTokenId) {
      return WrongField("decoding.logit_bias", "token ids below 2^31", id);
    }
    KVASIR_RETURN_IF_ERROR(
        CheckFiniteField(absl::StrCat("decoding.logit_bias[", id, "]"), bias));
    (*out->sampling.mutable_logit_bias())[static_cast<int32_t>(id)] = bias;
  }
  out->sampling.set_n(std::max<uint32_t>(1, sampling.num_sequences()));
  if (!out->streaming && out->sampling.n() > 1) {
    return WrongField("sampling.num_sequences",
                      "1 in a call of Generate, which returns one sample "
                      "(GenerateStream returns several)",
                      out->sampling.n());
  }
  // A negative seed is valid. Its 64 bits are used as an unsigned number.
  if (sampling.has_seed()) out->seed = static_cast<uint64_t>(sampling.seed());
  return RefuseConstraints(decoding);
}

absl::Status ParseStopping(const vllm::StoppingCriteria& stopping,
                           VllmInferenceRequest* out) {
  out->sampling.set_max_tokens(stopping.max_new_tokens());
  out->sampling.set_min_tokens(stopping.min_new_tokens());
  out->sampling.set_ignore_eos(stopping.ignore_eos());
  KVASIR_RETURN_IF_ERROR(AddStopIds("stopping.stop_token_ids",
                                    stopping.stop_token_ids(), &out->sampling));
  out->include_stop_string = stopping.include_stop_strings();
  for (const std::string& stop : stopping.stop_strings()) {
    if (stop.empty()) {
      return absl::InvalidArgumentError(
          "stopping.stop_strings: one of the strings is empty: remove it");
    }
    out->stop_strings.push_back(stop);
  }
  return CheckStopStrings("stopping.stop_strings", out->stop_strings);
}

absl::Status ParseCandidates(const vllm::ResponseOptions& response,
                             VllmInferenceRequest* out) {
  using Wire = vllm::CandidateTokens;
  const Wire& candidates = response.output_candidates();
  switch (candidates.select_case()) {
    case Wire::kTopN:
      out->num_candidates = candidates.top_n();
      break;
    case Wire::kTokenIds:
      if (candidates.token_ids().ids_size() > 0) {
        return FieldNotBuilt("response.output_candidates.token_ids");
      }
      break;
    case Wire::kAll:
      if (candidates.all()) {
        return FieldNotBuilt("response.output_candidates.all");
      }
      break;
    case Wire::SELECT_NOT_SET:
      break;
  }
  if (out->num_candidates > 0 && !out->wants_logprobs) {
    return absl::InvalidArgumentError(
        "response.output_candidates: requires response.output_logprobs, which "
        "is false");
  }
  return absl::OkStatus();
}

absl::Status ParseResponse(const vllm::ResponseOptions& response,
                           VllmInferenceRequest* out) {
  out->wants_text = !response.has_output_text() || response.output_text();
  out->wants_ids = response.output_token_ids();
  out->wants_logprobs = response.output_logprobs();
  out->wants_prompt_ids = response.prompt_token_ids();
  out->skip_special_tokens =
      !response.has_skip_special_tokens() || response.skip_special_tokens();
  KVASIR_RETURN_IF_ERROR(ParseCandidates(response, out));
  if (out->wants_logprobs) {
    // Ask the engine for at least the most likely token, even if the client
    // wants no candidates. Otherwise the answer could not say whether the
    // sampled token has rank 1.
    out->sampling.set_logprobs(std::max<uint32_t>(1, out->num_candidates));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<VllmInferenceRequest> ParseVllmInferenceRequest(
    const vllm::GenerateRequest& message, bool streaming) {
  VllmInferenceRequest out;
  out.sampling = proto::NeutralSampling();
  out.streaming = streaming;
  out.priority = message.priority();
  out.session = message.session_id();
  if (out.session.size() > kMaxSessionBytes) {
    return WrongField("session_id",
                      absl::StrCat("at most ", kMaxSessionBytes, " bytes"),
                      out.session.size());
  }
  out.cache_salt = message.kv().cache_salt();
  if (out.cache_salt.size() > kMaxCacheSaltBytes) {
    return WrongField("kv.cache_salt",
                      absl::StrCat("at most ", kMaxCacheSaltBytes, " bytes"),
                      out.cache_salt.size());
  }
  KVASIR_RETURN_IF_ERROR(RefuseNotBuilt(message));
  KVASIR_RETURN_IF_ERROR(ParsePrompt(message, &out));
  KVASIR_RETURN_IF_ERROR(ParseSampling(message, &out));
  KVASIR_RETURN_IF_ERROR(ParseStopping(message.stopping(), &out));
  KVASIR_RETURN_IF_ERROR(ParseResponse(message.response(), &out));
  return out;
}

}  // namespace kvasir::router
