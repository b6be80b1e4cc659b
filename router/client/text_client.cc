#include "router/client/text_client.h"

#include <grpcpp/channel.h>

#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/net/grpc_channel.h"
#include "base/net/grpc_status.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

// An element of a Triton tensor of datatype BYTES: the length (4 bytes,
// little-endian) followed by the bytes.
std::string BytesElement(std::string_view value) {
  const uint32_t size = static_cast<uint32_t>(value.size());
  std::string element;
  for (int shift = 0; shift < 32; shift += 8) {
    element.push_back(static_cast<char>((size >> shift) & 0xff));
  }
  element.append(value);
  return element;
}

void AddInput(inference::ModelInferRequest* request, const char* name,
              const char* datatype, std::string raw) {
  auto* input = request->add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->add_shape(1);
  request->add_raw_input_contents(std::move(raw));
}

std::string SamplingJson(const TextRequest& request) {
  nlohmann::json json{{"max_tokens", request.max_tokens},
                      {"temperature", request.temperature},
                      {"top_p", request.top_p},
                      {"top_k", request.top_k},
                      {"min_p", request.min_p},
                      {"repetition_penalty", request.repetition_penalty},
                      {"ignore_eos", request.ignore_eos}};
  if (request.has_seed) json["seed"] = request.seed;
  if (!request.stop.empty()) json["stop"] = request.stop;
  if (!request.eviction_budget.empty()) {
    json["eviction_budget"] = request.eviction_budget;
  }
  return json.dump();
}

// Returns the value of an output tensor with one element of datatype BYTES.
absl::StatusOr<std::string> FirstBytes(const std::string& raw) {
  if (raw.size() < 4) {
    return absl::InternalError(
        "the server sent an output of type BYTES that is too short for its "
        "4-byte length field");
  }
  uint32_t size = 0;
  for (int i = 3; i >= 0; --i) {
    size = size << 8 | static_cast<uint8_t>(raw[static_cast<size_t>(i)]);
  }
  if (size > raw.size() - 4) {
    return absl::InternalError(absl::StrCat(
        "the server sent an output of type BYTES whose length field says ",
        size, " bytes, but only ", raw.size() - 4, " bytes follow"));
  }
  return raw.substr(4, size);
}

uint32_t FirstUint32(const std::string& raw) {
  uint32_t value = 0;
  if (raw.size() >= sizeof value) std::memcpy(&value, raw.data(), sizeof value);
  return value;
}

}  // namespace

std::optional<double> TextResult::prompt_rate() const {
  const double seconds = absl::ToDoubleSeconds(time_to_first_token);
  if (seconds <= 0 || prompt_tokens == 0) return std::nullopt;
  return prompt_tokens / seconds;
}

std::optional<double> TextResult::decode_rate() const {
  const double seconds = absl::ToDoubleSeconds(total - time_to_first_token);
  if (seconds <= 0 || output_tokens < 2) return std::nullopt;
  return (output_tokens - 1) / seconds;
}

TextClient::TextClient(const std::string& endpoint,
                       std::shared_ptr<grpc::ChannelCredentials> credentials)
    : channel_(base::NewGrpcChannel(endpoint, credentials)),
      stub_(inference::GRPCInferenceService::NewStub(channel_)),
      endpoint_(endpoint) {}

absl::Status TextClient::Explained(const grpc::Status& status,
                                   const grpc::ClientContext& context) const {
  // In the state TRANSIENT_FAILURE, the channel has no connection. (An
  // UNAVAILABLE that a server has sent does not put the channel into
  // this state.)
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE &&
      channel_->GetState(/*try_to_connect=*/false) ==
          GRPC_CHANNEL_TRANSIENT_FAILURE) {
    return absl::UnavailableError(absl::StrCat(
        endpoint_, ": no server answers there; scripts/serve starts one (",
        status.error_message(), ")"));
  }
  // The transport's own text (for example "Broken pipe") does not say what has
  // happened, so put an explanation before it.
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat(
        endpoint_, ": the call ended before its answer was complete: ",
        status.error_message()));
  }
  if (status.error_code() != grpc::StatusCode::UNIMPLEMENTED ||
      !status.error_message().empty()) {
    return base::StatusOfCall(status, context);
  }
  return absl::UnimplementedError(absl::StrCat(
      endpoint_,
      " speaks gRPC but not KServe v2: it is probably an admin port or a "
      "worker; use the --grpc-port of a server"));
}

