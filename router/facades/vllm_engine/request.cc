#include "router/facades/vllm_engine/request.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/sampling.h"
#include "router/facades/calls/fields.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

using vllm::grpc::engine::GenerateRequest;
using WireSampling = vllm::grpc::engine::SamplingParams;

absl::Status RefuseNotBuilt(const GenerateRequest& message) {
  if (message.has_kv_transfer_params())
    return FieldNotBuilt("kv_transfer_params");
  if (!message.kv_transfer_params_json().empty()) {
    return FieldNotBuilt("kv_transfer_params_json");
  }
  if (message.has_mm_inputs()) return FieldNotBuilt("mm_inputs");
  if (message.extra_mm_inputs_size() > 0)
    return FieldNotBuilt("extra_mm_inputs");
  if (message.has_media_refs()) return FieldNotBuilt("media_refs");
  if (message.data_parallel_rank() != 0) {
    return WrongField("data_parallel_rank", "0 (data_parallel_size is 1)",
                      message.data_parallel_rank());
  }
  return RefuseUnknownFields(message);
}

absl::Status RefuseNotBuilt(const WireSampling& sampling) {
  switch (sampling.constraint_case()) {
    case WireSampling::kJsonSchema:
      return FieldNotBuilt("sampling_params.json_schema");
    case WireSampling::kRegex:
      return FieldNotBuilt("sampling_params.regex");
    case WireSampling::kGrammar:
      return FieldNotBuilt("sampling_params.grammar");
    case WireSampling::kStructuralTag:
      return FieldNotBuilt("sampling_params.structural_tag");
    case WireSampling::kChoice:
      return FieldNotBuilt("sampling_params.choice");
    case WireSampling::kJsonObject:
      if (sampling.json_object())
        return FieldNotBuilt("sampling_params.json_object");
      break;
    case WireSampling::CONSTRAINT_NOT_SET:
      break;
  }
  if (sampling.has_truncate_prompt_tokens()) {
    return FieldNotBuilt("sampling_params.truncate_prompt_tokens");
  }
  return RefuseUnknownFields(sampling);
}

absl::Status ParseInput(const GenerateRequest& message,
                        VllmEngineRequest* out) {
  switch (message.input_case()) {
    case GenerateRequest::kTokenized: {
      // Ignore original_text, because the client has tokenized it and the ids
      // are the prompt.
      KVASIR_RETURN_IF_ERROR(RefuseUnknownFields(message.tokenized()));
      KVASIR_ASSIGN_OR_RETURN(
          out->token_ids,
          PromptIdsOf("tokenized.input_ids", message.tokenized().input_ids()));
      return absl::OkStatus();
    }
    case GenerateRequest::kText:
      out->text = message.text();
      return absl::OkStatus();
    case GenerateRequest::INPUT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "the request has neither 'tokenized' nor 'text': set one of them");
}

absl::Status ParseNumbers(const WireSampling& wire,
                          kvasir::v1::SamplingParams* sampling) {
  struct Field {
    const char* name;
    float value;
  };
  for (const auto& [name, value] :
       {Field{"temperature", wire.temperature()}, Field{"top_p", wire.top_p()},
        Field{"min_p", wire.min_p()},
        Field{"frequency_penalty", wire.frequency_penalty()},
        Field{"presence_penalty", wire.presence_penalty()},
        Field{"repetition_penalty", wire.repetition_penalty()}}) {
    KVASIR_RETURN_IF_ERROR(
        CheckFiniteField(absl::StrCat("sampling_params.", name), value));
  }
  if (wire.has_temperature()) sampling->set_temperature(wire.temperature());
  sampling->set_top_p(OrNeutral(wire.top_p(), 1.0f));
  sampling->set_min_p(wire.min_p());
  sampling->set_frequency_penalty(wire.frequency_penalty());
  sampling->set_presence_penalty(wire.presence_penalty());
  sampling->set_repetition_penalty(OrNeutral(wire.repetition_penalty(), 1.0f));
  sampling->set_top_k(TopKOf(wire.top_k()));
  return absl::OkStatus();
}

