// What the KServe facade says about models: metadata, configuration, index.
#pragma once

#include "proto/inference/grpc_service.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model);

// Unbatched (max_batch_size 0), decoupled, every input optional: which tensors
// a request needs depends on its schema. One instance group whose `gpus` has
// an entry for each replica, because clients multiply the two.
inference::ModelConfig KserveConfigOf(const ModelStatus& model);

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model);

}  // namespace kvasir::router
