// Converts a parsed request of the vllm.Inference protocol for the router.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "router/facades/calls/backend.h"
#include "router/facades/calls/single_call.h"
#include "router/facades/text/text_codec.h"
#include "router/facades/vllm_inference/answer.h"
#include "router/facades/vllm_inference/request.h"

namespace kvasir::router {

// Prepares a request. Call it on a thread of the tokenizer, because tokenizing
// may take long. `info` describes the model and is empty if no worker has been
// reached. `codec` is null for a model that accepts only token ids. Then text
// (as input or output) and stop strings are refused with UNIMPLEMENTED.
absl::StatusOr<PreparedCall<VllmInferenceAnswer>> PrepareVllmInferenceCall(
    VllmInferenceRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits);

}  // namespace kvasir::router
