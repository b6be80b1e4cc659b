// The KServe facade's descriptions of models: metadata, configuration, index.
#pragma once

#include "proto/inference/grpc_service.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model);

// Unbatched (max_batch_size 0), decoupled, and with optional inputs only: the
// schema determines which tensors a request needs. There is one instance group,
// whose `gpus` has an entry for each replica, because clients multiply the two.
inference::ModelConfig KserveConfigOf(const ModelStatus& model);

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model);

}  // namespace kvasir::router
