// Parses a GenerateRequest into the engine's parameters and the form of the
// answer. No gRPC, no tokenizer.
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
  // For the text that is searched for stop strings.
  bool skip_special_tokens = false;
  // Many chunks with new output and a `complete` for each sample, or only the
  // `complete`s, with everything.
  bool streaming = false;
};

// Zero means "not set" for fields without presence. INVALID_ARGUMENT names the
// field, the wanted and the given value. UNIMPLEMENTED names something that
// would change the result and is not built; fields of later versions of the
// protocol by their numbers.
absl::StatusOr<VllmEngineRequest> ParseVllmEngineRequest(
    const vllm::grpc::engine::GenerateRequest& message);

}  // namespace kvasir::router
