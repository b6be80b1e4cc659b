#include "server/inspect/follow_evictions.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::cli {
namespace {

constexpr uint64_t kSequence = 1;

// Adds to the trace the evictions that ran just before the last step, at a
// length of `seen` tokens.
absl::Status AddEvictions(worker::Rank& rank,
                          const worker::DirectRunner& runner, int64_t seen,
                          EvictionTrace* trace) {
  for (size_t index = 0; index < trace->layers().size(); ++index) {
    const int64_t layer = trace->layers()[index].layer;
    const auto slots =
        runner.slots(kSequence, rank.plan().layer(layer).page_group);
    if (slots.evicted_at != seen) continue;
    KVASIR_ASSIGN_OR_RETURN(
        const std::vector<uint32_t> positions,
        rank.executor().ReadPositions(layer, slots.pages, slots.kept_slots));
    KVASIR_RETURN_IF_ERROR(trace->Add(index, seen, positions));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<EvictionTrace> FollowEvictions(worker::Rank* rank,
                                              absl::Span<const int32_t> prompt,
                                              const TraceOptions& options) {
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  if (prompt.empty()) {
    return absl::InvalidArgumentError(
        "the text whose evictions are traced has no tokens");
  }
  EvictionTrace trace(rank->plan());
  worker::DirectRunner runner(&rank->executor(), &rank->layout(),
                              rank->pages());
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  runner.SetPrompt(kSequence, prompt_tokens);
  for (int64_t done = 0; done < prompt_tokens + options.output_tokens;
       done = runner.length(kSequence)) {
    worker::DirectStep step = {.sequence_id = kSequence,
                               .sample = worker::GreedySample()};
    if (done < prompt_tokens) {
      const int64_t end =
          runner.next_eviction(kSequence).value_or(prompt_tokens);
      const int64_t count =
          std::min({options.chunk_tokens, prompt_tokens - done, end - done});
      step.token_ids =
          prompt.subspan(static_cast<size_t>(done), static_cast<size_t>(count));
    }
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::StepResult result,
                            runner.Run(absl::MakeConstSpan(&step, 1)));
    if (done > 0) {
      KVASIR_RETURN_IF_ERROR(AddEvictions(*rank, runner, done, &trace));
    }
    const int64_t length = runner.length(kSequence);
    if (length >= prompt_tokens &&
        length < prompt_tokens + options.output_tokens) {
      ids.push_back(result.sequences(0).token_id());
    }
  }
  std::vector<std::string> texts;
  for (const int32_t id : ids) texts.push_back(options.text_of(id));
  trace.SetText(std::move(texts), prompt_tokens);
  return trace;
}

}  // namespace kvasir::cli
