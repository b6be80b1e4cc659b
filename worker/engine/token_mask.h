// A hook for constrained output. For each token it chooses the mask that the
// executor applies before it samples.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace kvasir::worker {

struct TokenMaskState {
  std::string_view mask;  // SamplingParams::token_mask of the request
  uint32_t sample_index = 0;
  absl::Span<const int32_t> output_ids;  // sampled until now
};

// Threads: the engine's thread makes the calls. A call must not block.
class TokenMaskProvider {
 public:
  virtual ~TokenMaskProvider() = default;
  // The name of a mask that is registered with the executor, for the next
  // token. Empty: every token is allowed.
  virtual std::string NextMask(const TokenMaskState& state) = 0;
};

}  // namespace kvasir::worker
