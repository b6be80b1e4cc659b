// Describes the one model that the facade serves; the protocol's requests name
// none.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/vllm/engine.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

vllm::grpc::engine::HealthCheckResponse VllmHealthOf(
    const RequestRouter& router);

// UNAVAILABLE before a worker has been reached, because gateways keep the first
// answer. `serves_tokenizer`: GetTokenizer answers.
absl::StatusOr<vllm::grpc::engine::GetModelInfoResponse> VllmModelInfoOf(
    const ModelStatus& model, bool serves_tokenizer);

vllm::grpc::engine::GetServerInfoResponse VllmServerInfoOf(
    const ModelStatus& model);

// All replicas together, which clients see as one rank.
vllm::grpc::engine::SchedulerLoad VllmLoadOf(const ModelStatus& model);

}  // namespace kvasir::router
