#include "bench/tool/engine.h"

#include <algorithm>
#include <utility>

#include "base/cli/progress.h"
#include "base/status_macros.h"
#include "bench/cache_reads.h"
#include "bench/random_latents.h"
#include "worker/ranks/group/result_hash.h"

namespace kvasir::cli {

absl::StatusOr<std::unique_ptr<BenchEngine>> BenchEngine::Create(
    const BenchEngineOptions& options) {
  auto engine = std::unique_ptr<BenchEngine>(new BenchEngine());
  engine->max_batched_tokens_ = options.max_batched_tokens;
  engine->quiet_ = options.quiet;
  Progress progress("loading weights", 0, "MiB", !options.quiet);
  KVASIR_ASSIGN_OR_RETURN(
      engine->model_,
      LoadedModel::Load({.model = options.model,
                         .max_model_len = options.max_model_len,
                         .max_num_seqs = options.max_num_seqs,
                         .max_batched_tokens = options.max_batched_tokens,
                         .prefix_reuse = false,
                         .plan = options.plan,
                         .stretch_positions = true,
                         .profile = &engine->profile_,
                         .group = options.group,
                         .progress = [&progress](int64_t done, int64_t) {
                           progress.Update(done >> 20);
                         }}));
  progress.Finish();
  worker::Rank& rank = engine->model_->rank();
  engine->runner_ = std::make_unique<worker::DirectRunner>(
      &rank.executor(), &rank.layout(), rank.pages(),
      rank.executor().last_step_id());
  return engine;
}

int32_t BenchEngine::RandomToken() {
  random_ = random_ * 6364136223846793005u + 1442695040888963407u;
  return static_cast<int32_t>(
      (random_ >> 33) %
      static_cast<uint64_t>(model_->rank().spec().vocab_size));
}

absl::Status BenchEngine::Prefill(uint64_t sequence_id, int64_t num_tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens));
  for (int32_t& id : ids) id = RandomToken();
  prompt_tokens_ = num_tokens;
  runner_->SetPrompt(sequence_id, num_tokens);
  for (int64_t done = 0, count = 0; done < num_tokens; done += count) {
    const int64_t end =
        std::min(done + max_batched_tokens_,
                 runner_->next_eviction(sequence_id).value_or(num_tokens));
    count = std::min(end, num_tokens) - done;
    worker::DirectStep step;
    step.sequence_id = sequence_id;
    step.token_ids = absl::MakeConstSpan(ids).subspan(
        static_cast<size_t>(done), static_cast<size_t>(count));
    if (done + count == num_tokens) step.sample = worker::GreedySample();
    KVASIR_RETURN_IF_ERROR(runner_->Run({step}).status());
  }
  return absl::OkStatus();
}

absl::Status BenchEngine::FillWithRandomLatents(int64_t count,
                                                int64_t num_tokens) {
  const worker::KvArenas& arenas = model_->rank().executor().arenas();
  Progress progress("random latents",
                    static_cast<int64_t>(arenas.layers().size()), "layers",
                    !quiet_);
  uint64_t seed = 1;
  int64_t done = 0;
  for (const worker::KvArenas::Layer& layer : arenas.layers()) {
    KVASIR_RETURN_IF_ERROR(bench::FillWithRandomLatents(
        layer, arenas.num_pages()[static_cast<size_t>(layer.page_group)],
        model_->layout().page_tokens(), seed += 100, model_->rank().device()));
    progress.Update(++done);
  }
  // Fill exact rows (tokens stored without codes) after all codes. They may lie
  // in another layer's memory, where filling in codes would overwrite them.
  for (const worker::KvArenas::Layer& layer : arenas.layers()) {
    KVASIR_RETURN_IF_ERROR(bench::FillWithRandomExactRows(
        arenas, layer, seed += 100, model_->rank().device()));
  }
  return Restart(count, num_tokens);
}

absl::Status BenchEngine::Restart(int64_t count, int64_t num_tokens) {
  prompt_tokens_ = num_tokens;
  for (int64_t i = 1; i <= count; ++i) {
    runner_->Release(static_cast<uint64_t>(i));
    runner_->StartAt(static_cast<uint64_t>(i), num_tokens);
  }
  return absl::OkStatus();
}

absl::Status BenchEngine::Decode(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::vector<worker::DirectStep> steps(static_cast<size_t>(count));
  double kv_bytes = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = RandomToken();
    steps[i].sequence_id = i + 1;
    steps[i].token_ids = absl::MakeConstSpan(&ids[i], 1);
    steps[i].sample = worker::GreedySample();
    steps[i].output = true;
    kv_bytes += bench::CacheBytesRead(
        model_->layout(), runner_->length(i + 1) + 1, prompt_tokens_);
  }
  KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::StepResult result,
                          runner_->Run(steps));
  results_hash_ =
      results_hash_ * 6364136223846793005u + worker::ResultHash(result);
  kv_bytes_read_ += static_cast<int64_t>(kv_bytes);
  return absl::OkStatus();
}

}  // namespace kvasir::cli
