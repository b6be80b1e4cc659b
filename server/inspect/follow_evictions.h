// Runs one text. After every eviction, records which tokens still have a slot
// in the cache.
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
  // How many tokens are generated greedily after the prompt.
  int64_t output_tokens = 0;
  int64_t chunk_tokens = 512;
  // Returns the text of a token, which may contain incomplete characters.
  std::function<std::string(int32_t id)> text_of;
};

// Runs the text and returns its trace, which includes the output tokens. The
// rank must not have run anything before. Errors: INVALID_ARGUMENT if the
// prompt is empty; those of the executor and of EvictionTrace.
absl::StatusOr<EvictionTrace> FollowEvictions(worker::Rank* rank,
                                              absl::Span<const int32_t> prompt,
                                              const TraceOptions& options);

}  // namespace kvasir::cli
