#include "plan/space.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::plan {

using kvasir::v1::Part;

namespace {

using Indices = google::protobuf::RepeatedField<uint32_t>;

// Checks that the indices are below `limit` and in strictly increasing order.
absl::Status CheckIndices(const PlanPlace& where, absl::string_view what,
                          const Indices& indices, int64_t limit) {
  int64_t previous = -1;
  for (uint32_t index : indices) {
    if (index >= limit) {
      return where.Refuse(what, " ", index, " is not below ", limit);
    }
    if (index <= previous) {
      return where.Refuse(what, "s must be in increasing order, but ", index,
                          " follows ", previous);
    }
    previous = index;
  }
  return absl::OkStatus();
}

absl::string_view LiftName(const Part::Use& use) {
  switch (use.lift_case()) {
    case Part::Use::kFold:
      return "FOLD";
    case Part::Use::kAtRuntime:
      return "AT_RUNTIME";
    case Part::Use::kReconstruct:
      return "RECONSTRUCT";
    case Part::Use::kAnchored:
      return "ANCHORED";
    case Part::Use::LIFT_NOT_SET:
      break;
  }
  return "no lift";
}

absl::Status CheckAnchored(const PlanPlace& where, const Part::Use& use,
                           int64_t num_pairs) {
  const Part::Use::Anchored& anchored = use.anchored();
  constexpr uint32_t kMaxOrder = 8;
  if (anchored.block() < 1) return where.Refuse("ANCHORED needs a block >= 1");
  if (anchored.order() > kMaxOrder) {
    return where.Refuse("the order of ANCHORED must be at most ", kMaxOrder,
                        ", but is ", anchored.order());
  }
  const int64_t per_pair = int64_t{anchored.order()} + 1;
  const int64_t have = anchored.coefficients_size();
  const int64_t pairs = use.pairs_size() > 0 ? use.pairs_size() : num_pairs;
  if (have != 0 && have != per_pair && have != per_pair * pairs) {
    return where.Refuse("ANCHORED of order ", anchored.order(), " over ", pairs,
                        " pairs needs 0 (Taylor), ", per_pair, " or ",
                        per_pair * pairs, " coefficients, but has ", have);
  }
  for (double coefficient : anchored.coefficients()) {
    if (!std::isfinite(coefficient)) {
      return where.Refuse("an ANCHORED coefficient is not finite");
    }
  }
  return absl::OkStatus();
}

// Checks the lift of low-rank keys. The lift's matrix does not commute with
// RoPE's rotation, so the possible lifts depend on whether the latent is stored
// before or after RoPE.
absl::Status CheckLowRankKeyLift(const PlanPlace& where, const Part& part,
                                 const Part::Use& use) {
  const auto lift = use.lift_case();
  switch (part.stored()) {
    case kvasir::v1::PRE_ROPE:
      if (lift == Part::Use::kFold || lift == Part::Use::kAtRuntime) {
        return where.Refuse(LiftName(use),
                            " would move the lift across the rotation of "
                            "PRE_ROPE keys: want RECONSTRUCT or ANCHORED");
      }
      return absl::OkStatus();
    case kvasir::v1::POST_ROPE:
      if (lift == Part::Use::kFold) {
        return where.Refuse(
            "FOLD into q_proj would be applied before the query's "
            "rotation: with POST_ROPE, use AT_RUNTIME or RECONSTRUCT");
      }
      break;
    default:
      break;
  }
  if (lift == Part::Use::kAnchored) {
    return where.Refuse(
        "ANCHORED approximates a later rotation, so keys must be "
        "stored PRE_ROPE");
  }
  return absl::OkStatus();
}

// Marks the dimensions of a low_rank part in `coverage` and returns how many
// dimensions of each head it covers.
absl::StatusOr<int64_t> CoverLowRank(const PlanPlace& where, const Part& part,
                                     const LayerFacts& facts,
                                     Coverage& coverage) {
  std::vector<int64_t> columns;
  for (const Part::Use& use : part.uses()) {
    for (uint32_t pair : use.pairs()) columns.push_back(pair);
    if (use.pairs_size() > 0) continue;
    // A single use without pairs covers all dimensions that the part stores. If
    // there are other uses, it covers the dimensions that do not rotate.
    if (part.uses_size() == 1 && part.stored() != kvasir::v1::NO_ROPE) {
      for (int64_t p = 0; p < facts.num_pairs; ++p) columns.push_back(p);
    } else if (facts.non_rotary_dims() == 0) {
      return where.Refuse(
          "a use without pairs beside other uses covers the dims that "
          "do not rotate, but all dims rotate: list its pairs");
    }
    if (facts.non_rotary_dims() > 0) columns.push_back(coverage.non_rotary());
  }
  int64_t dims = 0;
  for (int64_t column : columns) {
    dims += column == coverage.non_rotary() ? facts.non_rotary_dims() : 2;
    for (int64_t head = 0; head < facts.num_heads; ++head) {
      KVASIR_RETURN_IF_ERROR(coverage.Take(where, head, column));
    }
  }
  return dims;
}

// The latents of a low_rank part that covers `dims` dimensions of each head.
absl::StatusOr<std::vector<PlannedLatent>> RanksOf(const PlanPlace& where,
                                                   const Part& part,
                                                   int64_t dims) {
  const auto& groups = part.low_rank().groups();
  std::vector<PlannedLatent> latents;
  for (int g = 0; g < groups.size(); ++g) {
    const int64_t most = groups.Get(g).heads_size() * dims;
    const int64_t rank = groups.Get(g).rank();
    if (rank < 1 || rank > most) {
      return where.Refuse("group ", g, ": rank must be 1..", most, " (",
                          groups.Get(g).heads_size(), " heads of ", dims,
                          " dims), but is ", rank);
    }
    latents.push_back({g, rank});
  }
  return latents;
}

absl::StatusOr<std::vector<PlannedLatent>> CheckLowRank(const PlanPlace& where,
                                                        const Part& part,
                                                        const LayerFacts& facts,
                                                        Coverage& coverage) {
  KVASIR_RETURN_IF_ERROR(
      CheckPartition(where, part.low_rank().groups(), facts.num_heads));
  KVASIR_ASSIGN_OR_RETURN(const int64_t dims,
                          CoverLowRank(where, part, facts, coverage));
  return RanksOf(where, part, dims);
}

absl::StatusOr<std::vector<PlannedLatent>> CheckRopePairs(
    const PlanPlace& where, const Part& part, const LayerFacts& facts,
    Coverage& coverage) {
  const auto& per_head = part.rope_pairs().per_head();
  if (per_head.size() != facts.num_heads) {
    return where.Refuse("rope_pairs: want ", facts.num_heads, " heads, have ",
                        per_head.size());
  }
  std::vector<PlannedLatent> latents;
  for (int head = 0; head < per_head.size(); ++head) {
    const Indices& pairs = per_head.Get(head).pair_indices();
    KVASIR_RETURN_IF_ERROR(
        CheckIndices(where, "RoPE pair", pairs, facts.num_pairs));
    if (pairs.empty() || pairs.size() != per_head.Get(0).pair_indices_size()) {
      return where.Refuse(
          "every head must keep the same number of pairs, at least 1, but "
          "head 0 keeps ",
          per_head.Get(0).pair_indices_size(), " and head ", head, " keeps ",
          pairs.size());
    }
    for (uint32_t pair : pairs) {
      KVASIR_RETURN_IF_ERROR(coverage.Take(where, head, pair));
    }
    latents.push_back({head, 2 * int64_t{pairs.size()}});
  }
  return latents;
}

absl::StatusOr<std::vector<PlannedLatent>> CheckRopeLowRank(
    const PlanPlace& where, const Part& part, const LayerFacts& facts,
    Coverage& coverage) {
  const auto& groups = part.rope_low_rank().groups();
  KVASIR_RETURN_IF_ERROR(CheckPartition(where, groups, facts.num_heads));
  std::vector<PlannedLatent> latents;
  for (int g = 0; g < groups.size(); ++g) {
    const auto& group = groups.Get(g);
    if (group.pairs_size() == 0 ||
        group.pairs_size() != group.rank_per_pair_size()) {
      return where.Refuse("group ", g,
                          " must have at least 1 pair and a rank for each, "
                          "but has ",
                          group.rank_per_pair_size(), " ranks and ",
                          group.pairs_size(), " pairs");
    }
    int64_t width = 0;
    // A pair may be listed several times, because a plan lists channels in the
    // order of their bits.
    std::map<uint32_t, int64_t> rank_of_pair;
    for (int i = 0; i < group.pairs_size(); ++i) {
      if (group.pairs(i) >= facts.num_pairs) {
        return where.Refuse("RoPE pair ", group.pairs(i), " is not below ",
                            facts.num_pairs);
      }
      const int64_t own = group.rank_per_pair(i);
      int64_t& rank = rank_of_pair[group.pairs(i)];
      rank += own;
      if (own < 1 || rank > group.heads_size()) {
        return where.Refuse("group ", g, " pair ", group.pairs(i),
                            ": rank must be 1..", group.heads_size(),
                            " (the group's heads), but is ",
                            own < 1 ? own : rank);
      }
      width += 2 * own;  // 2 numbers for each complex channel
    }
    for (uint32_t head : group.heads()) {
      for (const auto& [pair, rank] : rank_of_pair) {
        KVASIR_RETURN_IF_ERROR(coverage.Take(where, head, pair));
      }
    }
    latents.push_back({g, width});
  }
  return latents;
}

absl::StatusOr<std::vector<PlannedLatent>> CheckFull(const PlanPlace& where,
                                                     const LayerFacts& facts,
                                                     Coverage& coverage) {
  KVASIR_RETURN_IF_ERROR(coverage.TakeWhole(where));
  return std::vector<PlannedLatent>{{0, facts.head_dim}};
}

}  // namespace

