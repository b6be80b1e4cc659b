// ValidatePlan: which plans have a meaning. What a build serves is a narrower
// question, answered by ServedByThisBuild.
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plan/codec.h"
#include "plan/plan.h"
#include "plan/space.h"

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
