// vLLM's sampling parameters as a Triton backend receives them: a JSON object,
// or the request's own parameters, whose values may be numbers or strings.
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

// Sets the parameters in `json_text` and leaves the rest. INVALID_ARGUMENT for
// text that is not a JSON object and for values of the wrong kind;
// UNIMPLEMENTED names a parameter that is unknown or not built.
absl::Status ApplySamplingJson(const std::string& json_text,
                               KserveRequest* request);

// The same from the request's parameters, except those that every schema has
// (IsRequestParameter).
absl::Status ApplySamplingParameters(
    const google::protobuf::Map<std::string, inference::InferParameter>&
        parameters,
    KserveRequest* request);

// Reads the request's parameter eviction_budget, in any schema: a number or a
// string.
absl::Status ApplyEvictionBudget(const inference::InferParameter& parameter,
                                 KserveRequest* request);

// Returns true for parameters that Triton itself defines (priority, timeout,
// Streaming, ...), and for eviction_budget.
bool IsRequestParameter(const std::string& name);

}  // namespace kvasir::router