absl::Status CheckStored(const PlanPlace& where, const Part& part,
                         const LayerFacts& facts) {
  const auto stored = part.stored();
  if (stored != kvasir::v1::PRE_ROPE && stored != kvasir::v1::POST_ROPE &&
      stored != kvasir::v1::NO_ROPE) {
    return where.Refuse("stored: want PRE_ROPE, POST_ROPE or NO_ROPE, have ",
                        static_cast<int>(stored));
  }
  if (where.side == Side::kValue) {
    if (stored != kvasir::v1::NO_ROPE) {
      return where.Refuse("values do not rotate: want stored NO_ROPE");
    }
    return absl::OkStatus();
  }
  if (!facts.rotates()) {
    if (stored != kvasir::v1::NO_ROPE) {
      return where.Refuse("the layer has no RoPE: want stored NO_ROPE");
    }
    return absl::OkStatus();
  }
  if (stored != kvasir::v1::NO_ROPE) return absl::OkStatus();
  if (!part.has_low_rank()) {
    return where.Refuse(
        "the layer rotates its keys: NO_ROPE is only for a low_rank part over "
        "the dims that do not rotate");
  }
  if (facts.non_rotary_dims() == 0) {
    return where.Refuse("all ", facts.head_dim,
                        " dims rotate: no part can be stored NO_ROPE");
  }
  return absl::OkStatus();
}

