// What each tensor-parallel rank holds of a model and its cache, for inspect
// and planners.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/layout/layout.h"
#include "model/shapes/decoder_spec.h"
#include "nlohmann/json_fwd.hpp"
#include "plan/replicas.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

// A plan, resolved for each rank in turn.
using RankPlans = std::vector<std::shared_ptr<const plan::ResolvedPlan>>;

struct RankShare {
  plan::HeadRange kv_heads;
  plan::HeadRange query_heads;
  int64_t first_feature = 0;  // of the MLP
  int64_t num_features = 0;
  double kv_bytes_per_token = 0;  // padding included
  double kv_payload_bytes_per_token = 0;
  int64_t kv_fixed_bytes_per_sequence = 0;
  std::optional<int64_t> weight_bytes;  // none: nobody has counted them
};

// Layers that lie one behind the other, whose ranks' pages are unequal.
struct UnevenLayers {
  int64_t first_layer = 0;
  int64_t last_layer = 0;
  // Of a token in all these layers, on the ranks that have the fewest and the
  // most.
  double least_bytes = 0;
  double most_bytes = 0;
};

struct RankSummary {
  std::vector<RankShare> ranks;
  int64_t ranks_per_kv_head = 1;  // more than 1: there are fewer heads
  std::vector<plan::Replica> replicas;
  std::vector<UnevenLayers> uneven;
  // Of one rank that holds the whole model, where weights were counted.
  std::optional<int64_t> whole_weight_bytes;

  // Of a token, on the rank that has the most: pages have one number of tokens
  // on all ranks, so this is what decides how many there are.
  double most_kv_bytes_per_token() const;
  // Of a token, what copies beyond the first take, over all ranks.
  int64_t replicated_bytes_per_token() const;
  // The same of weights; CHECK: they were counted.
  int64_t replicated_weight_bytes() const;
};

// INVALID_ARGUMENT: the model or a basis of the plan cannot be dealt to so many
// ranks; the text says to how many it can be.
absl::StatusOr<RankPlans> ResolveForRanks(const kvasir::v1::KvPlan& plan,
                                          const model::DecoderSpec& spec,
                                          int64_t num_ranks);

// All but weights. Errors: the layout's.
absl::StatusOr<RankSummary> SummarizeRanks(const RankPlans& plans,
                                           const model::DecoderSpec& spec,
                                           const cache::PageFormat& format);

// "layers 0-5 key, heads 0-3 on ranks 0,1: 32 bytes a token on each"
std::string ReplicaText(const plan::Replica& replica);
// A table and, below it, what is there more than once.
std::string RanksText(const RankSummary& summary);
nlohmann::ordered_json RanksJson(const RankSummary& summary);

}  // namespace kvasir::cli
