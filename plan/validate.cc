// Implements ValidatePlan. It accepts every plan that has a meaning;
// worker::ServePlan later refuses plans that this build cannot serve.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "plan/codec.h"
#include "plan/plan.h"
#include "plan/space.h"

namespace kvasir::plan {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Eviction;
using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::Selection;
using kvasir::v1::SidePlan;

// The largest size of any dimension. It is far above any model and keeps
// products of two dimensions inside int64.
constexpr int64_t kMaxDimension = 1 << 16;
constexpr int64_t kMaxKeyDims = 1 << 24;  // KV heads times head_dim
constexpr int kMaxPartsPerSide = 16;

absl::Status CheckShape(const AttentionShape& shape) {
  const auto in_range = [](int64_t value) {
    return value >= 1 && value <= kMaxDimension;
  };
  if (!in_range(shape.num_kv_heads) || !in_range(shape.head_dim) ||
      !in_range(shape.num_layers())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the model's shape has ", shape.num_layers(), " layers and ",
        shape.num_kv_heads, " KV heads with head_dim ", shape.head_dim,
        ", but each of the three must be 1 to ", kMaxDimension));
  }
  if (shape.num_kv_heads * shape.head_dim > kMaxKeyDims) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the number of KV heads times head_dim must be at most ", kMaxKeyDims,
        ", but is ", shape.num_kv_heads * shape.head_dim));
  }
  if (shape.rotary_dim < 0 || shape.rotary_dim > shape.head_dim ||
      shape.rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rotary_dim is ", shape.rotary_dim, ", but must be even and from 0 to ",
        shape.head_dim, " (head_dim)"));
  }
  for (int64_t l = 0; l < shape.num_layers(); ++l) {
    const int64_t window = shape.layers[static_cast<size_t>(l)].sliding_window;
    if (window < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", l, ": sliding_window must not be negative, but is ",
          window));
    }
  }
  return absl::OkStatus();
}

// Makes the checks of a part that are the same for keys and for values.
absl::Status CheckPart(const PlanPlace& where, const Part& part,
                       const std::vector<PlannedLatent>& latents) {
  if (part.latent_bias() && !part.has_low_rank() && !part.has_rope_low_rank()) {
    return where.Refuse("latent_bias needs a low_rank or rope_low_rank space");
  }
  if (part.mean() && !part.has_full() && !part.has_low_rank()) {
    return where.Refuse("mean needs a full or low_rank space");
  }
  KVASIR_RETURN_IF_ERROR(CheckStorage(where, part.codec(), latents));
  return CheckTransform(where, part);
}

absl::Status CheckSidePart(const PlanPlace& where, const Part& part,
                           const LayerFacts& facts, Coverage& coverage) {
  KVASIR_RETURN_IF_ERROR(CheckStored(where, part, facts));
  KVASIR_RETURN_IF_ERROR(CheckUses(where, part, facts));
  KVASIR_ASSIGN_OR_RETURN(std::vector<PlannedLatent> latents,
                          CheckSpace(where, part, facts, coverage));
  const bool basis =
      part.codec().has_basis_static() || part.codec().has_basis_sequence();
  if (part.has_full() && basis) {
    // a basis is over the concatenated dimensions of all heads
    latents[0].width = facts.num_heads * facts.head_dim;
  }
  return CheckPart(where, part, latents);
}

template <typename Parts>
bool AnyCodes(const Parts& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [](const Part& part) { return part.codec().has_bits(); });
}

class SidesChecker {
 public:
  SidesChecker(int64_t layer, const LayerPlan& plan, const LayerFacts& facts)
      : layer_(layer),
        plan_(plan),
        facts_(facts),
        value_facts_(WithoutPairs(facts)),
        key_(facts_),
        value_(value_facts_) {}

  absl::Status Check() {
    KVASIR_RETURN_IF_ERROR(CheckSide({.layer = layer_, .side = Side::kKey},
                                     plan_.key(), facts_, key_));
    KVASIR_RETURN_IF_ERROR(CheckSide({.layer = layer_, .side = Side::kValue},
                                     plan_.value(), value_facts_, value_));
    KVASIR_RETURN_IF_ERROR(CheckJoint());
    const bool codes = AnyCodes(plan_.key().parts()) ||
                       AnyCodes(plan_.value().parts()) ||
                       AnyCodes(plan_.joint());
    if (plan_.exact_sinks() > 0 && !codes) {
      return PlanPlace{.layer = layer_, .section = "exact_sinks"}.Refuse(
          "the first ", plan_.exact_sinks(),
          " tokens would be kept exact in addition to codes, but no "
          "part stores codes");
    }
    return absl::OkStatus();
  }

