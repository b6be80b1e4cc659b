#include "worker/testing/graph_steps.h"

#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "base/status_macros.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SampleRequest;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

constexpr int32_t kVocab = 517;
constexpr int64_t kPageTokens = 16;

// The shape of the small model, which can be split over 2 ranks.
model::ModelShape Shape() {
  return {.name = "graph-test",
          .num_layers = 1,
          .hidden_size = 128,
          .intermediate_size = 192,
          .num_query_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 64,
          .vocab_size = kVocab,
          .max_position = 1024};
}

std::vector<int32_t> Ids(int32_t count, int32_t first) {
  std::vector<int32_t> ids;
  ids.reserve(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    ids.push_back((first + 97 * i) % kVocab);
  }
  return ids;
}

// An executor that adds page copies to steps, and keeps each result.
class CopyingExecutor final : public Executor {
 public:
  explicit CopyingExecutor(Executor* executor) : executor_(*executor) {}

  // Copies a page in every page group, as part of the next step.
  void CopyPage(int32_t from, int32_t to, uint32_t groups) {
    for (uint32_t group = 0; group < groups; ++group) {
      kvasir::v1::PageCopy& copy = copies_.emplace_back();
      copy.set_page_group(group);
      copy.set_from_page(from);
      copy.set_to_page(to);
    }
  }
  const std::vector<std::string>& results() const { return results_; }

  absl::Status Enqueue(const StepPlan& given) override {
    StepPlan plan = given;
    plan.mutable_page_copies()->Add(copies_.begin(), copies_.end());
    copies_.clear();
    return executor_.Enqueue(plan);
  }
  absl::StatusOr<StepResult> Await() override {
    KVASIR_ASSIGN_OR_RETURN(StepResult result, executor_.Await());
    results_.push_back(result.SerializeAsString());
    return result;
  }

 private:
  Executor& executor_;
  std::vector<kvasir::v1::PageCopy> copies_;
  std::vector<std::string> results_;
};

// A greedy sample that also reports the log probabilities of the twenty most
// likely ids.
SampleRequest WithTwentyLogprobs() {
  SampleRequest sample = GreedySample();
  sample.set_num_logprobs(20);
  return sample;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Rank>> MakeGraphRank(const GraphRank& options) {
  RankOptions rank;
  rank.page_tokens = kPageTokens;
  rank.kv_cache_bytes = 2 << 20;
  rank.deterministic = options.deterministic;
  rank.executor.max_model_len = options.max_model_len;
  rank.executor.max_num_seqs = 4;
  rank.executor.max_batched_tokens = 32;
  rank.executor.graphs = options.graphs;
  rank.make_device = [&options](base::ThreadPool*, kernels::CpuBackend,
                                int64_t) { return options.make_device(); };
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(Shape()));
  KVASIR_ASSIGN_OR_RETURN(
      const kvasir::v1::KvPlan plan,
      plan::MakePresetPlan(options.plan, model::AttentionShapeOf(spec)));
  KVASIR_ASSIGN_OR_RETURN(
      const auto source,
      RandomSource::Create(Shape(), spec, Resolved(plan, spec), 20261,
                           kernels::DType::kBf16));
  return Rank::Create(spec, plan, source.get(), rank, options.collective);
}

