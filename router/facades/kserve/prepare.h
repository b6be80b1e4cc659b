// Turns a parsed request into the router's form: text to ids, words to biases.
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

// Tokenizes, so it must not run on a thread that others wait for. `codec` may
// be null for requests of token ids. INVALID_ARGUMENT for a prompt without
// tokens or one that the tokenizer refuses; UNIMPLEMENTED for a bad word of
// several tokens.
absl::StatusOr<PreparedRequest> PrepareRequest(
    KserveRequest request, std::shared_ptr<const TextCodec> codec,
    std::vector<int32_t> eos_ids, bool in_stream);

// The number of tokens that a sample may get: the requested number or else the
// default, limited by what the prompt leaves. A text counts as one token before
// it is tokenized.
uint32_t MostTokens(const KserveRequest& request, uint32_t default_max_tokens,
                    uint32_t max_model_len);

// INVALID_ARGUMENT if one response cannot hold the requested log probabilities
// of samples of `max_tokens`.
absl::Status CheckResponseSize(const KserveRequest& request,
                               size_t max_response_bytes, uint32_t max_tokens);

}  // namespace kvasir::router
