// A GenerateRequest as what is wanted from the engine and how to answer. No
// gRPC, no tokenizer.
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
  // The prompt: one of the two.
  proto::TokenBytes token_ids;
  std::optional<std::string> text;

  // max_tokens 0: as many as there is room for.
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop_strings;
  // For the text in which stop strings are looked for.
  bool skip_special_tokens = false;
  // Many chunks with what is new and a `complete` for each sample, or the
  // `complete`s alone, with everything.
  bool streaming = false;
};

// Zero means "not set" where the protocol has no presence. INVALID_ARGUMENT
// names field, want and have. UNIMPLEMENTED names what would change the result
// and is not built, fields of later versions of the protocol by their numbers.
absl::StatusOr<VllmEngineRequest> ParseVllmEngineRequest(
    const vllm::grpc::engine::GenerateRequest& message);

}  // namespace kvasir::router
