// Reads vLLM's sampling parameters. Triton's clients send them as a JSON object
// or as parameters of the request. Numbers may also be given as strings.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/map.h"
#include "nlohmann/json.hpp"
#include "proto/inference/grpc_service.pb.h"
#include "router/facades/kserve/request.h"

namespace kvasir::router {

// The largest size of the JSON text. A larger text is refused before it
// is parsed.
inline constexpr size_t kMaxSamplingJsonBytes = 256 << 10;

// Sets the parameters that `json_text` contains and leaves the others
// unchanged. Returns INVALID_ARGUMENT if the text is not a JSON object or a
// value has the wrong type. UNIMPLEMENTED names a parameter that is unknown or
// not implemented.
absl::Status ApplySamplingJson(const std::string& json_text,
                               KserveRequest* request);

// Does the same with the request's own parameters. Skips those that every
// schema has (IsRequestParameter).
absl::Status ApplySamplingParameters(
    const google::protobuf::Map<std::string, inference::InferParameter>&
        parameters,
    KserveRequest* request);

// Reads the request parameter eviction_budget, which all schemas have. Its
// value is a number or a string.
absl::Status ApplyEvictionBudget(const inference::InferParameter& parameter,
                                 KserveRequest* request);

// Returns true for parameters that Triton itself defines (priority, timeout,
// Streaming, ...), and for eviction_budget.
bool IsRequestParameter(const std::string& name);

}  // namespace kvasir::router
