// Parses a vllm.GenerateRequest. The result has the engine's parameters and the
// form of the answer. Uses no gRPC and no tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "proto/token_bytes.h"
#include "proto/vllm/inference.pb.h"

namespace kvasir::router {

struct VllmInferenceRequest {
  // The prompt: either token ids or a text.
  proto::TokenBytes token_ids;
  std::optional<std::string> text;

  // If max_tokens is 0, the client wants as many tokens as fit.
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  int32_t priority = 0;
  std::string cache_salt;
  std::string session;
  std::vector<std::string> stop_strings;
  bool include_stop_string = false;
  bool skip_special_tokens = true;

  // If true, the answer has many responses, each with new output. If false, it
  // has one response with the whole output.
  bool streaming = false;
  bool wants_text = true;
  bool wants_ids = false;
  bool wants_logprobs = false;
  // How many of the most likely tokens the client receives with each sampled
  // token. The engine is asked for at least one, because a sampled token's rank
  // is its place among the tokens that the engine reports.
  uint32_t num_candidates = 0;
  bool wants_prompt_ids = false;
};

inline constexpr size_t kMaxCacheSaltBytes = 256;
inline constexpr size_t kMaxSessionBytes = 256;

// A zero in a field without presence means that the field is not set.
// Errors: INVALID_ARGUMENT names the field, the allowed values and the given
// one. UNIMPLEMENTED names a feature that is not implemented and would change
// the result. A field of a later version of the protocol gives UNIMPLEMENTED
// with the field's number.
absl::StatusOr<VllmInferenceRequest> ParseVllmInferenceRequest(
    const vllm::GenerateRequest& message, bool streaming);

}  // namespace kvasir::router
