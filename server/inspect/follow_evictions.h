// Runs one text through the engine and reads after every eviction which tokens
// still have a slot.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/inspect/eviction_trace.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

struct TraceOptions {
  // Greedy tokens after the prompt. The end of the prompt is an eviction point;
  // tokens evicted there go before the first output token.
  int64_t output_tokens = 0;
  int64_t chunk_tokens = 512;
  // The text of a token; possibly incomplete characters.
  std::function<std::string(int32_t id)> text_of;
};

// The trace has the prompt's tokens, then the output's. The rank must not have
// run anything yet. Errors: INVALID_ARGUMENT without a prompt; those of the
// executor and of EvictionTrace.
absl::StatusOr<EvictionTrace> FollowEvictions(worker::Rank* rank,
                                              absl::Span<const int32_t> prompt,
                                              const TraceOptions& options);

}  // namespace kvasir::cli
