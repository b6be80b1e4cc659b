#include "worker/ranks/plan_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "google/protobuf/util/message_differencer.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"
#include "worker/collective/collective.h"
#include "worker/executor/model_executor.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kFirstTokens = 32;  // of the first step
constexpr int64_t kStepTokens = 128;  // of later steps

kvasir::v1::KvPlan WithoutEvictions(kvasir::v1::KvPlan plan) {
  for (auto& layer : *plan.mutable_layers()) layer.clear_eviction();
  return plan;
}

// Whether both plans compute attention with the same tensors.
bool HaveEqualWeights(const ServedPlan& a, const ServedPlan& b,
                      int64_t num_layers) {
  const auto names = [](const AttentionProgram& program) {
    std::vector<std::string> all;
    for (const plan::RequiredTensor& tensor : program.tensors) {
      all.push_back(tensor.name);
    }
    return all;
  };
  for (int64_t layer = 0; layer < num_layers; ++layer) {
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

// Makes executors with these weights run the programs of `plan`.
void UsePrograms(const std::shared_ptr<const ServedPlan>& plan,
                 ModelWeights* weights) {
  weights->plan = plan;
  for (size_t layer = 0; layer < weights->layers.size(); ++layer) {
    weights->layers[layer].attention =
        &plan->program(static_cast<int64_t>(layer));
  }
}

using Tap = std::function<void(const LogitsRow&)>;

struct Text {
  absl::Span<const int32_t> token_ids;
  // Called after each step with the number of tokens so far and the time that
  // this step took. False ends the run.
  std::function<bool(int64_t tokens, int64_t step_tokens, absl::Duration)>
      goes_on;
};

absl::Status RunSteps(DirectRunner* runner, const Text& text) {
  const auto length = static_cast<int64_t>(text.token_ids.size());
  runner->SetPrompt(1, length);
  for (int64_t done = 0; done < length; done = runner->length(1)) {
    const int64_t count =
        std::min(done == 0 ? kFirstTokens : kStepTokens, length - done);
    const absl::Time start = absl::Now();
    KVASIR_RETURN_IF_ERROR(runner
                               ->Run({{.sequence_id = 1,
                                       .token_ids = text.token_ids.subspan(
                                           static_cast<size_t>(done),
                                           static_cast<size_t>(count))}})
                               .status());
    if (!text.goes_on(done + count, count, absl::Now() - start)) break;
  }
  return absl::OkStatus();
}

// Runs the text as one prompt with the plan's cache. `steps` is set to the
// error of a step, if one fails; the weights are kept then.
absl::Status RunText(const ModelExecutor::Parts& parts,
                     const std::shared_ptr<const ServedPlan>& plan,
                     const Text& text, Tap tap, ModelWeights* weights,
                     absl::Status* steps) {
  const auto length = static_cast<int64_t>(text.token_ids.size());
  KVASIR_ASSIGN_OR_RETURN(
      const cache::PageLayout layout,
      cache::PageLayout::Create(
          *plan->resolved,
          {.page_tokens = 64,
           .granule_bytes = parts.device->page_granule_bytes()}));
  const ModelExecutorOptions options = {.max_model_len = length,
                                        .max_num_seqs = 1,
                                        .max_batched_tokens = kStepTokens,
                                        .logits_tap = std::move(tap)};
  ModelExecutor::Parts own = parts;
  own.plan = plan->resolved.get();
  own.layout = &layout;
  own.pages = layout.PagesForBudget(
      {.budget_bytes = layout.BytesAtLength(length, kStepTokens),
       .max_model_len = length,
       .max_chunk_tokens = kStepTokens});
  UsePrograms(plan, weights);
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<ModelExecutor> executor,
      ModelExecutor::Create(own, std::move(*weights), options));
  {
    DirectRunner runner(executor.get(), &layout, own.pages);
    *steps = RunSteps(&runner, text);
  }
  *weights = std::move(*executor).TakeWeights();
  return absl::OkStatus();
}

// log(sum(exp(logits)))
double LogSum(absl::Span<const float> logits) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit) - static_cast<double>(most));
  }
  return static_cast<double>(most) + std::log(sum);
}

double Divergence(absl::Span<const float> dense, absl::Span<const float> own) {
  const double dense_sum = LogSum(dense);
  const double own_sum = LogSum(own);
  double divergence = 0;
  for (size_t id = 0; id < dense.size(); ++id) {
    const double log_p = static_cast<double>(dense[id]) - dense_sum;
    const double log_q = static_cast<double>(own[id]) - own_sum;
    divergence += std::exp(log_p) * (log_p - log_q);
  }
  return divergence;
}

}  // namespace

