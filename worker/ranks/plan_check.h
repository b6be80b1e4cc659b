// Compares a plan with a dense cache before it is served, on the model's own
// weights and through the engine's own path.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device/device.h"
#include "model/shapes/decoder_spec.h"
#include "plan/attention_shape.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/program/served_plan.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct PlanCheck {
  // The divergence KL(dense || plan) of the predicted next token, in nats,
  // averaged over the second half of the text. The first half is only context,
  // because plans keep a text's first tokens exact, which hides their error in
  // short texts. NaN if the plan's cache gave no finite predictions.
  double kl = 0;
  int64_t tokens = 0;  // the predictions that were compared
  absl::Duration duration;
  bool is_known = false;  // the result of an earlier check
  // Identifies weights, plan, text and arithmetic. Empty if nothing was
  // compared.
  std::string key;
  // Whether the plan is a dense cache itself. It is not compared then.
  bool is_dense = false;
  // Why the plan was not compared; empty if it was, or if it is dense.
  std::string skipped;
};

struct PlanCheckRequest {
  // A text. Its first tokens are used, so many that the rows of logits of the
  // second half fit into kMaxPlanCheckBytes.
  std::vector<int32_t> token_ids;
  // A check that is predicted to take longer is skipped.
  absl::Duration time_limit = absl::Seconds(30);
  // Returns the result of an earlier check with this key, if there is one. It
  // is used instead of a comparison. May be null.
  std::function<std::optional<PlanCheck>(const std::string& key)> known;
};
inline constexpr int64_t kMaxPlanCheckBytes = int64_t{256} << 20;

// PlanCheck::skipped of plans that kvasir-compress made. It measured them.
inline constexpr char kPlanHasOwnWeights[] = "the plan has weights of its own";

// Whether the plan stores whole keys and values as numbers, evictions aside.
bool IsDensePlan(const kvasir::v1::KvPlan& plan,
                 const plan::AttentionShape& shape);

// Runs the text with a bf16 cache and with the plan's cache. `weights` were
// loaded for `plan` and are the same afterwards. A plan with weights of its own
// is not compared, because the weights of the dense model are not there.
// Evictions are left out, because requests choose their budgets. The text is
// cut to `max_model_len` tokens.
//
// Memory: the executor of one sequence, once per cache, and the logits.
// Errors: those of ModelExecutor::Create; the weights are lost then. A cache
// with which steps fail is no error, but a result.
absl::StatusOr<PlanCheck> ComparePlanWithDense(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    kernels::Device* device, kernels::Stream* stream, int64_t max_model_len,
    const std::string& cache_id, const PlanCheckRequest& request,
    ModelWeights* weights);

}  // namespace kvasir::worker
