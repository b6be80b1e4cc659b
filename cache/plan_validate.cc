// ValidatePlan: which plans have a meaning. What a build serves is a narrower
// question, answered by ServedByThisBuild.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/plan.h"
#include "cache/plan_codec.h"

namespace kvasir::cache {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Eviction;
using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::Selection;
using kvasir::v1::SidePlan;

// Far above any model; keeps products of two of them inside int64.
constexpr int64_t kMaxDimension = 1 << 16;
constexpr int64_t kMaxKeyDims = 1 << 24;  // KV heads times head_dim
constexpr int kMaxPartsPerSide = 16;

using Indices = google::protobuf::RepeatedField<uint32_t>;

// What the checks of one layer need of the model.
struct LayerFacts {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t num_pairs = 0;  // 0: the layer does not rotate
  bool qk_norm = false;

  bool rotates() const { return num_pairs > 0; }
  int64_t non_rotary_dims() const { return head_dim - 2 * num_pairs; }
};

absl::Status CheckShape(const CacheShape& shape) {
  const auto in_range = [](int64_t value) {
    return value >= 1 && value <= kMaxDimension;
  };
  if (!in_range(shape.num_kv_heads) || !in_range(shape.head_dim) ||
      !in_range(shape.num_layers())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layers, KV heads and head_dim must be 1..", kMaxDimension, ", have ",
        shape.num_layers(), ", ", shape.num_kv_heads, " and ", shape.head_dim));
  }
  if (shape.num_kv_heads * shape.head_dim > kMaxKeyDims) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV heads times head_dim must be at most ", kMaxKeyDims,
                     ", have ", shape.num_kv_heads * shape.head_dim));
  }
  if (shape.rotary_dim < 0 || shape.rotary_dim > shape.head_dim ||
      shape.rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rotary_dim must be even and 0..", shape.head_dim,
                     ", have ", shape.rotary_dim));
  }
  for (int64_t l = 0; l < shape.num_layers(); ++l) {
    const int64_t window = shape.layers[static_cast<size_t>(l)].sliding_window;
    if (window < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", l, ": sliding_window must be >= 0, have ", window));
    }
  }
  return absl::OkStatus();
}

// Strictly rising indices below `limit`.
absl::Status CheckIndices(const PlanPlace& where, absl::string_view what,
                          const Indices& indices, int64_t limit) {
  int64_t previous = -1;
  for (uint32_t index : indices) {
    if (index >= limit) {
      return where.Refuse(what, " ", index, " is not below ", limit);
    }
    if (index <= previous) {
      return where.Refuse(what, "s must rise, have ", index, " after ",
                          previous);
    }
    previous = index;
  }
  return absl::OkStatus();
}

// Every head in exactly one of the groups.
template <typename Groups>
absl::Status CheckPartition(const PlanPlace& where, const Groups& groups,
                            int64_t num_heads) {
  std::vector<int> owner(static_cast<size_t>(num_heads), -1);
  for (int g = 0; g < groups.size(); ++g) {
    if (groups.Get(g).heads().empty()) {
      return where.Refuse("group ", g, " has no heads");
    }
    for (uint32_t head : groups.Get(g).heads()) {
      if (head >= num_heads) {
        return where.Refuse("group ", g, " names head ", head,
                            ", the layer has ", num_heads, " KV heads");
      }
      if (owner[head] >= 0) {
        return where.Refuse("head ", head, " is in group ", owner[head],
                            " and in group ", g);
      }
      owner[head] = g;
    }
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    if (owner[static_cast<size_t>(head)] < 0) {
      return where.Refuse("head ", head, " is in no group");
    }
  }
  return absl::OkStatus();
}

// Which dims of which heads the parts of a side already cover: a column per
// pair and one for the dims that do not rotate.
class Coverage {
 public:
  explicit Coverage(const LayerFacts& facts)
      : num_heads_(facts.num_heads), columns_(facts.num_pairs + 1) {}

  int64_t non_rotary() const { return columns_ - 1; }

  absl::Status Take(const PlanPlace& where, int64_t head, int64_t column) {
    if (whole_owner_ >= 0) return Twice(where, head, column, whole_owner_);
    if (owner_.empty()) {
      owner_.assign(static_cast<size_t>(num_heads_ * columns_), -1);
    }
    int8_t& owner = owner_[static_cast<size_t>(head * columns_ + column)];
    if (owner >= 0) return Twice(where, head, column, owner);
    owner = static_cast<int8_t>(where.part);
    return absl::OkStatus();
  }

  // All dims of all heads.
  absl::Status TakeWhole(const PlanPlace& where) {
    if (where.part > 0) {
      return where.Refuse(
          "a full space stores what part 0 already covers: want it alone");
    }
    whole_owner_ = where.part;
    return absl::OkStatus();
  }

