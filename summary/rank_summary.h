// Summarizes the part of the model and of the cache that each tensor-parallel
// rank holds, for `inspect` and planners.
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

// One resolved plan for each rank.
using RankPlans = std::vector<std::shared_ptr<const plan::ResolvedPlan>>;

struct RankShare {
  plan::HeadRange kv_heads;
  plan::HeadRange query_heads;
  int64_t first_feature = 0;  // first feature of the MLP
  int64_t num_features = 0;
  double kv_bytes_per_token = 0;  // including padding
  double kv_payload_bytes_per_token = 0;
  int64_t kv_fixed_bytes_per_sequence = 0;
  std::optional<int64_t> weight_bytes;  // empty: not counted
};

// A range of layers whose pages differ in size between ranks.
struct UnevenLayers {
  int64_t first_layer = 0;
  int64_t last_layer = 0;
  // The bytes per token on the rank that stores least (most) of a layer, summed
  // over these layers.
  double least_bytes = 0;
  double most_bytes = 0;
};

struct RankSummary {
  std::vector<RankShare> ranks;
  // More than 1 if there are fewer KV heads than ranks.
  int64_t ranks_per_kv_head = 1;
  std::vector<plan::Replica> replicas;
  std::vector<UnevenLayers> uneven;
  // The bytes of weights of the whole model; empty if they were not counted.
  std::optional<int64_t> whole_weight_bytes;

  // Returns the KV bytes per token on the rank with the most bytes. All ranks
  // have the same number of pages, so this rank limits it.
  double most_kv_bytes_per_token() const;
  // Returns the bytes per token that all ranks together store in addition to
  // one copy of everything.
  int64_t replicated_bytes_per_token() const;
  // Returns the bytes of weights that all ranks together hold in addition to
  // one copy of everything. The weights must have been counted (CHECK).
  int64_t replicated_weight_bytes() const;
};

// Returns INVALID_ARGUMENT if the model, or the channels of a basis in the
// plan, cannot be divided among this number of ranks. The text names the
// possible numbers.
absl::StatusOr<RankPlans> ResolveForRanks(const kvasir::v1::KvPlan& plan,
                                          const model::DecoderSpec& spec,
                                          int64_t num_ranks);

// Summarizes everything except weights. Errors: those of PageLayout::Create.
absl::StatusOr<RankSummary> SummarizeRanks(const RankPlans& plans,
                                           const model::DecoderSpec& spec,
                                           const cache::PageFormat& format);

// Returns "layers 0-5 key, heads 0-3 on ranks 0-1: 32 bytes a token on each".
std::string ReplicaText(const plan::Replica& replica);
// Returns a table of the ranks, followed by the data that several ranks hold.
std::string RanksText(const RankSummary& summary);
nlohmann::ordered_json RanksJson(const RankSummary& summary);

}  // namespace kvasir::cli
