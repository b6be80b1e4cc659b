#include "plan/replicas.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace kvasir::plan {
namespace {

// The kind of replicated data. A replica is identified within a layer by its
// kind, its part and its heads, and replicas are sorted in this order.
enum class Kind { kKey, kValue, kMetadata };
using Key = std::tuple<Kind, int, std::vector<int64_t>>;
using Found = std::map<Key, Replica>;

void AddRank(int64_t rank, Key key, const Replica& found, Found& of_layer) {
  of_layer.try_emplace(std::move(key), found)
      .first->second.ranks.push_back(rank);
}

void AddLatents(const ResolvedPlan& plan, int64_t layer, Side side,
                Found& of_layer) {
  const Kind kind = side == Side::kKey ? Kind::kKey : Kind::kValue;
  for (const ResolvedPart& part : plan.attention_of(layer).side(side).parts) {
    if (!part.stores_latents()) continue;
    for (const ResolvedLatent& latent : part.latents) {
      if (!part.Holds(latent, plan.kv_heads)) continue;
      AddRank(plan.shard.rank, {kind, part.index, latent.heads},
              {.side = side,
               .joint = part.joint,
               .part = part.index,
               .heads = latent.heads,
               .bytes_per_token =
                   part.CodesBytes(latent) + part.ParamsBytes(latent)},
              of_layer);
    }
  }
}

void AddUnits(const ResolvedPlan& plan, int64_t layer, Found& of_layer) {
  const auto& eviction = plan.layer(layer).eviction;
  if (!eviction.has_value()) return;
  for (const std::vector<int64_t>& unit : eviction->units) {
    if (std::none_of(unit.begin(), unit.end(), [&plan](int64_t head) {
          return plan.kv_heads.Contains(head);
        })) {
      continue;
    }
    AddRank(plan.shard.rank, {Kind::kMetadata, 0, unit},
            {.heads = unit,
             .bytes_per_token = EvictionUnitBytes(plan.attention_of(layer))},
            of_layer);
  }
}

bool GoesOn(const Replica& before, const Replica& next) {
  const auto what = [](const Replica& replica) {
    return std::tie(replica.side, replica.joint, replica.part, replica.heads,
                    replica.ranks);
  };
  return before.last_layer + 1 == next.first_layer &&
         what(before) == what(next);
}

}  // namespace

std::vector<Replica> FindReplicas(
    std::span<const std::shared_ptr<const ResolvedPlan>> ranks) {
  std::vector<Replica> all;
  if (ranks.empty()) return all;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const TpShard own = {.rank = static_cast<int64_t>(rank),
                         .size = static_cast<int64_t>(ranks.size())};
    KVASIR_CHECK(ranks[rank]->shard == own);
  }
  for (int64_t layer = 0; layer < ranks[0]->num_layers(); ++layer) {
    Found of_layer;
    for (const auto& plan : ranks) {
      AddLatents(*plan, layer, Side::kKey, of_layer);
      AddLatents(*plan, layer, Side::kValue, of_layer);
      AddUnits(*plan, layer, of_layer);
    }
    for (auto& entry : of_layer) {
      Replica& found = entry.second;
      if (found.ranks.size() < 2) continue;
      found.first_layer = found.last_layer = layer;
      const auto before =
          std::find_if(all.begin(), all.end(),
                       [&](const Replica& one) { return GoesOn(one, found); });
      if (before == all.end()) {
        all.push_back(std::move(found));
        continue;
      }
      before->last_layer = layer;
      before->bytes_per_token += found.bytes_per_token;
    }
  }
  return all;
}

}  // namespace kvasir::plan