 private:
  absl::Status Twice(const PlanPlace& where, int64_t head, int64_t column,
                     int owner) const {
    const std::string dims = column == non_rotary()
                                 ? std::string("the dims without rotation")
                                 : absl::StrCat("RoPE pair ", column);
    return where.Refuse(dims, " of head ", head, ": already covered by part ",
                        owner);
  }

  int64_t num_heads_;
  int64_t columns_;
  int whole_owner_ = -1;
  // Part, or -1, [num_heads, columns]; empty until the first Take.
  std::vector<int8_t> owner_;
};

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
    return where.Refuse("ANCHORED order must be 0..", kMaxOrder, ", have ",
                        anchored.order());
  }
  const int64_t per_pair = int64_t{anchored.order()} + 1;
  const int64_t have = anchored.coefficients_size();
  const int64_t pairs = use.pairs_size() > 0 ? use.pairs_size() : num_pairs;
  if (have != 0 && have != per_pair && have != per_pair * pairs) {
    return where.Refuse("ANCHORED of order ", anchored.order(), " over ", pairs,
                        " pairs wants 0 (Taylor), ", per_pair, " or ",
                        per_pair * pairs, " coefficients, have ", have);
  }
  for (double coefficient : anchored.coefficients()) {
    if (!std::isfinite(coefficient)) {
      return where.Refuse("an ANCHORED coefficient is not finite");
    }
  }
  return absl::OkStatus();
}

// A low-rank latent is lifted by a matrix that does not commute with RoPE: what
// is stored decides where the lift can stand.
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
            "FOLD into q_proj would stand before the query's rotation: "
            "POST_ROPE wants AT_RUNTIME or RECONSTRUCT");
      }
      break;
    default:
      break;
  }
  if (lift == Part::Use::kAnchored) {
    return where.Refuse(
        "ANCHORED approximates a rotation still to come: want PRE_ROPE");
  }
  return absl::OkStatus();
}

absl::Status CheckUses(const PlanPlace& where, const Part& part,
                       const LayerFacts& facts) {
  if (part.has_full()) {
    if (part.uses_size() > 0) {
      return where.Refuse("a full space has nothing to lift, have ",
                          part.uses_size(), " uses");
    }
    return absl::OkStatus();
  }
  if (part.uses_size() == 0) return where.Refuse("no uses: want a lift");
  for (const Part::Use& use : part.uses()) {
    if (use.lift_case() == Part::Use::LIFT_NOT_SET) {
      return where.Refuse("a use has no lift");
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
      return where.Refuse("NO_ROPE covers dims that do not rotate, have ",
                          use.pairs_size(), " RoPE pairs");
    }
    if (use.has_anchored()) {
      KVASIR_RETURN_IF_ERROR(CheckAnchored(where, use, facts.num_pairs));
    }
    if (part.has_low_rank()) {
      KVASIR_RETURN_IF_ERROR(CheckLowRankKeyLift(where, part, use));
    } else if (use.has_anchored() && part.stored() != kvasir::v1::PRE_ROPE) {
      return where.Refuse(
          "ANCHORED approximates a rotation still to come: want PRE_ROPE");
    }
  }
  return absl::OkStatus();
}

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
                        " dims rotate: nothing is stored NO_ROPE");
  }
  return absl::OkStatus();
}

