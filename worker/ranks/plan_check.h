// Compares the predictions with a plan's cache to those with an uncompressed
// (dense) cache, before the plan is served. Uses the model's own weights and
// the code that serves requests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/executor/launcher.h"
#include "worker/offline/direct_runner.h"
#include "worker/program/served_plan.h"
#include "worker/ranks/text_run.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct PlanCheck {
  std::string plan;  // the plan's name (KvPlan.method)
  // The divergence KL(dense || plan) of the predicted next token, in nats,
  // averaged over the second half of the text. The first half is only context,
  // because plans keep a text's first tokens exact, which hides their error in
  // short texts. NaN if the plan's cache gave no finite predictions.
  double kl = 0;
  int64_t tokens = 0;  // how many predictions were compared
  absl::Duration duration;
  bool is_known = false;  // whether the result is from an earlier check
  // Identifies weights, plan, text and arithmetic. Empty if nothing was
  // compared, or in a group of several ranks.
  std::string key;
  // Whether the plan is a dense cache itself. If so, it is not compared.
  bool is_dense = false;
  // Why the plan was not compared; empty if it was, or if it is dense.
  std::string skipped;
};

struct PlanCheckRequest {
  // The text to predict. The predictions of its second half are compared, or
  // only the last ones if the logits of more would not fit into `most_bytes`.
  // Equal on all ranks of a group.
  std::vector<int32_t> token_ids;
  int64_t most_bytes = int64_t{256} << 20;
  // A check that is predicted to take longer is skipped.
  absl::Duration time_limit = absl::Seconds(30);
  // Returns the result of an earlier check with this key, if there is one. It
  // is used instead of a comparison. May be null. Not called by ranks of a
  // group, which might know different results.
  std::function<std::optional<PlanCheck>(const std::string& key)> known;
  // Plans that use the same weights as the rank's own plan, to serve instead.
  // They are used if the divergence of the rank's plan is above `most_kl` or
  // was not measured. The rank then serves the first of these plans whose
  // divergence is at most `most_kl`, or the last plan if there is none.
  std::vector<std::shared_ptr<const ServedPlan>> instead;
  double most_kl = 0;
};

// The value of PlanCheck::skipped for plans with tensors of their own.
// kvasir-compress makes such plans, and has measured them.
inline constexpr char kPlanHasOwnWeights[] = "the plan has weights of its own";

// Whether the plan stores full-rank keys and values without quantization. Its
// evictions are ignored.
bool IsDensePlan(const kvasir::v1::KvPlan& plan,
                 const plan::AttentionShape& shape);

// Runs a text with a dense cache (float32 on a CPU, else bf16) and with the
// caches of plans. The dense cache runs once for all plans.
//
// All ranks of a group must compare the same plans in the same order, and then
// get the same results.
// Threads: one at a time.
class PlanComparison {
 public:
  // The text is cut to rank.max_model_len. `request` and what `rank` points to
  // must outlive the object.
  PlanComparison(const TextRank& rank, const PlanCheckRequest& request);

  // Compares a plan. `weights` were loaded for a plan with the same tensors,
  // and use the programs of `plan` afterwards. A plan that needs other tensors
  // than a dense cache is not compared, because its weights differ from those
  // of the dense model. Evictions are left out, because requests choose their
  // budgets. `cache_id` is that of the plan (CacheIdOf), for PlanCheck::key.
  //
  // Memory: allocates an executor for one sequence while it runs, and keeps the
  //   logits of the dense cache.
  // Errors: those of ModelExecutor::Create, of steps and of the collective; the
  // weights are lost then. If a cache gives predictions that are not finite,
  // that is a result, not an error.
  absl::StatusOr<PlanCheck> Compare(
      const std::shared_ptr<const ServedPlan>& plan,
      const std::string& cache_id, ModelWeights* weights);

  // Returns rank 0's answer to a question that all ranks ask at the same time.
  absl::StatusOr<bool> FirstRankSays(bool answer);

 private:
  absl::Status RunDense(ModelWeights* weights);
  // Runs the text as one prompt with the plan's cache.
  absl::Status RunSteps(const std::shared_ptr<const ServedPlan>& plan,
                        std::function<void(const LogitsRow&)> tap,
                        ModelWeights* weights);
  absl::Status RunSteps(DirectRunner& runner);

  const TextRank rank_;
  const PlanCheckRequest& request_;
  const plan::AttentionShape shape_;
  int64_t tokens_ = 0;  // how many tokens of the text are used
  int64_t first_ = 0;   // the first token at which predictions are compared
  std::shared_ptr<const ServedPlan> dense_;
  // The logits with a dense cache, by position. Empty for positions that are
  // not compared.
  std::vector<std::vector<float>> dense_logits_;
  // A run is stopped if its time, as predicted from its second step, exceeds
  // this limit.
  absl::Duration most_time_;
  // The outcome of the last run of the text.
  absl::Duration predicted_;  // how long the run was predicted to take
  bool too_slow_ = false;     // the run was stopped, as it would take too long
  bool failed_ = false;       // the run computed NaN or infinite numbers
  // Why plans cannot be compared; empty if they can.
  std::string skipped_;
};

}  // namespace kvasir::worker
