// Computes the perplexity of a text in windows, each run like a served request:
// in steps, with the paged cache.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {

// A text as tokens, without special tokens.
struct TokenizedText {
  absl::Span<const int32_t> token_ids;
  // The number of bytes of text that each token stands for.
  absl::Span<const int32_t> token_bytes;
};

struct PerplexityOptions {
  // Tokens of a window, including the BOS token before it; at most the
  // executor's max_model_len. Each window is a separate sequence.
  int64_t window_tokens = 0;
  // The most tokens that a step runs; 0: the executor's max_batched_tokens.
  int64_t chunk_tokens = 0;
  // The BOS token to put before each window, if the tokenizer begins texts with
  // one. Without it, a window's first token has no context and is not scored.
  std::optional<int32_t> bos_token_id;
  // 0: windows do not overlap. Above 0, each window begins this many tokens
  // after the previous window. The first window scores all its tokens, and each
  // later window only its last `stride_tokens` tokens. So every token of the
  // text is scored once.
  int64_t stride_tokens = 0;
  // The number of equal parts for which losses are also reported. Without a
  // stride each window is divided, and each part's losses are summed over the
  // windows. With a stride the whole text is divided.
  int64_t parts = 1;
  std::function<void(int64_t done_tokens, int64_t total_tokens)> progress;
};

// Sums over the same part of every window; with a stride, over one part of the
// text.
struct PerplexityPart {
  double nats = 0;
  int64_t tokens = 0;
  // Bytes of the pages in use after the part's last token, and all bytes that
  // the rank had allocated then.
  int64_t held_bytes = 0;
  int64_t allocated_bytes = 0;
};

// Results over all scored tokens.
struct PerplexityResult {
  double perplexity = 0;  // exp of the mean loss per token
  // The total loss, divided by the number of text bytes of the scored tokens.
  double nats_per_byte = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;
  // Bytes of cache per token, and sizes of the page pool.
  double kv_bytes_per_token = 0;
  double kv_compression_ratio = 0;  // compared with a dense bf16 cache
  int64_t kv_pool_bytes = 0;        // counted by the allocator
  int64_t kv_pool_pages = 0;
  int64_t kv_fixed_bytes_per_sequence = 0;
  // Measured when the most pages were in use: the tokens of the current window
  // that had run, and the bytes of the pages in use.
  int64_t kv_held_tokens = 0;
  int64_t kv_held_bytes = 0;
  std::vector<PerplexityPart> parts;
};

// Computes the perplexity of `text`. INVALID_ARGUMENT for options outside the
// executor's limits, and for a text without a token to score. Also the errors
// of the executor.
absl::StatusOr<PerplexityResult> Perplexity(ModelExecutor* executor,
                                            const TokenizedText& text,
                                            const PerplexityOptions& options);

}  // namespace kvasir::worker