 private:
  static LayerFacts WithoutPairs(LayerFacts facts) {
    facts.num_pairs = 0;
    return facts;
  }

  absl::Status CheckSide(PlanPlace where, const SidePlan& side,
                         const LayerFacts& facts, Coverage& coverage) const {
    const int least = plan_.joint().empty() ? 1 : 0;
    if (side.parts_size() < least || side.parts_size() > kMaxPartsPerSide) {
      return where.Refuse("want ", least, "..", kMaxPartsPerSide,
                          " parts, have ", side.parts_size());
    }
    for (int p = 0; p < side.parts_size(); ++p) {
      where.part = p;
      KVASIR_RETURN_IF_ERROR(
          CheckSidePart(where, side.parts(p), facts, coverage));
    }
    where.part = -1;
    if (side.exact_window() > 0 && !AnyCodes(side.parts()) &&
        !AnyCodes(plan_.joint())) {
      return where.Refuse(
          "an exact_window of ", side.exact_window(),
          " keeps exact numbers in addition to codes, but no part "
          "stores codes");
    }
    return absl::OkStatus();
  }

  absl::Status CheckJoint() {
    PlanPlace where{.layer = layer_, .section = PlanPlace::kJoint};
    if (plan_.joint_size() > 0 &&
        plan_.key().exact_window() != plan_.value().exact_window()) {
      return where.Refuse(
          "keys and values of a joint part share their exact tokens: want one "
          "exact_window, have ",
          plan_.key().exact_window(), " for the key and ",
          plan_.value().exact_window(), " for the value");
    }
    if (plan_.joint_size() > kMaxPartsPerSide) {
      return where.Refuse("want at most ", kMaxPartsPerSide, " parts, have ",
                          plan_.joint_size());
    }
    for (int p = 0; p < plan_.joint_size(); ++p) {
      where.part = p;
      KVASIR_ASSIGN_OR_RETURN(
          const std::vector<PlannedLatent> latents,
          CheckJointSpace(where, plan_.joint(p), facts_, key_, value_));
      KVASIR_RETURN_IF_ERROR(CheckPart(where, plan_.joint(p), latents));
    }
    return absl::OkStatus();
  }

  const int64_t layer_;
  const LayerPlan& plan_;
  const LayerFacts facts_;
  const LayerFacts value_facts_;
  Coverage key_;
  Coverage value_;
};

// True if the heads of a group, which share a latent, are in different
// eviction units.
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
  for (const auto* parts :
       {&plan.key().parts(), &plan.value().parts(), &plan.joint()}) {
    for (const Part& part : *parts) {
      const bool one_basis = part.has_full() && units.size() > 1 &&
                             (part.codec().has_basis_static() ||
                              part.codec().has_basis_sequence());
      if (one_basis || Straddles(part.low_rank().groups(), unit_of_head) ||
          Straddles(part.rope_low_rank().groups(), unit_of_head)) {
        return where.Refuse(
            "heads that share a latent must also share an eviction unit");
      }
    }
  }
  return absl::OkStatus();
}

// Checks that tokens that are stored exactly are never evicted, because their
// place in the cache follows from their position.
absl::Status CheckExactTokensStay(const PlanPlace& where,
                                  const LayerPlan& plan) {
  const Eviction& eviction = plan.eviction();
  const uint32_t window =
      std::max(plan.key().exact_window(), plan.value().exact_window());
  if (eviction.recent() < window) {
    return where.Refuse("eviction must keep the exact_window of ", window,
                        " tokens, but recent is only ", eviction.recent());
  }
  if (eviction.sinks() < plan.exact_sinks()) {
    return where.Refuse("eviction must keep the ", plan.exact_sinks(),
                        " exact_sinks, but sinks is only ", eviction.sinks());
  }
  return absl::OkStatus();
}

