#include "bench/tool/spread_plan.h"

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::cli {
namespace {

using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::RankGroup;
using kvasir::v1::RopeLowRankSpace;

// the multiple to which numbers of channels are rounded
constexpr int64_t kGrain = 8;

// Changes the number of a latent's channels from `from` to `to`. Each run
// (neighbouring channels with the same bits) keeps its share of them.
absl::Status StretchRuns(int64_t from, int64_t to, kvasir::v1::Codec* codec) {
  if (!codec->has_bits() || from == to) return absl::OkStatus();
  int64_t end = 0;
  int64_t new_end = 0;
  for (auto& run : *codec->mutable_bits()->mutable_runs()) {
    end += run.channels();
    if (end > from) {
      return absl::InvalidArgumentError(
          absl::StrCat("the plan has runs of at least ", end,
                       " channels in all for a latent of ", from, " channels"));
    }
    const int64_t next =
        (2 * end * to + kGrain * from) / (2 * kGrain * from) * kGrain;
    run.set_channels(static_cast<uint32_t>(next - new_end));
    new_end = next;
  }
  return absl::OkStatus();
}

absl::Status Unimplemented() {
  return absl::UnimplementedError(
      "the plan is for another model shape and can be adapted to this one only "
      "if it has no rope_pairs, each of its groups has one head or all heads, "
      "and in rope_low_rank each group has RoPE pairs of rank 1");
}

template <typename Groups>
int64_t HeadsOf(const Groups& groups) {
  int64_t heads = 0;
  for (const auto& group : groups) heads += group.heads_size();
  return heads;
}

// Makes groups for `heads` heads. Each call make(old group, first head, number
// of heads) makes one of them.
template <typename Groups, typename Make>
absl::Status SpreadGroups(const Groups& groups, int64_t heads,
                          const Make& make) {
  const int64_t before = HeadsOf(groups);
  if (std::all_of(groups.begin(), groups.end(),
                  [](const auto& group) { return group.heads_size() == 1; })) {
    for (int64_t head = 0; head < heads; ++head) {
      make(groups[static_cast<int>(head * before / heads)], head, 1);
    }
    return absl::OkStatus();
  }
  if (groups.size() != 1) return Unimplemented();
  make(groups[0], 0, heads);
  return absl::OkStatus();
}

// Makes a group for `count` heads that has as many channels for each RoPE pair
// and head as `group`.
RopeLowRankSpace::Group ForHeads(const RopeLowRankSpace::Group& group,
                                 int64_t count) {
  std::map<uint32_t, int64_t> ranks;
  for (const uint32_t pair : group.pairs()) ++ranks[pair];
  std::map<uint32_t, int64_t> seen;
  RopeLowRankSpace::Group spread;
  for (const uint32_t pair : group.pairs()) {
    const int64_t rank = ranks[pair];
    const int64_t wanted = std::max<int64_t>(
        1, (2 * rank * count + group.heads_size()) / (2 * group.heads_size()));
    const int64_t before = seen[pair]++;
    for (int64_t i = before * wanted / rank; i < (before + 1) * wanted / rank;
         ++i) {
      spread.add_pairs(pair);
      spread.add_rank_per_pair(1);
    }
  }
  return spread;
}

absl::Status SpreadPart(const plan::AttentionShape& shape, Part* part) {
  if (part->has_full()) return absl::OkStatus();
  const int64_t heads = shape.num_kv_heads;
  const Part from = *part;
  const auto set_heads = [](int64_t first, int64_t count, auto* group) {
    group->clear_heads();
    for (int64_t h = first; h < first + count; ++h) {
      group->add_heads(static_cast<uint32_t>(h));
    }
  };
  if (from.has_low_rank()) {
    const auto& groups = from.low_rank().groups();
    for (const RankGroup& group : groups) {
      const int64_t most = group.heads_size() * shape.head_dim;
      if (group.rank() > 0 && group.rank() <= most) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "the rank of a group of ", group.heads_size(),
          " heads must be from 1 to ", most, ", not ", group.rank()));
    }
    part->mutable_low_rank()->clear_groups();
    const auto make = [&](const RankGroup& group, int64_t first,
                          int64_t count) {
      RankGroup* to = part->mutable_low_rank()->add_groups();
      set_heads(first, count, to);
      to->set_rank(
          static_cast<uint32_t>(group.rank() * count / group.heads_size()));
    };
    KVASIR_RETURN_IF_ERROR(SpreadGroups(groups, heads, make));
    return StretchRuns(groups[0].rank(), part->low_rank().groups(0).rank(),
                       part->mutable_codec());
  }
  const auto& groups = from.rope_low_rank().groups();
  for (const RopeLowRankSpace::Group& group : groups) {
    const auto& ranks = group.rank_per_pair();
    // Accepts only the groups that planners write.
    if (group.heads_size() == 0 || group.pairs().empty() ||
        std::any_of(ranks.begin(), ranks.end(),
                    [](uint32_t rank) { return rank != 1; })) {
      return Unimplemented();
    }
  }
  if (!from.has_rope_low_rank() || groups.empty()) return Unimplemented();
  part->mutable_rope_low_rank()->clear_groups();
  const auto make = [&](const RopeLowRankSpace::Group& group, int64_t first,
                        int64_t count) {
    RopeLowRankSpace::Group* to = part->mutable_rope_low_rank()->add_groups();
    *to = ForHeads(group, count);
    set_heads(first, count, to);
  };
  KVASIR_RETURN_IF_ERROR(SpreadGroups(groups, heads, make));
  return StretchRuns(2 * groups[0].pairs_size(),
                     2 * part->rope_low_rank().groups(0).pairs_size(),
                     part->mutable_codec());
}

// The number of heads in the part's groups; 0 for a full space, which does not
// list heads.
int64_t HeadsOf(const Part& part) {
  return part.has_low_rank()        ? HeadsOf(part.low_rank().groups())
         : part.has_rope_low_rank() ? HeadsOf(part.rope_low_rank().groups())
         : part.has_rope_pairs()    ? part.rope_pairs().per_head_size()
                                    : 0;
}

template <typename Visit>
absl::Status ForParts(KvPlan* plan, const Visit& visit) {
  for (LayerPlan& layer : *plan->mutable_layers()) {
    for (auto* parts :
         {layer.mutable_joint(), layer.mutable_key()->mutable_parts(),
          layer.mutable_value()->mutable_parts()}) {
      for (Part& part : *parts) KVASIR_RETURN_IF_ERROR(visit(&part));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvPlan> SpreadPlan(const KvPlan& plan,
                                  const plan::AttentionShape& shape) {
  KvPlan spread = plan;
  spread.clear_layers();
  for (int64_t l = 0; l < shape.num_layers() && plan.layers_size() > 0; ++l) {
    *spread.add_layers() = plan.layers(
        static_cast<int>(l * plan.layers_size() / shape.num_layers()));
  }
  KVASIR_RETURN_IF_ERROR(ForParts(&spread, [&](Part* part) {
    const int64_t heads = HeadsOf(*part);
    return heads == 0 || heads == shape.num_kv_heads ? absl::OkStatus()
                                                     : SpreadPart(shape, part);
  }));
  return spread;
}

}  // namespace kvasir::cli