absl::StatusOr<std::vector<std::string>> RunGraphSteps(
    Rank& rank, const std::function<void()>& after_step, size_t most_steps) {
  CopyingExecutor executor(&rank.executor());
  DirectRunner runner(&executor, &rank.layout(), rank.pages());
  const auto run = [&](absl::Span<const DirectStep> steps) -> absl::Status {
    if (executor.results().size() == most_steps) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(runner.Run(steps).status());
    if (after_step) after_step();
    return absl::OkStatus();
  };
  // Runs `times` decode steps of the sequences `ids`.
  const auto decode = [&](absl::Span<const uint64_t> ids, int times,
                          const SampleRequest& sample) -> absl::Status {
    std::vector<DirectStep> steps;
    for (const uint64_t id : ids) {
      steps.push_back({.sequence_id = id, .sample = sample});
    }
    for (int i = 0; i < times; ++i) KVASIR_RETURN_IF_ERROR(run(steps));
    return absl::OkStatus();
  };
  const std::vector<int32_t> prompts[] = {Ids(13, 11), Ids(6, 5), Ids(1, 400)};
  KVASIR_RETURN_IF_ERROR(run({{.sequence_id = 1,
                               .token_ids = prompts[0],
                               .sample = WithTwentyLogprobs()},
                              {.sequence_id = 2,
                               .token_ids = prompts[1],
                               .sample = WithTwentyLogprobs()}}));
  // In these 4 steps sequence 1 grows into a new page.
  KVASIR_RETURN_IF_ERROR(
      decode({1, 2}, 4, WithTwentyLogprobs()));  // 1 capture, 3 replays
  // A step with a prompt is not captured, even if the prompt has one token.
  KVASIR_RETURN_IF_ERROR(
      run({{.sequence_id = 3,
            .token_ids = prompts[2],
            .sample = WithTwentyLogprobs()},
           {.sequence_id = 1, .sample = WithTwentyLogprobs()},
           {.sequence_id = 2, .sample = WithTwentyLogprobs()}}));
  // This makes 1 capture and 1 replay.
  KVASIR_RETURN_IF_ERROR(decode({1, 2, 3}, 2, WithTwentyLogprobs()));
  // Four sequences, then three again. Graphs are captured for padded sizes,
  // which are the same for three and four sequences.
  KVASIR_RETURN_IF_ERROR(
      run({{.sequence_id = 4,
            .token_ids = prompts[1],
            .sample = WithTwentyLogprobs()},
           {.sequence_id = 1, .sample = WithTwentyLogprobs()},
           {.sequence_id = 2, .sample = WithTwentyLogprobs()},
           {.sequence_id = 3, .sample = WithTwentyLogprobs()}}));
  // This makes 1 capture, because the buffer for uploads has moved, and 1
  // replay.
  KVASIR_RETURN_IF_ERROR(decode({1, 2, 3, 4}, 2, WithTwentyLogprobs()));
  runner.Release(4);
  // This makes 1 replay.
  KVASIR_RETURN_IF_ERROR(decode({1, 2, 3}, 1, WithTwentyLogprobs()));
  runner.Release(2);
  // This step has as many sequences as an earlier one, but others.
  KVASIR_RETURN_IF_ERROR(decode({3, 1}, 1, WithTwentyLogprobs()));  // 1 replay
  // A step with page copies is not captured. The copy goes to the pool's last
  // page, which no sequence uses.
  executor.CopyPage(0, static_cast<int32_t>(rank.pages()[0] - 1),
                    static_cast<uint32_t>(rank.pages().size()));
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 1, WithTwentyLogprobs()));  // no graph
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 1, WithTwentyLogprobs()));  // 1 replay
  // These samples ask for a different number of most likely ids, and have
  // penalty histories.
  SampleRequest demanding = GreedySample();
  demanding.set_temperature(0.7f);
  demanding.set_seed(5);
  demanding.set_num_logprobs(3);
  demanding.set_presence_penalty(0.5f);
  demanding.add_banned_ids(7);
  demanding.add_logit_bias()->set_token_id(9);
  demanding.mutable_logit_bias(0)->set_bias(2.0f);
  demanding.set_history_reset(true);
  demanding.add_prompt_history(3);
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 2, demanding));  // 1 capture, 1 replay
  // A history of 65536 tokens, so that the data to upload (the blob) outgrows
  // its buffer and moves to a larger one.
  for (int32_t i = 0; i < 1 << 16; ++i)
    demanding.add_prompt_history(i % kVocab);
  // The move has discarded all graphs, so this step counts as the first of its
  // sizes and is not captured.
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 1, demanding));
  demanding.clear_prompt_history();
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 1, demanding));  // 1 capture, 1 replay
  // This makes 1 capture and 1 replay.
  KVASIR_RETURN_IF_ERROR(decode({1, 3}, 2, WithTwentyLogprobs()));
  runner.Release(3);
  // This makes 1 capture and 2 replays.
  KVASIR_RETURN_IF_ERROR(decode({1}, 3, WithTwentyLogprobs()));
  return executor.results();
}

}  // namespace kvasir::worker