bool IsDensePlan(const kvasir::v1::KvPlan& plan,
                 const plan::AttentionShape& shape) {
  const auto equals = [](const auto& a, const auto& b) {
    return google::protobuf::util::MessageDifferencer::Equals(a, b);
  };
  const kvasir::v1::KvPlan kept = WithoutEvictions(plan);
  for (const auto dtype :
       {kvasir::v1::BF16, kvasir::v1::F16, kvasir::v1::F32}) {
    const kvasir::v1::KvPlan dense = plan::FullRankPlan(shape, dtype);
    if (std::equal(kept.layers().begin(), kept.layers().end(),
                   dense.layers().begin(), dense.layers().end(), equals)) {
      return true;
    }
  }
  return false;
}

absl::StatusOr<PlanCheck> ComparePlanWithDense(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    kernels::Device* device, kernels::Stream* stream, int64_t max_model_len,
    const std::string& cache_id, const PlanCheckRequest& request,
    ModelWeights* weights) {
  const absl::Time start = absl::Now();
  PlanCheck check;
  const plan::AttentionShape shape = model::AttentionShapeOf(spec);
  KVASIR_ASSIGN_OR_RETURN(
      const std::shared_ptr<const ServedPlan> own,
      ServePlan(WithoutEvictions(plan->resolved->source), shape, {}));
  KVASIR_ASSIGN_OR_RETURN(
      const std::shared_ptr<const ServedPlan> dense,
      ServePlan(plan::FullRankPlan(shape, kvasir::v1::BF16), shape, {}));
  if (!HaveEqualWeights(*own, *dense, spec.num_layers())) {
    check.skipped = kPlanHasOwnWeights;
    return check;
  }
  const int64_t row_bytes =
      spec.vocab_size * static_cast<int64_t>(sizeof(float));
  const int64_t tokens =
      std::min({static_cast<int64_t>(request.token_ids.size()), max_model_len,
                2 * kMaxPlanCheckBytes / row_bytes});
  if (tokens < 1) {
    check.skipped = "there is no text for this model";
    return check;
  }
  Text text = {.token_ids = absl::MakeConstSpan(request.token_ids)
                                .first(static_cast<size_t>(tokens))};
  const std::string key =
      absl::StrCat(cache_id, " ", device->name(), " ", device->numerics(), " ",
                   absl::StrJoin(text.token_ids, ","));
  if (request.known) {
    if (auto known = request.known(key); known.has_value()) return *known;
  }
  SingleRank single;
  const ModelExecutor::Parts parts = {
      .spec = &spec, .device = device, .stream = stream, .collective = &single};
  // By position; empty if the position is not compared.
  std::vector<std::vector<float>> dense_logits(static_cast<size_t>(tokens));
  const auto keep = [&](const LogitsRow& row) {
    if (row.position < tokens / 2) return;
    dense_logits[static_cast<size_t>(row.position)].assign(row.logits.begin(),
                                                           row.logits.end());
  };
  // The first step is slower than others, so the second one is measured.
  text.goes_on = [&](int64_t done, int64_t step, absl::Duration took) {
    if (done != kFirstTokens + step) return true;
    const absl::Duration whole =
        2 * took * (static_cast<double>(tokens) / static_cast<double>(step));
    if (whole <= request.time_limit) return true;
    check.skipped =
        absl::StrCat("it would take ",
                     absl::FormatDuration(absl::Ceil(whole, absl::Seconds(1))));
    return false;
  };
  absl::Status steps;
  KVASIR_RETURN_IF_ERROR(RunText(parts, dense, text, keep, weights, &steps));
  if (!steps.ok()) {
    check.skipped =
        absl::StrCat("steps with a dense cache fail: ", steps.message());
  }
  const auto compare = [&](const LogitsRow& row) {
    const auto& dense_row = dense_logits[static_cast<size_t>(row.position)];
    if (dense_row.empty()) return;
    check.kl += Divergence(dense_row, row.logits);
    ++check.tokens;
  };
  if (check.skipped.empty()) {
    text.goes_on = [&](int64_t done, int64_t, absl::Duration) {
      if (done == tokens || absl::Now() - start <= 2 * request.time_limit) {
        return true;
      }
      check.skipped = "it took more than twice its time limit";
      return false;
    };
    KVASIR_RETURN_IF_ERROR(RunText(parts, own, text, compare, weights, &steps));
    if (!steps.ok()) check.kl = std::numeric_limits<double>::quiet_NaN();
  }
  UsePrograms(plan, weights);
  if (!check.skipped.empty()) return check;
  if (steps.ok()) check.kl /= static_cast<double>(check.tokens);
  check.duration = absl::Now() - start;
  check.key = key;
  return check;
}

}  // namespace kvasir::worker
