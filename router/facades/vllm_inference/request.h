// Parses a vllm.GenerateRequest into the engine's parameters and the form of
// the answer. No gRPC, no tokenizer.
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
  // The prompt: one of the two.
  proto::TokenBytes token_ids;
  std::optional<std::string> text;

  // max_tokens 0: as many as there is room for.
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  int32_t priority = 0;
  std::string cache_salt;
  std::vector<std::string> stop_strings;
  bool include_stop_string = false;
  bool skip_special_tokens = true;

  // Many responses with new output, or one with everything.
  bool streaming = false;
  bool wants_text = true;
  bool wants_ids = false;
  bool wants_logprobs = false;
  // The most likely tokens to return with each sampled one. The engine may be
  // asked for more, because a token's rank is its place among them.
  uint32_t num_candidates = 0;
  bool wants_prompt_ids = false;
};

inline constexpr size_t kMaxCacheSaltBytes = 256;

// Zero means "not set" for fields without presence. INVALID_ARGUMENT names the
// field, the wanted and the given value. UNIMPLEMENTED names something that
// would change the result and is not built; fields of later versions of the
// protocol by their numbers.
absl::StatusOr<VllmInferenceRequest> ParseVllmInferenceRequest(
    const vllm::GenerateRequest& message, bool streaming);

}  // namespace kvasir::router
