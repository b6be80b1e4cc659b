// Builds the descriptions of models that the KServe facade returns: metadata,
// configuration and the repository index.
#pragma once

#include "proto/inference/grpc_service.pb.h"
#include "router/base/canonical.h"

namespace kvasir::router {

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model);

// Returns a model's Triton configuration. max_batch_size is 0 (no batching),
// and responses are decoupled. All inputs are optional, because each schema
// needs other inputs. The only instance group has an entry in `gpus` for each
// replica, because clients count the replicas there.
inference::ModelConfig KserveConfigOf(const ModelStatus& model);

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model);

}  // namespace kvasir::router