absl::Status CheckUses(const PlanPlace& where, const Part& part,
                       const LayerFacts& facts) {
  if (part.has_full()) {
    if (part.uses_size() > 0) {
      return where.Refuse("a full space has nothing to lift, but has ",
                          part.uses_size(), " uses");
    }
    return absl::OkStatus();
  }
  if (part.uses_size() == 0)
    return where.Refuse("the part has no uses: it needs at least one lift");
  const auto folds =
      std::count_if(part.uses().begin(), part.uses().end(),
                    [](const Part::Use& use) { return use.has_fold(); });
  if (folds > 0 && folds < part.uses_size()) {
    return where.Refuse("FOLD cannot be combined with another lift: ", folds,
                        " of ", part.uses_size(),
                        " uses fold, but q_proj has only one set of rows for a "
                        "part");
  }
  const bool on_pairs = part.has_rope_pairs() || part.has_rope_low_rank();
  if (!where.joint()) {
    const auto other = where.side == Side::kKey ? kvasir::v1::SERVES_VALUE
                                                : kvasir::v1::SERVES_KEY;
    for (const Part::Use& use : part.uses()) {
      if (use.serves() != other) continue;
      return where.Refuse(
          "a use serves the other side: such a part must be in the "
          "list of joint parts");
    }
  }
  if (on_pairs && (part.uses_size() > 1 || part.uses(0).pairs_size() > 0)) {
    return where.Refuse(
        "a part on RoPE pairs must have one use, for all pairs "
        "that it keeps and without a list of pairs; it has ",
        part.uses_size(), " uses, and the first lists ",
        part.uses(0).pairs_size(), " RoPE pairs");
  }
  for (const Part::Use& use : part.uses()) {
    if (use.lift_case() == Part::Use::LIFT_NOT_SET) {
      return where.Refuse("one of the uses has no lift");
    }
    if (where.side == Side::kValue) {
      if (use.has_anchored()) {
        return where.Refuse("ANCHORED is for keys: values do not rotate");
      }
      if (part.uses_size() > 1 || use.pairs_size() > 0) {
        return where.Refuse("a value part has one use and no pairs");
      }
      continue;
    }
    KVASIR_RETURN_IF_ERROR(
        CheckIndices(where, "RoPE pair", use.pairs(), facts.num_pairs));
    if (use.pairs_size() > 0 && part.stored() == kvasir::v1::NO_ROPE) {
      return where.Refuse(
          "a NO_ROPE part covers dims that do not rotate, but this "
          "use lists ",
          use.pairs_size(), " RoPE pairs");
    }
    if (use.has_anchored()) {
      KVASIR_RETURN_IF_ERROR(CheckAnchored(where, use, facts.num_pairs));
    }
    if (part.has_low_rank()) {
      KVASIR_RETURN_IF_ERROR(CheckLowRankKeyLift(where, part, use));
    } else if (use.has_anchored() && part.stored() != kvasir::v1::PRE_ROPE) {
      return where.Refuse(
          "ANCHORED approximates a later rotation, so keys must be "
          "stored PRE_ROPE");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PlannedLatent>> CheckSpace(const PlanPlace& where,
                                                      const Part& part,
                                                      const LayerFacts& facts,
                                                      Coverage& coverage) {
  const bool on_pairs = part.has_rope_pairs() || part.has_rope_low_rank();
  if (on_pairs && (where.side == Side::kValue || !facts.rotates())) {
    return where.Refuse("a space of RoPE pairs needs keys that rotate");
  }
  if (where.side == Side::kKey && facts.qk_norm && !part.has_full()) {
    return where.Refuse(
        "the model normalizes its keys (QK-norm) after the "
        "projection: only a full space is possible");
  }
  switch (part.space_case()) {
    case Part::kFull:
      return CheckFull(where, facts, coverage);
    case Part::kLowRank:
      return CheckLowRank(where, part, facts, coverage);
    case Part::kRopePairs:
      return CheckRopePairs(where, part, facts, coverage);
    case Part::kRopeLowRank:
      return CheckRopeLowRank(where, part, facts, coverage);
    case Part::SPACE_NOT_SET:
      break;
  }
  return where.Refuse(
      "no space: want full, low_rank, rope_pairs or rope_low_rank");
}

absl::StatusOr<std::vector<PlannedLatent>> CheckJointSpace(
    const PlanPlace& where, const Part& part, const LayerFacts& facts,
    Coverage& key, Coverage& value) {
  if (!part.has_low_rank()) {
    return where.Refuse(
        "a joint part of key and value must have a low_rank space");
  }
  const auto stored =
      facts.rotates() ? kvasir::v1::PRE_ROPE : kvasir::v1::NO_ROPE;
  if (part.stored() != stored) {
    return where.Refuse("values do not rotate, and the layer's keys ",
                        facts.rotates() ? "do: want stored PRE_ROPE"
                                        : "do not either: want stored NO_ROPE");
  }
  // Splits the joint part into one that has only the uses for keys, and one
  // that has only those for values.
  Part of_key = part;
  of_key.clear_uses();
  Part of_value = of_key;
  of_value.set_stored(kvasir::v1::NO_ROPE);
  for (const Part::Use& use : part.uses()) {
    switch (use.serves()) {
      case kvasir::v1::SERVES_KEY:
        *of_key.add_uses() = use;
        break;
      case kvasir::v1::SERVES_VALUE:
        *of_value.add_uses() = use;
        break;
      default:
        return where.Refuse(
            "a use does not state whether it serves key or value");
    }
  }
  if (of_key.uses().empty() || of_value.uses().empty()) {
    return where.Refuse(
        "want one or more uses that serve the key and one that "
        "serves the value, ",
        "have ", of_key.uses_size(), " and ", of_value.uses_size());
  }
  if (facts.qk_norm) {
    return where.Refuse(
        "the model normalizes its keys (QK-norm) after the projection: only a "
        "full space is possible");
  }
  PlanPlace value_place = where;
  value_place.side = Side::kValue;
  LayerFacts value_facts = facts;
  value_facts.num_pairs = 0;
  KVASIR_RETURN_IF_ERROR(CheckUses(where, of_key, facts));
  KVASIR_RETURN_IF_ERROR(CheckUses(value_place, of_value, value_facts));
  const auto& groups = part.low_rank().groups();
  KVASIR_RETURN_IF_ERROR(CheckPartition(where, groups, facts.num_heads));
  KVASIR_ASSIGN_OR_RETURN(const int64_t key_dims,
                          CoverLowRank(where, of_key, facts, key));
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t value_dims,
      CoverLowRank(value_place, of_value, value_facts, value));
  return RanksOf(where, part, key_dims + value_dims);
}

}  // namespace kvasir::plan
