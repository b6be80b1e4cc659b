// One generation request as the engine takes it: plain data, no gRPC types.
// Checked once, by ValidateRequest, before it is queued.
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

namespace kvasir::worker {

// Outside of these a penalty turns ordinary logits into infinite ones.
inline constexpr float kMinRepetitionPenalty = 0.01f;
inline constexpr float kMaxRepetitionPenalty = 100.0f;

struct Request {
  // (request_id, attempt) names one live request.
  std::string request_id;
  uint32_t attempt = 0;
  std::string tenant;
  // Separates prefix caches; empty: shared on purpose.
  std::string cache_salt;
  proto::TokenBytes prompt;
  // What earlier attempts already delivered: run again as input, not delivered
  // again. Only with n = 1.
  proto::TokenBytes emitted;
  kvasir::v1::SamplingParams sampling = proto::NeutralSampling();
  // In place of what the served plan keeps; a ratio of 1: nothing is evicted.
  std::optional<proto::EvictionBudget> eviction_budget;
  int32_t priority = 0;  // lower runs first
  absl::Time deadline = absl::InfiniteFuture();
  // May wait so long before its first step; zero: the engine's default.
  absl::Duration queue_timeout = absl::ZeroDuration();
  absl::Time arrival = absl::InfinitePast();  // set by the engine
  // False: neither takes pages of earlier requests nor leaves any for later
  // ones.
  bool use_prefix_cache = true;
};

struct RequestLimits {
  int32_t vocab_size = 0;
  uint32_t max_model_len = 0;  // tokens of prompt and output together
  uint32_t max_n = 16;
  uint32_t max_logprobs = 20;
  uint32_t max_prompt_logprobs = 0;  // the tokens' own only
  uint32_t max_logit_bias = 1024;
  uint32_t max_stop_token_ids = 256;
  uint32_t max_request_id_bytes = 256;
  bool token_masks = false;  // a TokenMaskProvider is there
  EvictionLimits eviction;
};

// INVALID_ARGUMENT naming the field, its value and the limit; UNIMPLEMENTED for
// a token mask where none can be served. Touches every token id once. That the
// prompt fits at all is Admission's to say.
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
