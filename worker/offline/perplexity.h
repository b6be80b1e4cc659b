// Perplexity of a text, computed the way a request is served: through the paged
// cache, in windows.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {

// A text as the model reads it, without special tokens.
struct TokenizedText {
  absl::Span<const int32_t> token_ids;
  // The number of bytes of text that each token stands for.
  absl::Span<const int32_t> token_bytes;
};

struct PerplexityOptions {
  // Tokens of a window, including the BOS token before it; at most the
  // executor's max_model_len. Windows do not overlap; each is a sequence of its
  // own.
  int64_t window_tokens = 0;
  // Tokens of a step; 0: as many as a step takes.
  int64_t chunk_tokens = 0;
  // The token before each window, if the tokenizer begins texts with one.
  // Without it the first token of a window has no context and is not scored.
  std::optional<int32_t> bos_token_id;
  // If above 0, windows overlap: each begins this many tokens after the one
  // before, and only its last `stride_tokens` tokens are scored (in the first
  // window: all). So every token of the text is scored once, after a window of
  // context that is computed anew. 0: windows do not overlap.
  int64_t stride_tokens = 0;
  // Losses are also reported for this many equal parts of each window, or of
  // the whole text if there is a stride.
  int64_t parts = 1;
  std::function<void(int64_t done_tokens, int64_t total_tokens)> progress;
};

// Sums over one part of every window.
struct PerplexityPart {
  double nats = 0;
  int64_t tokens = 0;
  // Two sizes after the part's last token: bytes of the pages in use, and all
  // bytes that the rank has allocated.
  int64_t held_bytes = 0;
  int64_t allocated_bytes = 0;
};

// Results over all scored tokens.
struct PerplexityResult {
  double perplexity = 0;  // exp of the mean loss of a token
  // total loss divided by the bytes of the scored tokens
  double nats_per_byte = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;
  // Sizes of the page pool.
  double kv_bytes_per_token = 0;
  double kv_compression_ratio = 0;  // compared with a dense bf16 cache
  int64_t kv_pool_bytes = 0;        // by the allocator's counter
  int64_t kv_pool_pages = 0;
  int64_t kv_fixed_bytes_per_sequence = 0;
  // For the window that held the most pages: tokens run at that time, and bytes
  // of these pages.
  int64_t kv_held_tokens = 0;
  int64_t kv_held_bytes = 0;
  std::vector<PerplexityPart> parts;
};

// INVALID_ARGUMENT for a window, chunk or stride outside the executor's limits,
// and for a text with nothing to score. Also the errors of the executor.
absl::StatusOr<PerplexityResult> Perplexity(ModelExecutor* executor,
                                            const TokenizedText& text,
                                            const PerplexityOptions& options);

}  // namespace kvasir::worker
