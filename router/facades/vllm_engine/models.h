// What the facade says of the model that it serves: the protocol's requests
// name none.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/vllm/engine.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

vllm::grpc::engine::HealthCheckResponse VllmHealthOf(
    const RequestRouter& router);

// UNAVAILABLE before a worker has been reached: a gateway keeps what it is told
// first. `gives_tokenizer`: GetTokenizer answers.
absl::StatusOr<vllm::grpc::engine::GetModelInfoResponse> VllmModelInfoOf(
    const ModelStatus& model, bool gives_tokenizer);

vllm::grpc::engine::GetServerInfoResponse VllmServerInfoOf(
    const ModelStatus& model);

// All replicas together, as the one rank that there is for clients.
vllm::grpc::engine::SchedulerLoad VllmLoadOf(const ModelStatus& model);

}  // namespace kvasir::router
