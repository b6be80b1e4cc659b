// Converts a parsed request for the router: tokenizes its text, and replaces
// its bad words by logit biases.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"
#include "router/facades/kserve/request.h"
#include "router/facades/kserve/response.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

struct PreparedRequest {
  proto::TokenBytes prompt;
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  std::optional<proto::EvictionBudget> eviction_budget;
  int32_t priority = 0;
  absl::Duration queue_timeout;
  std::unique_ptr<KserveAnswer> answer;
};

// Prepares a request. Call it on a thread of the tokenizer, because tokenizing
// may take long. `codec` may be null if the prompt is given as token ids.
// Returns INVALID_ARGUMENT if the prompt has no tokens or the tokenizer refuses
// it, NEVER_FITS if it is too long for the model, and UNIMPLEMENTED if a bad
// word has several tokens.
absl::StatusOr<PreparedRequest> PrepareRequest(
    KserveRequest request, std::shared_ptr<const TextCodec> codec,
    const kvasir::v1::WorkerInfo& info, bool in_stream);

// Returns an upper limit of the output tokens of each sample: the requested
// number or the default, but at most what fits after the prompt. A text is not
// tokenized yet, so it counts as one token.
uint32_t MostTokens(const KserveRequest& request, uint32_t default_max_tokens,
                    uint32_t max_model_len);

// Returns INVALID_ARGUMENT if the requested log probabilities of all samples,
// each with `max_tokens` tokens, do not fit into one response.
absl::Status CheckResponseSize(const KserveRequest& request,
                               size_t max_response_bytes, uint32_t max_tokens);

}  // namespace kvasir::router
