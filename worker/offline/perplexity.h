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
  // Bytes of the text that each token stands for.
  absl::Span<const int32_t> token_bytes;
};

struct PerplexityOptions {
  // Tokens of a window, the one put before it included; at most the executor's
  // max_model_len. Windows follow one another without overlap; each is a
  // sequence of its own.
  int64_t window_tokens = 0;
  // Tokens of a step; 0: as many as a step takes.
  int64_t chunk_tokens = 0;
  // Put before each window, where the tokenizer begins texts with one. Without
  // it a window's first token has no context and is not scored.
  std::optional<int32_t> bos_token_id;
  // 0: windows follow one another. Else each begins so many tokens after the
  // one before, so that they overlap, and only its last so many tokens are
  // scored (of the first: all): every token of the text once, behind a window
  // of tokens that are run anew for it.
  int64_t stride_tokens = 0;
  // Equal runs of each window's tokens whose losses are told apart; with a
  // stride, of the text's.
  int64_t parts = 1;
  std::function<void(int64_t done_tokens, int64_t total_tokens)> progress;
};

// Of a run of tokens in every window.
struct PerplexityPart {
  double nats = 0;
  int64_t tokens = 0;
  // When the last of them had run: pages taken from the pool, and all that the
  // rank has allocated.
  int64_t held_bytes = 0;
  int64_t allocated_bytes = 0;
};

// Of the tokens that were scored.
struct PerplexityResult {
  double perplexity = 0;     // exp of the mean loss of a token
  double nats_per_byte = 0;  // the loss of all over their bytes
  int64_t tokens = 0;
  int64_t bytes = 0;
  // Of the page pool.
  double kv_bytes_per_token = 0;
  double kv_compression_ratio = 0;  // against a dense bf16 cache
  int64_t kv_pool_bytes = 0;        // by the allocator's counter
  int64_t kv_pool_pages = 0;
  int64_t kv_fixed_bytes_per_sequence = 0;
  // Of the window that held most: tokens it had run then, and bytes of the
  // pages taken from the pool.
  int64_t kv_held_tokens = 0;
  int64_t kv_held_bytes = 0;
  std::vector<PerplexityPart> parts;
};

// INVALID_ARGUMENT for a window or chunk out of the executor's limits, or a
// text with nothing to score; the executor's errors.
absl::StatusOr<PerplexityResult> Perplexity(ModelExecutor* executor,
                                            const TokenizedText& text,
                                            const PerplexityOptions& options);

}  // namespace kvasir::worker
