#include "router/facades/vllm_engine/request.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/sampling.h"
#include "router/facades/calls/stop_strings.h"

namespace kvasir::router {
namespace {

using vllm::grpc::engine::GenerateRequest;
using WireSampling = vllm::grpc::engine::SamplingParams;

constexpr uint32_t kMaxTokenId = std::numeric_limits<int32_t>::max();

absl::Status NotBuilt(const std::string& what) {
  return absl::UnimplementedError(absl::StrCat(what, " is not built"));
}

template <typename T>
absl::Status Wrong(const std::string& field, const std::string& want,
                   const T& have) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": want ", want, ", have ", have));
}

// A field that this build has no name for may ask for anything.
absl::Status RefuseUnknown(const google::protobuf::Message& message) {
  const auto& unknown = message.GetReflection()->GetUnknownFields(message);
  if (unknown.empty()) return absl::OkStatus();
  return NotBuilt(absl::StrCat("field ", unknown.field(0).number(), " of ",
                               message.GetDescriptor()->name()));
}

absl::Status RefuseNotBuilt(const GenerateRequest& message) {
  if (message.has_kv_transfer_params()) return NotBuilt("kv_transfer_params");
  if (!message.kv_transfer_params_json().empty()) {
    return NotBuilt("kv_transfer_params_json");
  }
  if (message.has_mm_inputs()) return NotBuilt("mm_inputs");
  if (message.extra_mm_inputs_size() > 0) return NotBuilt("extra_mm_inputs");
  if (message.has_media_refs()) return NotBuilt("media_refs");
  if (message.data_parallel_rank() != 0) {
    return Wrong("data_parallel_rank", "0 (data_parallel_size is 1)",
                 message.data_parallel_rank());
  }
  return RefuseUnknown(message);
}

absl::Status RefuseNotBuilt(const WireSampling& sampling) {
  switch (sampling.constraint_case()) {
    case WireSampling::kJsonSchema:
      return NotBuilt("sampling_params.json_schema");
    case WireSampling::kRegex:
      return NotBuilt("sampling_params.regex");
    case WireSampling::kGrammar:
      return NotBuilt("sampling_params.grammar");
    case WireSampling::kStructuralTag:
      return NotBuilt("sampling_params.structural_tag");
    case WireSampling::kChoice:
      return NotBuilt("sampling_params.choice");
    case WireSampling::kJsonObject:
      if (sampling.json_object())
        return NotBuilt("sampling_params.json_object");
      break;
    case WireSampling::CONSTRAINT_NOT_SET:
      break;
  }
  if (sampling.has_truncate_prompt_tokens()) {
    return NotBuilt("sampling_params.truncate_prompt_tokens");
  }
  return RefuseUnknown(sampling);
}

absl::StatusOr<proto::TokenBytes> TokenIds(
    const google::protobuf::RepeatedField<uint32_t>& wire) {
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(wire.size()));
  for (const uint32_t id : wire) {
    if (id > kMaxTokenId) {
      return Wrong("tokenized.input_ids", "token ids below 2^31", id);
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return proto::TokenBytes::Adopt(std::move(ids));
}

absl::Status ParseInput(const GenerateRequest& message,
                        VllmEngineRequest* out) {
  switch (message.input_case()) {
    case GenerateRequest::kTokenized: {
      // original_text is what the ids came from; the ids are the prompt.
      KVASIR_RETURN_IF_ERROR(RefuseUnknown(message.tokenized()));
      KVASIR_ASSIGN_OR_RETURN(out->token_ids,
                              TokenIds(message.tokenized().input_ids()));
      if (out->token_ids.empty()) {
        return absl::InvalidArgumentError(
            "tokenized.input_ids: want at least one token, have none");
      }
      return absl::OkStatus();
    }
    case GenerateRequest::kText:
      out->text = message.text();
      return absl::OkStatus();
    case GenerateRequest::INPUT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "want one of 'tokenized' and 'text', have neither");
}

absl::Status CheckFinite(const std::string& field, float value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return Wrong(absl::StrCat("sampling_params.", field), "a finite number",
               value);
}

// A wire value where it is set, `neutral` where it is zero.
float OrNeutral(float value, float neutral) {
  return value == 0.0f ? neutral : value;
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
    KVASIR_RETURN_IF_ERROR(CheckFinite(name, value));
  }
  if (wire.has_temperature()) sampling->set_temperature(wire.temperature());
  sampling->set_top_p(OrNeutral(wire.top_p(), 1.0f));
  sampling->set_min_p(wire.min_p());
  sampling->set_frequency_penalty(wire.frequency_penalty());
  sampling->set_presence_penalty(wire.presence_penalty());
  sampling->set_repetition_penalty(OrNeutral(wire.repetition_penalty(), 1.0f));
  // Clients send the largest number for "all".
  sampling->set_top_k(
      wire.top_k() > kMaxTokenId ? 0 : static_cast<int32_t>(wire.top_k()));
  return absl::OkStatus();
}

// `want` log probabilities a token; absent: none.
absl::StatusOr<std::optional<uint32_t>> Logprobs(const std::string& name,
                                                 bool has, int32_t want) {
  if (!has) return std::nullopt;
  if (want == -1) {
    return NotBuilt(absl::StrCat(name, " -1 (those of the whole vocabulary)"));
  }
  if (want < 0) return Wrong(name, "at least 0", want);
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
    return NotBuilt(absl::StrCat(
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
      return Wrong("sampling_params.max_tokens", "at least 1", 0);
    }
    sampling->set_max_tokens(wire.max_tokens());
  }
  sampling->set_min_tokens(wire.min_tokens());
  sampling->set_ignore_eos(wire.ignore_eos());
  sampling->set_n(wire.n() == 0 ? 1 : wire.n());
  // Negative seeds are seeds, too.
  if (wire.has_seed()) {
    out->seed = static_cast<uint64_t>(int64_t{wire.seed()});
  }
  for (const uint32_t id : wire.stop_token_ids()) {
    if (id > kMaxTokenId) {
      return Wrong("sampling_params.stop_token_ids", "token ids below 2^31",
                   id);
    }
    sampling->add_stop_token_ids(static_cast<int32_t>(id));
  }
  for (const auto& [id, bias] : wire.logit_bias()) {
    KVASIR_RETURN_IF_ERROR(
        CheckFinite(absl::StrCat("logit_bias[", id, "]"), bias));
    (*sampling->mutable_logit_bias())[id] = bias;
  }
  out->skip_special_tokens = wire.skip_special_tokens();
  for (const std::string& stop : wire.stop()) {
    if (stop.empty()) {
      return absl::InvalidArgumentError(
          "sampling_params.stop: want strings, have an empty one");
    }
    out->stop_strings.push_back(stop);
  }
  return CheckStopStrings("sampling_params.stop", out->stop_strings);
}

}  // namespace

absl::Status CheckVllmRequestId(const std::string& id) {
  if (id.size() <= kMaxVllmRequestIdBytes) return absl::OkStatus();
  return Wrong("request_id",
               absl::StrCat("at most ", kMaxVllmRequestIdBytes, " bytes"),
               id.size());
}

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
