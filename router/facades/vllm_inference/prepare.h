// Turns a parsed request into the router's form.
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

// Tokenizes text, so it must not run on a thread that others wait for. `info`:
// the model's; empty if no worker has been reached. `codec` is null for a model
// that accepts only token ids; then text, in or out, and stop strings are
// UNIMPLEMENTED.
absl::StatusOr<PreparedCall<VllmInferenceAnswer>> PrepareVllmInferenceCall(
    VllmInferenceRequest request, const kvasir::v1::WorkerInfo& info,
    std::shared_ptr<const TextCodec> codec, const FacadeLimits& limits);

}  // namespace kvasir::router
