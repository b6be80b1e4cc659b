#include "worker/offline/perplexity.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::worker {
namespace {

// Bytes of the pages that the runner's sequences use now.
int64_t HeldBytes(const KvArenas& arenas, const DirectRunner& runner) {
  int64_t bytes = 0;
  for (int64_t group = 0; group < arenas.num_page_groups(); ++group) {
    bytes += (arenas.num_pages()[static_cast<size_t>(group)] -
              runner.free_pages(group)) *
             arenas.page_bytes(group);
  }
  return bytes;
}

void CountPool(const ModelExecutor& executor, PerplexityResult* result) {
  result->kv_bytes_per_token = executor.kv_bytes_per_token();
  result->kv_compression_ratio = executor.kv_compression_ratio();
  result->kv_fixed_bytes_per_sequence =
      executor.layout().fixed_bytes_per_sequence();
  result->kv_pool_bytes =
      executor.allocator().use(kernels::MemoryTag::kKvCache).bytes;
  for (const int64_t pages : executor.arenas().num_pages()) {
    result->kv_pool_pages += pages;
  }
}

// Runs one window and scores ids[1 + unscored] and all later ids, each with all
// ids before it as context. The last id is only a target. For every step that
// scores, calls `scored` with the index of the step's first input and the log
// probabilities.
absl::Status ScoreWindow(
    DirectRunner* runner, uint64_t sequence_id, absl::Span<const int32_t> ids,
    int64_t unscored, int64_t chunk,
    absl::FunctionRef<void(int64_t first, absl::Span<const float> logprobs)>
        scored) {
  const auto num_inputs = static_cast<int64_t>(ids.size()) - 1;
  runner->SetPrompt(sequence_id, num_inputs);
  for (int64_t start = 0; start < num_inputs;
       start = runner->length(sequence_id)) {
    const auto first = static_cast<size_t>(start);
    const int64_t point =
        runner->next_eviction(sequence_id).value_or(num_inputs);
    const bool scores = start >= unscored;
    const int64_t end = scores ? num_inputs : unscored;
    const auto count =
        static_cast<size_t>(std::min({chunk, end - start, point - start}));
    DirectStep step = {.sequence_id = sequence_id,
                       .token_ids = ids.subspan(first, count)};
    if (scores) step.target_ids = ids.subspan(first + 1, count);
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::StepResult result,
                            runner->Run(absl::MakeConstSpan(&step, 1)));
    if (scores) scored(start, result.sequences(0).target_logprobs());
  }
  runner->Release(sequence_id);
  return absl::OkStatus();
}

absl::Status CheckOptions(const TokenizedText& text,
                          const ModelExecutorOptions& limits,
                          const PerplexityOptions& options) {
  if (text.token_ids.size() != text.token_bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("perplexity: the text has ", text.token_ids.size(),
                     " token ids, but the byte lengths of ",
                     text.token_bytes.size(), " tokens"));
  }
  if (options.window_tokens < 2 ||
      options.window_tokens > limits.max_model_len) {
    return absl::InvalidArgumentError(absl::StrCat(
        "perplexity: a window must have 2 to ", limits.max_model_len,
        " tokens, but has ", options.window_tokens));
  }
  if (options.chunk_tokens < 0 ||
      options.chunk_tokens > limits.max_batched_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "perplexity: a chunk must have 1 to ", limits.max_batched_tokens,
        " tokens, but has ", options.chunk_tokens));
  }
  if (options.stride_tokens < 0 ||
      options.stride_tokens >= options.window_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "perplexity: the stride must be 0 or more and less than the window's ",
        options.window_tokens, " tokens, but is ", options.stride_tokens));
  }
  const int64_t whole = options.stride_tokens > 0
                            ? static_cast<int64_t>(text.token_ids.size())
                            : options.window_tokens;
  if (options.parts < 1 || options.parts >= whole) {
    return absl::InvalidArgumentError(
        absl::StrCat("perplexity: the number of parts of a ",
                     options.stride_tokens > 0 ? "text" : "window",
                     " must be 1 to ", whole - 1, ", but is ", options.parts));
  }
  return absl::OkStatus();
}

// Adds the losses of a step to the parts. The parts divide a list of
// `tokens` inputs equally. `first` is the index, in that list, of the step's
// first input.
void AddToParts(int64_t first, absl::Span<const float> logprobs, int64_t tokens,
                std::vector<PerplexityPart>* parts) {
  const auto num_parts = static_cast<int64_t>(parts->size());
  for (const float logprob : logprobs) {
    PerplexityPart& part =
        (*parts)[static_cast<size_t>(first++ * num_parts / tokens)];
    part.nats -= static_cast<double>(logprob);
    ++part.tokens;
  }
}

}  // namespace

