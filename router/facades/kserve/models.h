// Builds the descriptions of models that the KServe facade returns: metadata,
// configuration and the repository index.
#pragma once

#include "proto/inference/grpc_service.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model);

// Returns a model's Triton configuration. It has no batching (max_batch_size 0)
// and decoupled responses. All inputs are optional, because the schema of a
// request determines which it needs. Its one instance group has an entry in
// `gpus` for each replica, because clients compute the number of replicas from
// `gpus`.
inference::ModelConfig KserveConfigOf(const ModelStatus& model);

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model);

}  // namespace kvasir::router
