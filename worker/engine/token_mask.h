// A hook for constrained output: it chooses the mask of allowed tokens before
// each token is sampled.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace kvasir::worker {

struct TokenMaskState {
  std::string_view mask;  // the request's SamplingParams::token_mask
  uint32_t sample_index = 0;
  absl::Span<const int32_t> output_ids;  // all output tokens so far
};

// Threads: the engine's thread makes the calls. A call must not block.
class TokenMaskProvider {
 public:
  virtual ~TokenMaskProvider() = default;
  // Returns the name of the mask for the next token; the mask must be
  // registered with the executor. Empty: every token is allowed.
  virtual std::string NextMask(const TokenMaskState& state) = 0;
};

}  // namespace kvasir::worker
