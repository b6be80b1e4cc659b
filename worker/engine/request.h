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
  // A live request is identified by its request_id together with its attempt.
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // Requests share cached prefixes only if their salts are equal.
  std::string cache_salt;
  proto::TokenBytes prompt;
  // Output tokens that earlier attempts of this request have delivered. They
  // are input, like the prompt, and are not delivered again. Allowed only with
  // n = 1.
  proto::TokenBytes emitted;
  kvasir::v1::SamplingParams sampling = proto::NeutralSampling();
  // Replaces the eviction budget of the served plan. With a ratio of 1 nothing
  // is evicted.
  std::optional<proto::EvictionBudget> eviction_budget;
  int32_t priority = 0;  // requests with lower values run first
  absl::Time deadline = absl::InfiniteFuture();
  // The longest time that the request may wait for its first step. Zero: the
  // engine's default.
  absl::Duration queue_timeout = absl::ZeroDuration();
  absl::Time arrival = absl::InfinitePast();  // set by the engine
  // If false, the request neither reuses cached pages nor adds its own pages to
  // the prefix cache.
  bool use_prefix_cache = true;
};

struct RequestLimits {
  int32_t vocab_size = 0;
  uint32_t max_model_len = 0;  // prompt and output tokens together
  uint32_t max_n = 16;
  uint32_t max_logprobs = 20;
  // The most alternatives whose log probabilities are returned for each prompt
  // token. 0: only the token's own log probability is allowed.
  uint32_t max_prompt_logprobs = 0;
  uint32_t max_logit_bias = 1024;
  uint32_t max_stop_token_ids = 256;
  uint32_t max_request_id_bytes = 256;
  bool token_masks = false;  // whether the engine has a TokenMaskProvider
  EvictionLimits eviction;
};

// Returns INVALID_ARGUMENT with the field, its value and the limit; or
// UNIMPLEMENTED if the request has a token mask but the limits allow none.
// Takes time proportional to the prompt's length. Does not check whether the
// prompt leaves room for output, which Admission does first.
absl::Status ValidateRequest(const Request& request,
                             const RequestLimits& limits);

// Says why a request was not accepted, or why it ended early.
struct Refusal {
  absl::Status status;
  // REFUSAL_UNSPECIFIED if a retry cannot help, for example because the request
  // is invalid or its deadline has passed.
  kvasir::v1::Refusal::Reason reason = kvasir::v1::Refusal::REFUSAL_UNSPECIFIED;

  bool ok() const { return status.ok(); }
};

}  // namespace kvasir::worker
