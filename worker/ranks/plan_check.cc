#include "worker/ranks/plan_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "google/protobuf/util/message_differencer.h"
#include "kernels/device/read_back.h"
#include "kernels/device/workspace.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"
#include "worker/collective/collective.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kFirstTokens = 32;  // tokens in the first step

kvasir::v1::KvPlan WithoutEvictions(kvasir::v1::KvPlan plan) {
  for (auto& layer : *plan.mutable_layers()) layer.clear_eviction();
  return plan;
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

PlanComparison::PlanComparison(const TextRank& rank,
                               const PlanCheckRequest& request)
    : rank_(rank),
      request_(request),
      shape_(model::AttentionShapeOf(*rank.spec)) {
  const int64_t row_bytes =
      rank.spec->vocab_size * static_cast<int64_t>(sizeof(float));
  tokens_ = std::min(static_cast<int64_t>(request.token_ids.size()),
                     rank.max_model_len);
  first_ = std::max(tokens_ / 2, tokens_ - request.most_bytes / row_bytes);
  if (tokens_ < 1) {
    skipped_ = "there is no text for this model";
  } else if (first_ >= tokens_) {
    skipped_ = absl::StrCat("the logits of one token take ", row_bytes,
                            " bytes, limit ", request.most_bytes);
  }
}

absl::StatusOr<PlanCheck> PlanComparison::Compare(
    const std::shared_ptr<const ServedPlan>& plan, const std::string& cache_id,
    ModelWeights* weights) {
  const absl::Time start = absl::Now();
  const kvasir::v1::KvPlan& source = plan->resolved->source;
  const plan::TpShard shard = rank_.collective->shard();
  PlanCheck check = {.plan = source.method(),
                     .is_dense = IsDensePlan(source, shape_)};
  const absl::Cleanup use = [&] { UsePrograms(plan, weights); };
  if (check.is_dense) return check;
  KVASIR_ASSIGN_OR_RETURN(
      const std::shared_ptr<const ServedPlan> own,
      ServePlan(WithoutEvictions(source), shape_, {}, shard));
  if (dense_ == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(dense_, ServeDensePlan(rank_));
  }
  if (!HaveEqualWeights(*own, *dense_)) {
    check.skipped = kPlanHasOwnWeights;
    return check;
  }
  std::string key;
  if (shard.size == 1 && skipped_.empty()) {
    key = absl::StrCat(cache_id, " ", rank_.device->name(), " ",
                       rank_.device->numerics(), " ",
                       absl::StrJoin(absl::MakeConstSpan(request_.token_ids)
                                         .first(static_cast<size_t>(tokens_)),
                                     ","));
    if (request_.known) {
      if (auto known = request_.known(key); known.has_value()) {
        known->plan = check.plan;
        return *known;
      }
    }
  }
  KVASIR_RETURN_IF_ERROR(RunDense(weights));
  check.skipped = skipped_;
  if (!check.skipped.empty()) return check;

  const auto compare = [&](const LogitsRow& row) {
    const auto& dense_row = dense_logits_[static_cast<size_t>(row.position)];
    if (dense_row.empty()) return;
    check.kl += Divergence(dense_row, row.logits);
    ++check.tokens;
  };
  most_time_ = 2 * request_.time_limit;
  KVASIR_RETURN_IF_ERROR(RunSteps(own, compare, weights));
  if (too_slow_) {
    check.skipped =
        absl::StrCat("it would take more than ",
                     absl::FormatDuration(most_time_), ", twice its limit");
    return check;
  }
  check.kl = failed_ ? std::numeric_limits<double>::quiet_NaN()
                     : check.kl / static_cast<double>(check.tokens);
  check.duration = absl::Now() - start;
  check.key = std::move(key);
  return check;
}

absl::Status PlanComparison::RunDense(ModelWeights* weights) {
  if (!skipped_.empty() || !dense_logits_.empty()) return absl::OkStatus();
  dense_logits_.resize(static_cast<size_t>(tokens_));
  const auto keep = [this](const LogitsRow& row) {
    if (row.position < first_) return;
    dense_logits_[static_cast<size_t>(row.position)].assign(row.logits.begin(),
                                                            row.logits.end());
  };
  // The limit is for two runs, which take about the same time: this run with
  // the dense cache, and the run with the plan's cache.
  most_time_ = request_.time_limit / 2;
  KVASIR_RETURN_IF_ERROR(RunSteps(dense_, keep, weights));
  if (too_slow_) {
    skipped_ = absl::StrCat(
        "it would take ",
        absl::FormatDuration(absl::Ceil(2 * predicted_, absl::Seconds(1))),
        ", the limit is ", absl::FormatDuration(request_.time_limit));
  } else if (failed_) {
    skipped_ = "numbers with a dense cache are not finite";
  }
  return absl::OkStatus();
}

absl::Status PlanComparison::RunSteps(
    const std::shared_ptr<const ServedPlan>& plan,
    std::function<void(const LogitsRow&)> tap, ModelWeights* weights) {
  return RunText(
      rank_, plan, tokens_, {.logits = std::move(tap)},
      [this](DirectRunner& runner) { return RunSteps(runner); }, weights);
}

absl::Status PlanComparison::RunSteps(DirectRunner& runner) {
  const auto text = absl::MakeConstSpan(request_.token_ids);
  too_slow_ = false;
  failed_ = false;
  runner.SetPrompt(1, tokens_);
  for (int64_t done = 0; done < tokens_;) {
    const int64_t count =
        std::min(done == 0 ? kFirstTokens : kTextStepTokens, tokens_ - done);
    const absl::Time start = absl::Now();
    const absl::Status step =
        runner
            .Run({{.sequence_id = 1,
                   .token_ids = text.subspan(static_cast<size_t>(done),
                                             static_cast<size_t>(count))}})
            .status();
    KVASIR_RETURN_IF_ERROR(rank_.collective->status());
    if (runner.length(1) == done && !step.ok()) {
      // The step did not run, which says nothing about the plan's cache.
      return absl::Status(
          step.code(),
          absl::StrCat("plan check: the step with tokens ", done, " to ",
                       done + count - 1, " failed: ", step.message()));
    }
    // If a step that ran has an error, its results are not finite. All ranks of
    // a group detect this in the same step, so either all fail or none.
    failed_ = !step.ok();
    if (failed_) return absl::OkStatus();
    // The first step is slower than others, so the second one is measured.
    if (done == kFirstTokens) {
      const absl::Duration whole =
          (absl::Now() - start) *
          (static_cast<double>(tokens_) / static_cast<double>(count));
      KVASIR_ASSIGN_OR_RETURN(too_slow_, FirstRankSays(whole > most_time_));
      predicted_ = whole;
      if (too_slow_) return absl::OkStatus();
    }
    done += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> PlanComparison::FirstRankSays(bool answer) {
  const plan::TpShard shard = rank_.collective->shard();
  if (shard.size == 1) return answer;
  float vote = answer && shard.rank == 0 ? 1.0F : 0.0F;
  const auto sum = [&](kernels::Workspace& workspace) -> absl::Status {
    const auto data = workspace.Take<float>(1);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    if (!workspace.counting()) {
      KVASIR_RETURN_IF_ERROR(
          kernels::Upload(*rank_.stream, data, &vote, sizeof(vote)));
    }
    KVASIR_RETURN_IF_ERROR(rank_.collective->AllReduceSum(
        *rank_.stream, data, 1, kernels::DType::kF32, workspace));
    if (workspace.counting()) return absl::OkStatus();
    return kernels::ReadBack(*rank_.stream, &vote, data, sizeof(vote));
  };
  kernels::Workspace counter = kernels::Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(sum(counter));
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::DeviceBuffer memory,
      rank_.device->allocator().Allocate(counter.peak_bytes(),
                                         kernels::MemoryTag::kWorkspace));
  kernels::Workspace workspace(memory.data(), memory.bytes());
  KVASIR_RETURN_IF_ERROR(sum(workspace));
  KVASIR_RETURN_IF_ERROR(rank_.collective->status());
  return vote > 0;
}

}  // namespace kvasir::worker
