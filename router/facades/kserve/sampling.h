// vLLM's sampling parameters as they reach a Triton backend: a JSON object, or
// the request's own parameters, whose values may be numbers or strings.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/map.h"
#include "nlohmann/json.hpp"
#include "proto/inference/grpc_service.pb.h"
#include "router/facades/kserve/request.h"

namespace kvasir::router {

// Larger objects are refused before they are parsed.
inline constexpr size_t kMaxSamplingJsonBytes = 256 << 10;

// Sets what `json_text` names and leaves the rest. INVALID_ARGUMENT for text
// that is no JSON object and for values of the wrong kind; UNIMPLEMENTED names
// a parameter that is unknown or not built.
absl::Status ApplySamplingJson(const std::string& json_text,
                               KserveRequest* request);

// The same from the request's parameters, without those that Triton itself
// defines (IsTritonParameter).
absl::Status ApplySamplingParameters(
    const google::protobuf::Map<std::string, inference::InferParameter>&
        parameters,
    KserveRequest* request);

// priority, timeout, Streaming, triton_enable_empty_final_response, ...
bool IsTritonParameter(const std::string& name);

}  // namespace kvasir::router