absl::Status CheckEviction(const PlanPlace& where, const LayerPlan& plan,
                           const LayerFacts& facts, int64_t sliding_window) {
  const Eviction& eviction = plan.eviction();
  if (sliding_window > 0) {
    return where.Refuse("the layer has a sliding window of ", sliding_window,
                        " tokens, so it already drops the tokens outside the "
                        "window: remove its eviction");
  }
  if (eviction.recent() < 1) {
    return where.Refuse("recent must be at least 1 token, but is 0");
  }
  if (eviction.every_tokens() < 1) {
    return where.Refuse("every_tokens must be at least 1, but is 0");
  }
  const int64_t kept = int64_t{eviction.sinks()} + eviction.recent();
  const double ratio = eviction.budget_ratio();
  if (ratio != 0) {
    if (!(ratio > 0 && ratio <= 1) || eviction.budget() > 0) {
      return where.Refuse(
          "want either a budget in slots or a budget_ratio above 0 and at most "
          "1, have a budget of ",
          eviction.budget(), " and a budget_ratio of ", ratio);
    }
  } else if (eviction.budget() < kept) {
    return where.Refuse("the budget of ", eviction.budget(),
                        " slots is below sinks + recent = ", kept);
  }
  const auto unit_interval = [](double x) { return x >= 0 && x <= 1; };
  if (!unit_interval(eviction.lambda()) || !unit_interval(eviction.decay())) {
    return where.Refuse("lambda and decay must be from 0 to 1, but lambda is ",
                        eviction.lambda(), " and decay is ", eviction.decay());
  }
  if (eviction.positions() == Eviction::ROLLING) {
    for (const auto* parts : {&plan.key().parts(), &plan.joint()}) {
      for (const Part& part : *parts) {
        if (part.stored() == kvasir::v1::POST_ROPE) {
          return where.Refuse(
              "with ROLLING positions, keys are rotated when they are read: "
              "want keys stored PRE_ROPE");
        }
      }
    }
  } else if (eviction.positions() != Eviction::ORIGINAL) {
    return where.Refuse("positions: want ORIGINAL or ROLLING, have ",
                        static_cast<int>(eviction.positions()));
  }
  if (eviction.others() != Eviction::HITTERS &&
      eviction.others() != Eviction::LATEST) {
    return where.Refuse("others: want HITTERS or LATEST, have ",
                        static_cast<int>(eviction.others()));
  }
  KVASIR_RETURN_IF_ERROR(CheckExactTokensStay(where, plan));
  return CheckUnits(where, plan, facts);
}

absl::Status CheckSelection(const PlanPlace& where, const Selection& selection,
                            const LayerFacts& facts) {
  if (selection.chunk_slots() < 1) {
    return where.Refuse("chunk_slots must be at least 1, but is 0");
  }
  const int64_t always =
      int64_t{selection.outlier_chunks()} * selection.chunk_slots() +
      selection.local();
  if (selection.budget() < 1 || selection.budget() < always) {
    return where.Refuse("the budget of ", selection.budget(),
                        " slots must be at least 1 and at least the slots that "
                        "are always read, ",
                        always);
  }
  const Codec& codec = selection.landmark_codec();
  const bool transformed = codec.transform_case() != Codec::kNone &&
                           codec.transform_case() != Codec::TRANSFORM_NOT_SET;
  if (codec.bits().schedule_size() > 1 || codec.bits().runs_size() > 0 ||
      codec.has_channel_sequence() || transformed) {
    return where.Refuse(
        "landmarks must have a dtype or one bit width, no transform and no "
        "channel_sequence range");
  }
  return CheckStorage(where, codec, {{0, facts.head_dim}});
}

}  // namespace

absl::Status ValidatePlan(const KvPlan& plan, const AttentionShape& shape) {
  KVASIR_RETURN_IF_ERROR(CheckShape(shape));
  if (plan.schema_version() != kPlanSchemaVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan's schema_version must be ", kPlanSchemaVersion,
                     ", but is ", plan.schema_version()));
  }
  const double target_bytes = plan.target().kv_bytes_per_token();
  if (!std::isfinite(target_bytes) || target_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan's target.kv_bytes_per_token must be finite and "
                     "not negative, but is ",
                     target_bytes));
  }
  if (plan.layers_size() != shape.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan's number of layers is ", plan.layers_size(),
                     ", but the model's is ", shape.num_layers()));
  }
  for (int l = 0; l < plan.layers_size(); ++l) {
    const LayerPlan& layer = plan.layers(l);
    const LayerFacts facts{shape.num_kv_heads, shape.head_dim,
                           shape.num_pairs(l), shape.qk_norm};
    KVASIR_RETURN_IF_ERROR(SidesChecker(l, layer, facts).Check());
    if (layer.has_eviction()) {
      KVASIR_RETURN_IF_ERROR(CheckEviction(
          PlanPlace{.layer = l, .section = "eviction"}, layer, facts,
          shape.layers[static_cast<size_t>(l)].sliding_window));
    }
    if (layer.has_selection()) {
      KVASIR_RETURN_IF_ERROR(
          CheckSelection(PlanPlace{.layer = l, .section = "selection"},
                         layer.selection(), facts));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::plan
