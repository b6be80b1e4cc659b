// Builds descriptions of the served model. There is only one, because this
// protocol's requests do not name a model.
#pragma once

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/vllm/engine.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

vllm::grpc::engine::HealthCheckResponse VllmHealthOf(
    const RequestRouter& router);

// Returns UNAVAILABLE if no worker has been reached yet. It never guesses,
// because gateways keep the first answer. If `serves_tokenizer`, clients can
// download the tokenizer with GetTokenizer.
absl::StatusOr<vllm::grpc::engine::GetModelInfoResponse> VllmModelInfoOf(
    const ModelStatus& model, bool serves_tokenizer);

vllm::grpc::engine::GetServerInfoResponse VllmServerInfoOf(
    const ModelStatus& model);

// Returns the total load of all replicas, which clients see as a single
// data-parallel rank.
vllm::grpc::engine::SchedulerLoad VllmLoadOf(const ModelStatus& model);

}  // namespace kvasir::router
