// Parses a GenerateRequest. The result has the engine's parameters and the form
// of the answer. Uses no gRPC and no tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/sampling.pb.h"
#include "proto/token_bytes.h"
#include "proto/vllm/engine.pb.h"

namespace kvasir::router {

struct VllmEngineRequest {
  // The prompt: either token ids or a text.
  proto::TokenBytes token_ids;
  std::optional<std::string> text;

  // If max_tokens is 0, the client wants as many tokens as fit.
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop_strings;
  // If true, stop strings are searched in a text without special tokens.
  bool skip_special_tokens = false;
  // If true, the answer has chunks with new output, and at the end of each
  // sample a `complete` without tokens. If false, it has only a `complete` with
  // the whole output for each sample.
  bool streaming = false;
};

// A zero in a field without presence means that the field is not set.
// Errors: INVALID_ARGUMENT names the field, the allowed values and the given
// one. UNIMPLEMENTED names a feature that is not implemented and would change
// the result. A field of a later version of the protocol gives UNIMPLEMENTED
// with the field's number.
absl::StatusOr<VllmEngineRequest> ParseVllmEngineRequest(
    const vllm::grpc::engine::GenerateRequest& message);

}  // namespace kvasir::router
