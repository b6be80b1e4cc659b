// Builds the descriptions of the server and its model that
// vllm.Control returns.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/vllm/control.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

// Returns UNAVAILABLE if no worker has been reached yet. It never guesses,
// because gateways keep the first answer.
absl::StatusOr<vllm::ServerInfo> ControlServerInfoOf(
    const ModelStatus& model, const std::string& server_version);

// `names` has an entry for each served name of the model. If `has_tokenizer`,
// prompts may be text.
vllm::ModelInfo ControlModelInfoOf(const ModelStatus& model,
                                   const std::vector<ModelStatus>& names,
                                   bool has_tokenizer);

}  // namespace kvasir::router
