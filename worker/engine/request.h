// One generation request, as plain data without gRPC. ValidateRequest checks it
// once, before it is queued.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/eviction_budget.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/sampling.h"
#include "proto/token_bytes.h"
#include "worker/engine/eviction_limits.h"
#include "worker/executor/step/sampling_limits.h"

namespace kvasir::worker {

struct Request {
  // (request_id, attempt) identifies a live request.
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // Requests share cached prefixes only if their salts are equal.
  std::string cache_salt;
  proto::TokenBytes prompt;
  // Output that earlier attempts delivered. It runs again as input and is not
  // delivered again. Only with n = 1.
  proto::TokenBytes emitted;
  kvasir::v1::SamplingParams sampling = proto::NeutralSampling();
  // Replaces the budget of the served plan. A ratio of 1 evicts nothing.
  std::optional<proto::EvictionBudget> eviction_budget;
  int32_t priority = 0;  // lower runs first
  absl::Time deadline = absl::InfiniteFuture();
  // The longest wait before the first step. Zero: the engine's default.
  absl::Duration queue_timeout = absl::ZeroDuration();
  absl::Time arrival = absl::InfinitePast();  // set by the engine
  // If false, the request neither reuses cached pages nor leaves any for later
  // requests.
  bool use_prefix_cache = true;
};

struct RequestLimits {
  int32_t vocab_size = 0;
  uint32_t max_model_len = 0;  // tokens of prompt and output together
  uint32_t max_n = 16;
  uint32_t max_logprobs = 20;
  // Alternatives to each prompt token. 0: only the token's own log probability.
  uint32_t max_prompt_logprobs = 0;
  uint32_t max_logit_bias = 1024;
  uint32_t max_stop_token_ids = 256;
  uint32_t max_request_id_bytes = 256;
  bool token_masks = false;  // whether there is a TokenMaskProvider
  EvictionLimits eviction;
};

// INVALID_ARGUMENT names the field, its value and the limit. UNIMPLEMENTED: the
// request has a token mask, but the limits allow none. Reads every token id
// once. Admission has checked before that the prompt fits the model.
absl::Status ValidateRequest(const Request& request,
                             const RequestLimits& limits);

// Why a request was not taken, or ended without finishing.
struct Refusal {
  absl::Status status;
  // REFUSAL_UNSPECIFIED: the request is wrong by itself (INVALID_ARGUMENT) or
  // its time is up (DEADLINE_EXCEEDED).
  kvasir::v1::Refusal::Reason reason = kvasir::v1::Refusal::REFUSAL_UNSPECIFIED;

  bool ok() const { return status.ok(); }
};

}  // namespace kvasir::worker
