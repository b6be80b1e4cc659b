// Builds the descriptions of models that the KServe facade returns: metadata,
// configuration and the repository index.
#pragma once

#include "proto/inference/grpc_service.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model);

// Returns a model's Triton configuration. It says: no batching (max_batch_size
// 0), decoupled responses, and only optional inputs, because the schema of a
// request determines which it needs. Clients multiply the number of instances
// by the number of `gpus` to get the number of replicas, so there is one
// instance group with an entry in `gpus` for each replica.
inference::ModelConfig KserveConfigOf(const ModelStatus& model);

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model);

}  // namespace kvasir::router
