// Builds descriptions of the model that the facade serves. The facade serves
// only one model, because the protocol's requests do not name a model.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/vllm/engine.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

vllm::grpc::engine::HealthCheckResponse VllmHealthOf(
    const RequestRouter& router);

// Returns UNAVAILABLE if no worker has been reached yet. It does not guess,
// because gateways keep the first answer. `serves_tokenizer` says whether
// clients can fetch the tokenizer with GetTokenizer.
absl::StatusOr<vllm::grpc::engine::GetModelInfoResponse> VllmModelInfoOf(
    const ModelStatus& model, bool serves_tokenizer);

vllm::grpc::engine::GetServerInfoResponse VllmServerInfoOf(
    const ModelStatus& model);

// Returns the load of all replicas together: clients see them as a single
// data-parallel rank.
vllm::grpc::engine::SchedulerLoad VllmLoadOf(const ModelStatus& model);

}  // namespace kvasir::router
