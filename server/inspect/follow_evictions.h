// Runs one text through the engine and reads back, behind every eviction, which
// tokens' slots are still there.
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
  // Greedy ones behind the prompt. The prompt's end is a point, and what goes
  // there goes before the first of them.
  int64_t output_tokens = 0;
  int64_t chunk_tokens = 512;
  // What a token adds to the text; not necessarily whole characters.
  std::function<std::string(int32_t id)> text_of;
};

// The prompt's tokens, then the output's. The rank has not run anything yet.
// INVALID_ARGUMENT for no prompt; the executor's errors, EvictionTrace's.
absl::StatusOr<EvictionTrace> FollowEvictions(worker::Rank* rank,
                                              absl::Span<const int32_t> prompt,
                                              const TraceOptions& options);

}  // namespace kvasir::cli
