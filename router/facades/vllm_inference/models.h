// Builds the descriptions of the server and its model that vllm.Control
// returns.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/vllm/control.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Returns UNAVAILABLE before a worker has been reached, because gateways keep
// the first answer.
absl::StatusOr<vllm::ServerInfo> ControlServerInfoOf(
    const ModelStatus& model, const std::string& server_version);

// `names`: the model under all of its names. `has_tokenizer`: whether prompts
// may be text.
vllm::ModelInfo ControlModelInfoOf(const ModelStatus& model,
                                   const std::vector<ModelStatus>& names,
                                   bool has_tokenizer);

}  // namespace kvasir::router