absl::StatusOr<std::vector<std::string>> TextClient::ReadyModels(
    absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  inference::RepositoryIndexRequest request;
  request.set_ready(true);
  inference::RepositoryIndexResponse response;
  KVASIR_RETURN_IF_ERROR(
      Explained(stub_->RepositoryIndex(&context, request, &response), context));
  std::vector<std::string> names;
  for (const auto& model : response.models()) names.push_back(model.name());
  return names;
}

absl::StatusOr<std::optional<int64_t>> TextClient::MaxModelLen(
    const std::string& model, absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  inference::ModelConfigRequest request;
  request.set_name(model);
  inference::ModelConfigResponse response;
  const grpc::Status status = stub_->ModelConfig(&context, request, &response);
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return std::nullopt;
  }
  KVASIR_RETURN_IF_ERROR(Explained(status, context));
  const auto& parameters = response.config().parameters();
  const auto found = parameters.find("max_model_len");
  if (found == parameters.end()) return std::nullopt;
  int64_t tokens = 0;
  if (!absl::SimpleAtoi(found->second.string_value(), &tokens) || tokens < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        endpoint_, ": the server reports the max_model_len \"",
        base::Printable(found->second.string_value()), "\" for model ", model,
        ": want an integer of at least 2"));
  }
  return tokens;
}

absl::StatusOr<TextResult> TextClient::Generate(
    const TextRequest& request,
    const std::function<void(std::string_view)>& on_text) {
  std::string model = request.model;
  if (model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string> models,
                            ReadyModels(absl::Seconds(10)));
    if (models.empty()) {
      return absl::UnavailableError(absl::StrCat(
          endpoint_, ": the server has no model that accepts requests now"));
    }
    model = models.front();
  }
  inference::ModelInferRequest infer;
  infer.set_model_name(model);
  infer.set_id("1");
  AddInput(&infer, "text_input", "BYTES", BytesElement(request.prompt));
  AddInput(&infer, "stream", "BOOL", std::string(1, '\1'));
  AddInput(&infer, "sampling_parameters", "BYTES",
           BytesElement(SamplingJson(request)));
  for (const char* name :
       {"exclude_input_in_output", "return_finish_reason",
        "return_num_input_tokens", "return_num_output_tokens"}) {
    AddInput(&infer, name, "BOOL", std::string(1, '\1'));
  }

  const absl::Time start = absl::Now();
  grpc::ClientContext context;
  // Asks the server to report an error as the call's status.
  context.AddMetadata("triton_grpc_error", "true");
  const auto stream = stub_->ModelStreamInfer(&context);
  TextResult result;
  if (stream->Write(infer)) stream->WritesDone();
  inference::ModelStreamInferResponse response;
  while (stream->Read(&response)) {
    const inference::ModelInferResponse& part = response.infer_response();
    for (int i = 0;
         i < part.outputs_size() && i < part.raw_output_contents_size(); ++i) {
      const std::string& name = part.outputs(i).name();
      const std::string& raw = part.raw_output_contents(i);
      if (name == "text_output") {
        KVASIR_ASSIGN_OR_RETURN(const std::string delta, FirstBytes(raw));
        if (result.text.empty() && !delta.empty()) {
          result.time_to_first_token = absl::Now() - start;
        }
        result.text += delta;
        on_text(delta);
      } else if (name == "finish_reason") {
        KVASIR_ASSIGN_OR_RETURN(const std::string reason, FirstBytes(raw));
        if (!reason.empty()) result.finish_reason = reason;
      } else if (name == "num_input_tokens") {
        result.prompt_tokens = FirstUint32(raw);
      } else if (name == "num_output_tokens") {
        // Each response reports only its own number of tokens.
        result.output_tokens += FirstUint32(raw);
      }
    }
  }
  KVASIR_RETURN_IF_ERROR(Explained(stream->Finish(), context));
  result.total = absl::Now() - start;
  return result;
}

}  // namespace kvasir::cli
