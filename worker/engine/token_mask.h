// Hook for constrained output: decides, token by token, which mask the executor
// applies before it samples.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace kvasir::worker {

struct TokenMaskState {
  std::string_view mask;  // SamplingParams::token_mask of the request
  uint32_t sample_index = 0;
  absl::Span<const int32_t> output_ids;  // so far
};

// Threads: the engine's thread calls. Must not block.
class TokenMaskProvider {
 public:
  virtual ~TokenMaskProvider() = default;
  // Name of a mask registered with the executor, valid for the next token;
  // empty: every token is allowed.
  virtual std::string NextMask(const TokenMaskState& state) = 0;
};

}  // namespace kvasir::worker
