// Decides how much of its keys and values each layer keeps, for the planners
// that work on RoPE pairs (RAP and commuting).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/methods/method.h"

namespace kvasir::compress {

// How the keys (or the values) of a layer are scored. A higher score means a
// larger kept share.
enum class BudgetScore {
  kUniform,     // the same share in every layer
  kFisher,      // the Fisher information, summed over the weights
  kFisherRoot,  // the sum of the square roots of each weight's information
  kEnergy,      // keys by `key_energy` of ShareBudget, values as in kUniform
};
absl::StatusOr<BudgetScore> ParseBudgetScore(const std::string& name);
std::string BudgetScoreName(BudgetScore score);

struct BudgetOptions {
  BudgetScore score = BudgetScore::kFisherRoot;
  // If true, values are not compressed; only keys are reduced to meet the kept
  // share.
  bool keep_values = false;
  // The kept share of the key numbers. Values get the rest of what `keep`
  // allows, at most all of their numbers. Must not be set together with
  // keep_values, because `keep` then already determines the keys' share.
  std::optional<double> key_keep;
};
std::string BudgetOptionsText(const BudgetOptions& options);

// The sizes of a layer's latents, in numbers per token.
struct LayerBudget {
  int64_t pair_dims = 0;   // number of kept dims of a key group; even
  int64_t rest_rank = 0;   // rank of a key group in the dims that do not rotate
  int64_t value_rank = 0;  // rank of a KV head's values; head_dim: whole values
};

// Returns the budget of each layer. The request must have passed
// CheckPlanRequest; the groups come from HeadGroups. Keys and values share one
// budget over all layers if scores come from Fisher information and neither
// key_keep nor keep_values is set. Otherwise keys have one budget, and values
// another. All groups of a layer get the same sizes. A budget is used until no
// layer can take another step, which is rank_multiple (or EvenMultiple) numbers
// in each of its groups. `key_energy` [L] is for kEnergy.
// Errors: INVALID_ARGUMENT for a share that is out of range, for a share that
//   leaves nothing for the keys or for the values, for key_keep together with
//   keep_values, and for kEnergy without key_energy; FAILED_PRECONDITION if
//   Fisher information is needed and missing.
absl::StatusOr<std::vector<LayerBudget>> ShareBudget(
    const PlanRequest& request, const BudgetOptions& options,
    const std::vector<HeadGroup>& groups,
    const std::vector<double>& key_energy = {});

// Returns the step for the number of rotating dims that a group keeps. The step
// must be even: it is the request's rank multiple, or twice this multiple if it
// is odd.
int64_t EvenMultiple(const PlanRequest& request);

// Makes the value part of a layer, with the same rank for each head. If `rank`
// is the whole width of a head, the part stores whole values.
kvasir::v1::Part ValuePart(const PlanRequest& request, int64_t layer,
                           int64_t rank);

}  // namespace kvasir::compress