// Takes the low_rank part's dims in `coverage`; returns how many dims of a head
// it covers.
absl::StatusOr<int64_t> CoverLowRank(const PlanPlace& where, const Part& part,
                                     const LayerFacts& facts,
                                     Coverage& coverage) {
  std::vector<int64_t> columns;
  for (const Part::Use& use : part.uses()) {
    for (uint32_t pair : use.pairs()) columns.push_back(pair);
    if (use.pairs_size() > 0) continue;
    // One use without pairs is all that the part stores; beside others it is
    // the dims that do not rotate.
    if (part.uses_size() == 1 && part.stored() != kvasir::v1::NO_ROPE) {
      for (int64_t p = 0; p < facts.num_pairs; ++p) columns.push_back(p);
    } else if (facts.non_rotary_dims() == 0) {
      return where.Refuse(
          "a use without pairs beside others covers the dims "
          "that do not rotate, and there are none");
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

absl::StatusOr<std::vector<PlannedLatent>> CheckLowRank(const PlanPlace& where,
                                                        const Part& part,
                                                        const LayerFacts& facts,
                                                        Coverage& coverage) {
  const auto& groups = part.low_rank().groups();
  KVASIR_RETURN_IF_ERROR(CheckPartition(where, groups, facts.num_heads));
  KVASIR_ASSIGN_OR_RETURN(const int64_t dims,
                          CoverLowRank(where, part, facts, coverage));
  std::vector<PlannedLatent> latents;
  for (int g = 0; g < groups.size(); ++g) {
    const int64_t most = groups.Get(g).heads_size() * dims;
    const int64_t rank = groups.Get(g).rank();
    if (rank < 1 || rank > most) {
      return where.Refuse("group ", g, ": rank must be 1..", most, " (",
                          groups.Get(g).heads_size(), " heads of ", dims,
                          " dims), have ", rank);
    }
    latents.push_back({g, rank});
  }
  return latents;
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
          "every head keeps an equal count of pairs, at least "
          "1: head 0 keeps ",
          per_head.Get(0).pair_indices_size(), ", head ", head, " keeps ",
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
    KVASIR_RETURN_IF_ERROR(
        CheckIndices(where, "RoPE pair", group.pairs(), facts.num_pairs));
    if (group.pairs_size() == 0 ||
        group.pairs_size() != group.rank_per_pair_size()) {
      return where.Refuse("group ", g,
                          " wants a rank for each of its pairs, "
                          "at least 1: have ",
                          group.rank_per_pair_size(), " ranks and ",
                          group.pairs_size(), " pairs");
    }
    int64_t width = 0;
    for (int i = 0; i < group.pairs_size(); ++i) {
      const int64_t rank = group.rank_per_pair(i);
      if (rank < 1 || rank > group.heads_size()) {
        return where.Refuse("group ", g, " pair ", group.pairs(i),
                            ": rank must be 1..", group.heads_size(),
                            " (the group's heads), have ", rank);
      }
      width += 2 * rank;  // complex numbers
    }
    for (uint32_t head : group.heads()) {
      for (uint32_t pair : group.pairs()) {
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

absl::Status CheckPart(const PlanPlace& where, const Part& part,
                       const LayerFacts& facts, Coverage& coverage) {
  KVASIR_RETURN_IF_ERROR(CheckStored(where, part, facts));
  KVASIR_RETURN_IF_ERROR(CheckUses(where, part, facts));
  KVASIR_ASSIGN_OR_RETURN(std::vector<PlannedLatent> latents,
                          CheckSpace(where, part, facts, coverage));
  const bool basis =
      part.codec().has_basis_static() || part.codec().has_basis_sequence();
  if (part.has_full() && basis) {
    latents[0].width = facts.num_heads * facts.head_dim;  // heads concatenated
  }
  if (part.latent_bias() && !part.has_low_rank() && !part.has_rope_low_rank()) {
    return where.Refuse("latent_bias needs a low-rank space");
  }
  if (part.mean() && !part.has_full() && !part.has_low_rank()) {
    return where.Refuse("mean needs a full or low_rank space");
  }
  KVASIR_RETURN_IF_ERROR(CheckStorage(where, part.codec(), latents));
  return CheckTransform(where, part);
}

absl::Status CheckSide(PlanPlace where, const SidePlan& side,
                       const LayerFacts& facts) {
  if (side.parts_size() < 1 || side.parts_size() > kMaxPartsPerSide) {
    return where.Refuse("want 1..", kMaxPartsPerSide, " parts, have ",
                        side.parts_size());
  }
  LayerFacts side_facts = facts;
  if (where.side == Side::kValue) side_facts.num_pairs = 0;
  Coverage coverage(side_facts);
  bool any_bits = false;
  for (int p = 0; p < side.parts_size(); ++p) {
    where.part = p;
    any_bits = any_bits || side.parts(p).codec().has_bits();
    KVASIR_RETURN_IF_ERROR(
        CheckPart(where, side.parts(p), side_facts, coverage));
  }
  where.part = -1;
  if (side.exact_window() > 0 && !any_bits) {
    return where.Refuse(
        "an exact_window of ", side.exact_window(),
        " keeps numbers beside codes, and no part stores codes");
  }
  return absl::OkStatus();
}

// A group that shares a latent must lie inside one eviction unit.
template <typename Groups>
bool Straddles(const Groups& groups, const std::vector<int>& unit_of_head) {
  for (const auto& group : groups) {
    for (uint32_t head : group.heads()) {
      if (unit_of_head[head] != unit_of_head[group.heads(0)]) return true;
    }
  }
  return false;
}

absl::Status CheckUnits(const PlanPlace& where, const LayerPlan& plan,
                        const LayerFacts& facts) {
  const auto& units = plan.eviction().units();
  if (units.empty()) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CheckPartition(where, units, facts.num_heads));
  std::vector<int> unit_of_head(static_cast<size_t>(facts.num_heads));
  for (int u = 0; u < units.size(); ++u) {
    for (uint32_t head : units.Get(u).heads()) unit_of_head[head] = u;
  }
  for (const SidePlan* side : {&plan.key(), &plan.value()}) {
    for (const Part& part : side->parts()) {
      if (Straddles(part.low_rank().groups(), unit_of_head) ||
          Straddles(part.rope_low_rank().groups(), unit_of_head)) {
        return where.Refuse("heads that share a latent must share a unit");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckEviction(const PlanPlace& where, const LayerPlan& plan,
                           const LayerFacts& facts) {
  const Eviction& eviction = plan.eviction();
  if (eviction.recent() < 1) {
    return where.Refuse("a recent window is mandatory, have recent 0");
  }
  if (eviction.every_tokens() < 1) {
    return where.Refuse("every_tokens must be >= 1, have 0");
  }
  const int64_t kept = int64_t{eviction.sinks()} + eviction.recent();
  if (eviction.budget() < kept) {
    return where.Refuse("the budget of ", eviction.budget(),
                        " slots is below sinks + recent = ", kept);
  }
  const auto unit_interval = [](double x) { return x >= 0 && x <= 1; };
  if (!unit_interval(eviction.lambda()) || !unit_interval(eviction.decay())) {
    return where.Refuse("lambda and decay must be in 0..1, have ",
                        eviction.lambda(), " and ", eviction.decay());
  }
  if (eviction.positions() == Eviction::ROLLING) {
    for (const Part& part : plan.key().parts()) {
      if (part.stored() == kvasir::v1::POST_ROPE) {
        return where.Refuse(
            "ROLLING positions rotate keys anew: want keys stored PRE_ROPE");
      }
    }
  } else if (eviction.positions() != Eviction::ORIGINAL) {
    return where.Refuse("positions: want ORIGINAL or ROLLING, have ",
                        static_cast<int>(eviction.positions()));
  }
  return CheckUnits(where, plan, facts);
}

absl::Status CheckSelection(const PlanPlace& where, const Selection& selection,
                            const LayerFacts& facts) {
  if (selection.chunk_slots() < 1) {
    return where.Refuse("chunk_slots must be >= 1, have 0");
  }
  const int64_t always =
      int64_t{selection.outlier_chunks()} * selection.chunk_slots() +
      selection.local();
  if (selection.budget() < 1 || selection.budget() < always) {
    return where.Refuse("the budget of ", selection.budget(),
                        " slots must be >= 1 and >= what is always read, ",
                        always);
  }
  const Codec& codec = selection.landmark_codec();
  const bool transformed = codec.transform_case() != Codec::kNone &&
                           codec.transform_case() != Codec::TRANSFORM_NOT_SET;
  if (codec.bits().schedule_size() > 1 || codec.has_channel_sequence() ||
      transformed) {
    return where.Refuse(
        "landmarks are stored as a dtype or one bit width, with no transform "
        "and no range of the sequence");
  }
  return CheckStorage(where, codec, {{0, facts.head_dim}});
}

}  // namespace

absl::Status ValidatePlan(const KvPlan& plan, const CacheShape& shape) {
  KVASIR_RETURN_IF_ERROR(CheckShape(shape));
  if (plan.schema_version() != kPlanSchemaVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("schema_version: want ", kPlanSchemaVersion, ", have ",
                     plan.schema_version()));
  }
  const double target_bytes = plan.target().kv_bytes_per_token();
  if (!std::isfinite(target_bytes) || target_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("target.kv_bytes_per_token must be >= 0 and finite, have ",
                     target_bytes));
  }
  if (plan.layers_size() != shape.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", plan.layers_size(),
                     " layers, the model has ", shape.num_layers()));
  }
  for (int l = 0; l < plan.layers_size(); ++l) {
    const LayerPlan& layer = plan.layers(l);
    const bool rotates = shape.layers[static_cast<size_t>(l)].rope;
    const LayerFacts facts{shape.num_kv_heads, shape.head_dim,
                           rotates ? shape.rotary_dim / 2 : 0, shape.qk_norm};
    KVASIR_RETURN_IF_ERROR(CheckSide(PlanPlace{.layer = l, .side = Side::kKey},
                                     layer.key(), facts));
    KVASIR_RETURN_IF_ERROR(CheckSide(
        PlanPlace{.layer = l, .side = Side::kValue}, layer.value(), facts));
    if (layer.has_eviction()) {
      KVASIR_RETURN_IF_ERROR(CheckEviction(
          PlanPlace{.layer = l, .section = "eviction"}, layer, facts));
    }
    if (layer.has_selection()) {
      KVASIR_RETURN_IF_ERROR(
          CheckSelection(PlanPlace{.layer = l, .section = "selection"},
                         layer.selection(), facts));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