// Returns the value `want` of a field for log probabilities, or nullopt if the
// field is absent (`has` is false).
absl::StatusOr<std::optional<uint32_t>> Logprobs(const std::string& name,
                                                 bool has, int32_t want) {
  if (!has) return std::nullopt;
  if (want == -1) {
    return FieldNotBuilt(
        absl::StrCat(name, " -1 (log probabilities of the whole vocabulary)"));
  }
  if (want < 0) return WrongField(name, "at least 0", want);
  return static_cast<uint32_t>(want);
}

absl::Status ParseLogprobs(const WireSampling& wire,
                           kvasir::v1::SamplingParams* sampling) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<uint32_t> logprobs,
                          Logprobs("sampling_params.logprobs",
                                   wire.has_logprobs(), wire.logprobs()));
  if (logprobs) sampling->set_logprobs(*logprobs);
  KVASIR_ASSIGN_OR_RETURN(
      const std::optional<uint32_t> of_prompt,
      Logprobs("sampling_params.prompt_logprobs", wire.has_prompt_logprobs(),
               wire.prompt_logprobs()));
  if (!of_prompt) return absl::OkStatus();
  if (*of_prompt > 0) {
    return FieldNotBuilt(absl::StrCat(
        "sampling_params.prompt_logprobs above 0 (have ", *of_prompt, ")"));
  }
  sampling->set_prompt_logprobs(0);
  return absl::OkStatus();
}

absl::Status ParseSampling(const WireSampling& wire, VllmEngineRequest* out) {
  KVASIR_RETURN_IF_ERROR(RefuseNotBuilt(wire));
  kvasir::v1::SamplingParams* sampling = &out->sampling;
  KVASIR_RETURN_IF_ERROR(ParseNumbers(wire, sampling));
  KVASIR_RETURN_IF_ERROR(ParseLogprobs(wire, sampling));
  if (wire.has_max_tokens()) {
    if (wire.max_tokens() == 0) {
      return WrongField("sampling_params.max_tokens", "at least 1", 0);
    }
    sampling->set_max_tokens(wire.max_tokens());
  }
  sampling->set_min_tokens(wire.min_tokens());
  sampling->set_ignore_eos(wire.ignore_eos());
  sampling->set_n(wire.n() == 0 ? 1 : wire.n());
  // A negative seed is valid. Its 64 bits are used as an unsigned number.
  if (wire.has_seed()) {
    out->seed = static_cast<uint64_t>(int64_t{wire.seed()});
  }
  KVASIR_RETURN_IF_ERROR(AddStopIds("sampling_params.stop_token_ids",
                                    wire.stop_token_ids(), sampling));
  for (const auto& [id, bias] : wire.logit_bias()) {
    KVASIR_RETURN_IF_ERROR(CheckFiniteField(
        absl::StrCat("sampling_params.logit_bias[", id, "]"), bias));
    (*sampling->mutable_logit_bias())[id] = bias;
  }
  out->skip_special_tokens = wire.skip_special_tokens();
  for (const std::string& stop : wire.stop()) {
    if (stop.empty()) {
      return absl::InvalidArgumentError(
          "sampling_params.stop: one of the strings is empty: remove it");
    }
    out->stop_strings.push_back(stop);
  }
  return CheckStopStrings("sampling_params.stop", out->stop_strings);
}

}  // namespace

absl::StatusOr<VllmEngineRequest> ParseVllmEngineRequest(
    const GenerateRequest& message) {
  VllmEngineRequest out;
  out.sampling = proto::NeutralSampling();
  out.streaming = message.stream();
  KVASIR_RETURN_IF_ERROR(RefuseNotBuilt(message));
  KVASIR_RETURN_IF_ERROR(ParseInput(message, &out));
  KVASIR_RETURN_IF_ERROR(ParseSampling(message.sampling_params(), &out));
  return out;
}

}  // namespace kvasir::router
