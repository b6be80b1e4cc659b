#include "worker/ranks/text_run.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"
#include "worker/executor/model_executor.h"

namespace kvasir::worker {

absl::StatusOr<std::shared_ptr<const ServedPlan>> ServeDensePlan(
    const TextRank& rank) {
  const auto dtype = rank.device->kind() == kernels::DeviceKind::kCpu
                         ? kvasir::v1::F32
                         : kvasir::v1::BF16;
  const plan::AttentionShape shape = model::AttentionShapeOf(*rank.spec);
  return ServePlan(plan::FullRankPlan(shape, dtype), shape, {},
                   rank.collective->shard());
}

bool HaveEqualWeights(const ServedPlan& a, const ServedPlan& b) {
  const auto names = [](const AttentionProgram& program) {
    std::vector<std::string> all;
    for (const plan::RequiredTensor& tensor : program.tensors) {
      all.push_back(tensor.name);
    }
    return all;
  };
  for (int64_t layer = 0; layer < a.resolved->num_layers(); ++layer) {
    const AttentionProgram& one = a.program(layer);
    const AttentionProgram& other = b.program(layer);
    if (one.projection_columns != other.projection_columns ||
        one.output_columns != other.output_columns ||
        names(one) != names(other)) {
      return false;
    }
  }
  return true;
}

void UsePrograms(const std::shared_ptr<const ServedPlan>& plan,
                 ModelWeights* weights) {
  weights->plan = plan;
  for (size_t layer = 0; layer < weights->layers.size(); ++layer) {
    weights->layers[layer].attention =
        &plan->program(static_cast<int64_t>(layer));
  }
}

absl::Status RunText(const TextRank& rank,
                     const std::shared_ptr<const ServedPlan>& plan,
                     int64_t tokens, TextTaps taps,
                     absl::FunctionRef<absl::Status(DirectRunner& runner)> run,
                     ModelWeights* weights) {
  KVASIR_ASSIGN_OR_RETURN(
      const cache::PageLayout layout,
      cache::PageLayout::Create(
          *plan->resolved,
          {.page_tokens = 64,
           .granule_bytes = rank.device->page_granule_bytes()}));
  const int64_t step_tokens = std::min(tokens, kTextStepTokens);
  const cache::PageCounts pages = layout.PagesForBudget(
      {.budget_bytes = layout.BytesAtLength(tokens, step_tokens),
       .max_model_len = tokens,
       .max_chunk_tokens = step_tokens});
  UsePrograms(plan, weights);
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<ModelExecutor> executor,
      ModelExecutor::Create({.spec = rank.spec,
                             .plan = plan->resolved.get(),
                             .layout = &layout,
                             .pages = pages,
                             .device = rank.device,
                             .stream = rank.stream,
                             .collective = rank.collective},
                            std::move(*weights),
                            {.max_model_len = tokens,
                             .max_num_seqs = 1,
                             .max_batched_tokens = step_tokens,
                             .logits_tap = std::move(taps.logits),
                             .key_tap = std::move(taps.keys)}));
  {
    DirectRunner runner(executor.get(), &layout, pages);
    KVASIR_RETURN_IF_ERROR(run(runner));
  }
  *weights = std::move(*executor).TakeWeights();
  return absl::OkStatus();
}

}  // namespace kvasir::worker
