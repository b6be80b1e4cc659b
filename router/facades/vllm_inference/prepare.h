// From a parsed request to what the router takes.
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

// Tokenizes what is text: not for a thread that others wait for.
// `info`: of the model; empty where no worker has been reached. `codec` is null
// for a model of token ids alone: text, in or out, and stop strings are then
// UNIMPLEMENTED.
absl::StatusOr<PreparedCall<VllmInferenceAnswer>> PrepareVllmInferenceCall(
    VllmInferenceRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits);

}  // namespace kvasir::router