absl::StatusOr<PerplexityResult> Perplexity(ModelExecutor* executor,
                                            const TokenizedText& text,
                                            const PerplexityOptions& options) {
  const ModelExecutorOptions& limits = executor->options();
  KVASIR_RETURN_IF_ERROR(CheckOptions(text, limits, options));
  const int64_t chunk = options.chunk_tokens > 0 ? options.chunk_tokens
                                                 : limits.max_batched_tokens;
  const bool has_bos = options.bos_token_id.has_value();
  const int64_t text_per_window = options.window_tokens - (has_bos ? 1 : 0);
  DirectRunner runner(executor, &executor->layout(),
                      executor->arenas().num_pages(), executor->last_step_id());

  PerplexityResult result;
  result.parts.resize(static_cast<size_t>(options.parts));
  const auto total = static_cast<int64_t>(text.token_ids.size());
  std::vector<int32_t> ids;
  uint64_t sequence_id = 0;
  const bool strides = options.stride_tokens > 0;
  // Each window scores the tokens [start, end) of the text.
  int64_t end = 0;
  for (int64_t start = 0; start < total; start = end) {
    end = std::min(total, strides && start > 0 ? start + options.stride_tokens
                                               : start + text_per_window);
    const int64_t begin =
        strides ? std::max<int64_t>(0, end - text_per_window) : start;
    const auto first = text.token_ids.begin() + begin;
    const int64_t count = end - begin;
    ids.clear();
    if (has_bos) ids.push_back(*options.bos_token_id);
    ids.insert(ids.end(), first, first + count);
    const auto inputs = static_cast<int64_t>(ids.size()) - 1;
    // An input's target is the token after it, so the first input with a target
    // is the one before `start`.
    const int64_t unscored =
        start > begin ? start - begin - (has_bos ? 0 : 1) : 0;
    // The parts divide the inputs of this window or, with a stride, the inputs
    // of the whole text. `whole` is the number of inputs that are divided, and
    // `before` says how many of them precede this window.
    const int64_t before = strides ? begin : 0;
    const int64_t whole = strides ? total - (has_bos ? 0 : 1) : inputs;
    const auto scored = [&](int64_t from, absl::Span<const float> logprobs) {
      AddToParts(before + from, logprobs, whole, &result.parts);
      const int64_t done = from + static_cast<int64_t>(logprobs.size());
      const int64_t bytes = HeldBytes(executor->arenas(), runner);
      const auto part_of = [&](int64_t input) {
        return static_cast<size_t>((before + input) * options.parts / whole);
      };
      for (size_t part = part_of(from); part <= part_of(done - 1); ++part) {
        result.parts[part].held_bytes = bytes;
        result.parts[part].allocated_bytes =
            executor->allocator().total_use().bytes;
      }
      if (options.progress) options.progress(begin + done, total);
      if (bytes < result.kv_held_bytes) return;
      result.kv_held_bytes = bytes;
      result.kv_held_tokens = std::max(result.kv_held_tokens, done);
    };
    KVASIR_RETURN_IF_ERROR(
        ScoreWindow(&runner, ++sequence_id, ids, unscored, chunk, scored));
    // Without a BOS token the window's first token has no context, so it is not
    // scored.
    for (int64_t i = std::max(start, begin + (has_bos ? 0 : 1)); i < end; ++i) {
      result.bytes += text.token_bytes[static_cast<size_t>(i)];
    }
    if (options.progress) options.progress(end, total);
  }
  double nats = 0;
  for (const PerplexityPart& part : result.parts) {
    nats += part.nats;
    result.tokens += part.tokens;
  }
  // An empty step releases the last window's sequence in the executor.
  KVASIR_RETURN_IF_ERROR(runner.Run({}).status());
  if (result.tokens == 0 || result.bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("perplexity: nothing to score in a text of ", total,
                     " tokens: no token both follows another one and stands "
                     "for at least 1 byte"));
  }
  result.perplexity = std::exp(nats / static_cast<double>(result.tokens));
  result.nats_per_byte = nats / static_cast<double>(result.bytes);
  CountPool(*executor, &result);
  return result;
}

}  // namespace kvasir::worker
