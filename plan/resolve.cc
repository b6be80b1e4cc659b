#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "plan/artifact_tensors.h"
#include "plan/normal_levels.h"
#include "plan/resolved_plan.h"

namespace kvasir::plan {

using kvasir::v1::Codec;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::SidePlan;

namespace {

// Units are merged until their metadata takes less than this share of a slot.
constexpr int64_t kUnitMetadataPercent = 5;

std::atomic<int64_t> num_resolved_plans = 0;

template <typename Repeated>
std::vector<int64_t> Ascending(const Repeated& heads) {
  std::vector<int64_t> sorted(heads.begin(), heads.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

std::vector<int64_t> HeadsOf(HeadRange range) {
  std::vector<int64_t> heads(static_cast<size_t>(range.count));
  std::iota(heads.begin(), heads.end(), range.first);
  return heads;
}

Space SpaceOf(const Part& part) {
  switch (part.space_case()) {
    case Part::kLowRank:
      return Space::kLowRank;
    case Part::kRopePairs:
      return Space::kRopePairs;
    case Part::kRopeLowRank:
      return Space::kRopeLowRank;
    default:
      return Space::kFull;
  }
}

RopeSide StoredOf(const Part& part) {
  switch (part.stored()) {
    case kvasir::v1::PRE_ROPE:
      return RopeSide::kBefore;
    case kvasir::v1::POST_ROPE:
      return RopeSide::kAfter;
    default:
      return RopeSide::kNone;
  }
}

Lift LiftOf(const Part::Use& use) {
  switch (use.lift_case()) {
    case Part::Use::kAtRuntime:
      return Lift::kAtRuntime;
    case Part::Use::kReconstruct:
      return Lift::kReconstruct;
    case Part::Use::kAnchored:
      return Lift::kAnchored;
    default:
      return Lift::kFold;
  }
}

RangeKind RangeOf(const Codec& codec) {
  switch (codec.range_case()) {
    case Codec::kPerToken:
      return RangeKind::kToken;
    case Codec::kPerTokenNorm:
      return RangeKind::kTokenNorm;
    case Codec::kChannelStatic:
      return RangeKind::kChannel;
    case Codec::kChannelSequence:
      return RangeKind::kSequence;
    case Codec::RANGE_NOT_SET:
      break;
  }
  return RangeKind::kNone;
}

Transform TransformOf(const Codec& codec) {
  switch (codec.transform_case()) {
    case Codec::kHadamardFused:
      return Transform::kHadamardFused;
    case Codec::kHadamardOnline:
      return Transform::kHadamardOnline;
    case Codec::kBasisStatic:
      return Transform::kBasisStatic;
    case Codec::kBasisSequence:
      return Transform::kBasisSequence;
    default:
      return Transform::kNone;
  }
}

// True if channels of 0 bits stay in the latent as constants (their minimums).
bool KeepsUnstored(const ResolvedPart& part) {
  return part.explicit_runs && part.range == RangeKind::kChannel;
}

// Returns the runs. Neighbouring explicit runs with equal bits become one.
std::vector<CodeRun> RunsOf(const Codec& codec, const ResolvedPart& part,
                            int64_t width) {
  std::vector<CodeRun> runs;
  int64_t begin = 0;
  const auto add = [&](int64_t channels, uint32_t bits) {
    if (bits == 0 && !KeepsUnstored(part)) return;
    const auto same = static_cast<int>(bits);
    if (part.explicit_runs && !runs.empty() && runs.back().bits == same) {
      runs.back().width += channels;
    } else {
      runs.push_back({begin, channels, same});
    }
    begin += channels;
  };
  const auto& schedule = codec.bits().schedule();
  for (const uint32_t bits : schedule) add(width / schedule.size(), bits);
  for (const Codec::Bits::Run& run : codec.bits().runs()) {
    add(run.channels(), run.bits());
  }
  return runs;
}

void SetCodec(const Codec& codec, ResolvedPart* part) {
  part->transform = TransformOf(codec);
  part->range = RangeOf(codec);
  part->range_channels = codec.per_token().group();
  part->bits.assign(codec.bits().schedule().begin(),
                    codec.bits().schedule().end());
  for (const Codec::Bits::Run& run : codec.bits().runs()) {
    part->bits.push_back(static_cast<int>(run.bits()));
  }
  part->explicit_runs = codec.bits().runs_size() > 0;
  part->levels = RoundedLevels(codec.per_token_norm().levels());
  if (codec.has_dtype()) part->dtype = codec.dtype();
  if (codec.has_bits() && !codec.has_channel_static()) {
    part->param_dtype = codec.param_dtype();
  }
}

class LayerResolver {
 public:
  LayerResolver(const AttentionShape& shape, int64_t layer, TpShard shard,
                HeadRange kv_heads)
      : shape_(shape), layer_(layer), shard_(shard), kv_heads_(kv_heads) {}

  absl::StatusOr<ResolvedAttention> Resolve(const LayerPlan& plan) const {
    ResolvedAttention attention;
    attention.rotates = shape_.num_pairs(layer_) > 0;
    KVASIR_ASSIGN_OR_RETURN(attention.key, ResolveSide(Side::kKey, plan.key()));
    KVASIR_ASSIGN_OR_RETURN(attention.value,
                            ResolveSide(Side::kValue, plan.value()));
    for (int p = 0; p < plan.joint_size(); ++p) {
      for (ResolvedSide* side : {&attention.key, &attention.value}) {
        const bool key = side == &attention.key;
        ResolvedPart part;
        part.side = key ? Side::kKey : Side::kValue;
        part.joint = true;
        part.index = static_cast<int>(side->parts.size());
        part.prefix = PartPrefix("self_attn.kv_proj", p, plan.joint_size());
        part.lift_prefix = key ? "up_key" : "up_value";
        KVASIR_RETURN_IF_ERROR(ResolvePart(plan.joint(p), &part));
        side->parts.push_back(std::move(part));
      }
    }
    for (ResolvedSide* side : {&attention.key, &attention.value}) {
      if (StoresCodes(side->parts)) {
        side->exact_sinks = plan.exact_sinks();
      }
    }
    return attention;
  }

 private:
  static bool StoresCodes(const std::vector<ResolvedPart>& parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [](const ResolvedPart& part) {
                         return part.range != RangeKind::kNone;
                       });
  }

  absl::StatusOr<ResolvedSide> ResolveSide(Side side,
                                           const SidePlan& plan) const {
    ResolvedSide resolved;
    resolved.exact_window = plan.exact_window();
    for (int p = 0; p < plan.parts_size(); ++p) {
      ResolvedPart part;
      part.side = side;
      part.index = p;
      part.prefix = PartPrefix(
          side == Side::kKey ? "self_attn.k_proj" : "self_attn.v_proj", p,
          plan.parts_size());
      part.lift_prefix = "up";
      KVASIR_RETURN_IF_ERROR(ResolvePart(plan.parts(p), &part));
      resolved.parts.push_back(std::move(part));
    }
    return resolved;
  }

  absl::Status ResolvePart(const Part& plan, ResolvedPart* part) const {
    part->space = SpaceOf(plan);
    // Values are never rotated, even if the keys of a joint part are.
    if (part->side == Side::kKey) part->stored = StoredOf(plan);
    part->latent_bias = plan.latent_bias();
    part->mean = plan.mean();
    SetCodec(plan.codec(), part);
    ResolveUses(plan, part);
    ResolveLatents(plan, part);
    KVASIR_RETURN_IF_ERROR(CheckHeads(*part));
    return CheckWidthsOfRank(*part);
  }

  int64_t RotaryDims(Side side) const {
    return side == Side::kKey ? 2 * shape_.num_pairs(layer_) : 0;
  }

  // Returns the dimensions of a use: its pairs' if it lists any; all if it is
  // the only use of a rotated part; else those that RoPE does not rotate.
  std::vector<int64_t> DimsOf(const Part& plan, const Part::Use& use,
                              Side side) const {
    if (use.pairs_size() > 0) {
      return PairDims(
          shape_.pairing, shape_.rotary_dim,
          {use.pairs().data(), static_cast<size_t>(use.pairs_size())});
    }
    const auto of_value = [](const Part::Use& any) {
      return any.serves() == kvasir::v1::SERVES_VALUE;
    };
    const bool single = std::count_if(plan.uses().begin(), plan.uses().end(),
                                      [&](const Part::Use& other) {
                                        return of_value(other) == of_value(use);
                                      }) == 1;
    const bool all = single && plan.stored() != kvasir::v1::NO_ROPE;
    const int64_t first = all ? 0 : RotaryDims(side);
    std::vector<int64_t> dims(static_cast<size_t>(shape_.head_dim - first));
    std::iota(dims.begin(), dims.end(), first);
    return dims;
  }

  void ResolveUses(const Part& plan, ResolvedPart* part) const {
    part->folded = plan.uses_size() > 0;
    for (const Part::Use& use : plan.uses()) {
      if (part->joint && (use.serves() == kvasir::v1::SERVES_VALUE) !=
                             (part->side == Side::kValue)) {
        continue;
      }
      ResolvedUse resolved;
      resolved.lift = LiftOf(use);
      resolved.terms = int64_t{use.anchored().order()} + 1;
      if (plan.has_low_rank()) {
        const std::vector<int64_t> dims = DimsOf(plan, use, part->side);
        const int64_t rotary = RotaryDims(part->side);
        resolved.dims = static_cast<int64_t>(dims.size());
        resolved.rotated_dims =
            std::count_if(dims.begin(), dims.end(),
                          [rotary](int64_t dim) { return dim < rotary; });
        part->dims.insert(part->dims.end(), dims.begin(), dims.end());
      }
      part->folded = part->folded && resolved.lift == Lift::kFold;
      part->rebuilt = part->rebuilt || (part->side == Side::kKey &&
                                        (resolved.lift == Lift::kReconstruct ||
                                         resolved.lift == Lift::kAnchored));
      part->uses.push_back(resolved);
    }
    std::sort(part->dims.begin(), part->dims.end());
  }

  void ResolveLatents(const Part& plan, ResolvedPart* part) const {
    const int64_t head_dim = shape_.head_dim;
    const auto add = [&](std::vector<int64_t> heads, int64_t width,
                         int64_t head_dims) -> ResolvedLatent& {
      ResolvedLatent& latent = part->latents.emplace_back();
      latent.heads = std::move(heads);
      latent.width = width;
      latent.head_dims = head_dims;
      latent.runs = RunsOf(plan.codec(), *part, width);
      latent.channels =
          part->transform == Transform::kBasisSequence || KeepsUnstored(*part)
              ? width
              : latent.stored_channels();
      return latent;
    };
    switch (part->space) {
      case Space::kFull:
        if (part->has_basis()) {
          const HeadRange heads = part->transform == Transform::kBasisSequence
                                      ? kv_heads_
                                      : HeadRange{0, shape_.num_kv_heads};
          add(HeadsOf(heads), heads.count * head_dim, head_dim);
          return;
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
          add({head}, head_dim, head_dim);
        }
        return;
      case Space::kLowRank:
        for (const auto& group : plan.low_rank().groups()) {
          add(Ascending(group.heads()), group.rank(),
              static_cast<int64_t>(part->dims.size()));
        }
        return;
      case Space::kRopePairs:
        for (int h = 0; h < plan.rope_pairs().per_head_size(); ++h) {
          const auto& pairs = plan.rope_pairs().per_head(h).pair_indices();
          const int64_t dims = 2 * int64_t{pairs.size()};
          add({h}, dims, dims).pairs.assign(pairs.begin(), pairs.end());
        }
        return;
      case Space::kRopeLowRank:
        for (const auto& group : plan.rope_low_rank().groups()) {
          std::vector<uint32_t> channel_pairs;
          for (int i = 0; i < group.pairs_size(); ++i) {
            channel_pairs.insert(channel_pairs.end(), group.rank_per_pair(i),
                                 group.pairs(i));
          }
          const std::set<uint32_t> pairs(channel_pairs.begin(),
                                         channel_pairs.end());
          ResolvedLatent& latent =
              add(Ascending(group.heads()),
                  2 * static_cast<int64_t>(channel_pairs.size()),
                  2 * static_cast<int64_t>(pairs.size()));
          latent.pairs.assign(pairs.begin(), pairs.end());
          latent.channel_pairs = std::move(channel_pairs);
        }
        return;
    }
  }

  // Checks that every head is in exactly one of the plan's groups.
  absl::Status CheckHeads(const ResolvedPart& part) const {
    if (part.space == Space::kFull) return absl::OkStatus();
    std::vector<int> latents_of(static_cast<size_t>(shape_.num_kv_heads), 0);
    for (const ResolvedLatent& latent : part.latents) {
      for (const int64_t head : latent.heads) {
        if (head < shape_.num_kv_heads) ++latents_of[static_cast<size_t>(head)];
      }
    }
    for (size_t head = 0; head < latents_of.size(); ++head) {
      if (latents_of[head] == 1) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", layer_, ": ", part.prefix, ": KV head ", head, " of ",
          shape_.num_kv_heads, " is in ", latents_of[head],
          " groups of the plan instead of 1: the plan is for another model"));
    }
    return absl::OkStatus();
  }

  // Like ValidatePlan, for the runs and ranges of this rank's latents.
  absl::Status CheckWidthsOfRank(const ResolvedPart& part) const {
    if (part.space != Space::kFull || part.bits.empty() ||
        part.transform != Transform::kBasisSequence) {
      return absl::OkStatus();
    }
    const auto runs = static_cast<int64_t>(part.bits.size());
    const int64_t range = std::max(part.range_channels, int64_t{1});
    const int64_t width = part.latents[0].width;
    if (part.explicit_runs ? kv_heads_.count == shape_.num_kv_heads
                           : width % runs == 0 && width / runs % range == 0) {
      return absl::OkStatus();
    }
    const std::string equal =
        absl::StrCat(runs, " runs of whole ranges of ", range, " channels");
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer_, " ", SideName(part.side), " part ",
                     part.index, ": the ", width, " channels of rank ",
                     shard_.rank, " of ", shard_.size, " do not divide into ",
                     part.explicit_runs ? "the runs of all KV heads" : equal,
                     ": use fewer tensor-parallel ranks"));
  }

  const AttentionShape& shape_;
  const int64_t layer_;
  const TpShard shard_;
  const HeadRange kv_heads_;
};

// Visits each part that stores latents, once.
template <typename Visit>
void ForParts(const ResolvedAttention& attention, const Visit& visit) {
  for (const ResolvedSide* side : {&attention.key, &attention.value}) {
    for (const ResolvedPart& part : side->parts) {
      if (part.stores_latents()) visit(part);
    }
  }
}

// Returns the smallest sets of heads such that no latent has heads in two sets.
std::vector<std::vector<int64_t>> FinestUnits(
    const ResolvedAttention& attention, int64_t num_heads) {
  std::vector<int64_t> root(static_cast<size_t>(num_heads));
  std::iota(root.begin(), root.end(), int64_t{0});
  const auto find = [&root](int64_t head) {
    while (root[static_cast<size_t>(head)] != head) {
      head = root[static_cast<size_t>(head)];
    }
    return head;
  };
  ForParts(attention, [&](const ResolvedPart& part) {
    // If each rank has a basis over its own heads, all heads become one set, so
    // that the units do not depend on the number of ranks.
    const bool own = part.transform == Transform::kBasisSequence;
    if (own && part.space == Space::kFull) {
      std::fill(root.begin(), root.end(), int64_t{0});
      return;
    }
    for (const ResolvedLatent& latent : part.latents) {
      for (const int64_t head : latent.heads) {
        const auto [first, other] =
            std::minmax({find(latent.heads[0]), find(head)});
        root[static_cast<size_t>(other)] = first;
      }
    }
  });
  std::map<int64_t, std::vector<int64_t>> units;
  for (int64_t head = 0; head < num_heads; ++head) {
    units[find(head)].push_back(head);
  }
  std::vector<std::vector<int64_t>> list;
  for (auto& [first, heads] : units) list.push_back(std::move(heads));
  return list;
}

// Merges neighbouring units in pairs; an odd last unit stays unchanged.
std::vector<std::vector<int64_t>> HalveUnits(
    const std::vector<std::vector<int64_t>>& units) {
  std::vector<std::vector<int64_t>> halved;
  for (size_t i = 0; i < units.size(); i += 2) {
    std::vector<int64_t>& unit = halved.emplace_back(units[i]);
    if (i + 1 == units.size()) break;
    unit.insert(unit.end(), units[i + 1].begin(), units[i + 1].end());
    std::sort(unit.begin(), unit.end());
  }
  return halved;
}

ResolvedEviction ResolveEviction(const kvasir::v1::Eviction& eviction,
                                 const ResolvedAttention& attention,
                                 int64_t num_heads, int64_t heads_of_rank) {
  ResolvedEviction resolved;
  resolved.sinks = eviction.sinks();
  resolved.recent = eviction.recent();
  resolved.scored = eviction.others() == kvasir::v1::Eviction::HITTERS;
  resolved.lambda = static_cast<float>(eviction.lambda());
  resolved.friendliness = eviction.half_friendliness() ? 0.5F : 1.0F;
  resolved.decay =
      eviction.decay() == 0 ? 1.0F : static_cast<float>(eviction.decay());
  resolved.rolling = eviction.positions() == kvasir::v1::Eviction::ROLLING;
  for (const auto& unit : eviction.units()) {
    resolved.units.push_back(Ascending(unit.heads()));
  }
  if (!resolved.units.empty()) return resolved;
  resolved.units = FinestUnits(attention, num_heads);
  int64_t slot_bytes = 0;  // bytes of the latents of all heads
  ForParts(attention, [&](const ResolvedPart& part) {
    for (const ResolvedLatent& latent : part.latents) {
      const bool own = part.space == Space::kFull &&
                       part.transform == Transform::kBasisSequence;
      slot_bytes += (part.CodesBytes(latent) + part.ParamsBytes(latent)) *
                    (own ? num_heads / heads_of_rank : 1);
    }
  });
  const int64_t unit_bytes = EvictionUnitBytes(attention);
  const auto are_cheap = [&] {
    const auto units = static_cast<int64_t>(resolved.units.size());
    return units * unit_bytes * 100 < slot_bytes * kUnitMetadataPercent;
  };
  while (resolved.units.size() > 1 && !are_cheap()) {
    resolved.units = HalveUnits(resolved.units);
  }
  return resolved;
}

ResolvedSelection ResolveSelection(const kvasir::v1::Selection& selection,
                                   int64_t head_dim) {
  const ResolvedPart landmark =
      ResolveCodec(selection.landmark_codec(), head_dim);
  const ResolvedLatent& latent = landmark.latents[0];
  return {.chunk_slots = selection.chunk_slots(),
          .outlier_chunks = selection.outlier_chunks(),
          .exact_outliers = selection.exact_outliers(),
          .landmark_bytes =
              landmark.CodesBytes(latent) + landmark.ParamsBytes(latent)};
}

// Layers for which this returns equal texts share their attention.
std::string AttentionKey(const LayerPlan& plan, bool rotates) {
  LayerPlan attention = plan;
  attention.clear_eviction();
  attention.clear_selection();
  return absl::StrCat(rotates, " ", attention.SerializeAsString());
}

// Sinks and recent slots are part of the budget. If the budget is a share of
// the prompt, it is at least as large as both together.
EvictionCounts CountsOf(const LayerPlan& plan) {
  if (!plan.has_eviction()) return {};
  const kvasir::v1::Eviction& eviction = plan.eviction();
  EvictionCounts counts{.budget_tokens = eviction.budget(),
                        .budget_ratio = eviction.budget_ratio(),
                        .every_tokens = eviction.every_tokens(),
                        .observation_window = eviction.observation_window()};
  if (counts.budget_tokens == 0) {
    counts.least_tokens = int64_t{eviction.sinks()} + eviction.recent();
  }
  return counts;
}

}  // namespace

int64_t ResolvedLatent::stored_channels() const {
  int64_t sum = 0;
  for (const CodeRun& run : runs) sum += run.bits > 0 ? run.width : 0;
  return runs.empty() ? width : sum;
}

bool ResolvedPart::has_lift(Lift lift) const {
  return std::any_of(uses.begin(), uses.end(), [lift](const ResolvedUse& use) {
    return use.lift == lift;
  });
}

int64_t ResolvedPart::channels() const {
  int64_t sum = 0;
  for (const ResolvedLatent& latent : latents) sum += latent.channels;
  return sum;
}

const ResolvedLatent& ResolvedPart::LatentOf(int64_t kv_head) const {
  const auto found = std::find_if(
      latents.begin(), latents.end(), [kv_head](const ResolvedLatent& latent) {
        return std::binary_search(latent.heads.begin(), latent.heads.end(),
                                  kv_head);
      });
  KVASIR_CHECK(found != latents.end());
  return *found;
}

bool ResolvedPart::Holds(const ResolvedLatent& latent,
                         const HeadRange& rank) const {
  const bool own =
      space == Space::kFull && transform == Transform::kBasisSequence;
  return own || std::any_of(latent.heads.begin(), latent.heads.end(),
                            [rank](int64_t h) { return rank.Contains(h); });
}

bool ResolvedSide::has_codes() const {
  return std::any_of(parts.begin(), parts.end(), [](const ResolvedPart& part) {
    return part.range != RangeKind::kNone;
  });
}

int64_t ResolvedPart::CodesBytes(const ResolvedLatent& latent) const {
  if (latent.runs.empty()) return latent.width * DataTypeBytes(dtype);
  int64_t total_bits = 0;
  for (const CodeRun& run : latent.runs) total_bits += run.width * run.bits;
  return (total_bits + 7) / 8;
}

int64_t ResolvedPart::NumRanges(const ResolvedLatent& latent) const {
  if (range_channels > 0) return latent.stored_channels() / range_channels;
  return static_cast<int64_t>(latent.runs.size());
}

int64_t ResolvedPart::ParamsBytes(const ResolvedLatent& latent) const {
  switch (range) {
    case RangeKind::kToken:  // a scale and a minimum for each range
      return 2 * NumRanges(latent) * DataTypeBytes(param_dtype);
    case RangeKind::kTokenNorm:
      return DataTypeBytes(param_dtype);
    default:
      return 0;
  }
}

absl::StatusOr<ResolvedAttention> ResolveAttention(const LayerPlan& plan,
                                                   const AttentionShape& shape,
                                                   int64_t layer,
                                                   TpShard shard) {
  KVASIR_ASSIGN_OR_RETURN(const HeadRange kv_heads,
                          KvHeadsOfRank(shard, shape.num_kv_heads));
  return LayerResolver(shape, layer, shard, kv_heads).Resolve(plan);
}

absl::StatusOr<std::optional<LayerEviction>> ResolveLayerEviction(
    const LayerPlan& plan, const AttentionShape& shape, int64_t layer) {
  if (!plan.has_eviction()) return std::nullopt;
  KVASIR_ASSIGN_OR_RETURN(const ResolvedAttention attention,
                          ResolveAttention(plan, shape, layer));
  return LayerEviction{ResolveEviction(plan.eviction(), attention,
                                       shape.num_kv_heads, shape.num_kv_heads),
                       CountsOf(plan)};
}

absl::StatusOr<ResolvedPlan> ResolvePlan(const kvasir::v1::KvPlan& plan,
                                         const AttentionShape& shape,
                                         TpShard shard) {
  KVASIR_RETURN_IF_ERROR(ValidatePlan(plan, shape));
  ++num_resolved_plans;
  ResolvedPlan resolved;
  resolved.source = plan;
  resolved.shape = shape;
  resolved.shard = shard;
  KVASIR_ASSIGN_OR_RETURN(resolved.kv_heads,
                          KvHeadsOfRank(shard, shape.num_kv_heads));
  if (shape.num_heads % shard.size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        shape.num_heads, " query heads cannot be divided equally among ",
        shard.size, " tensor-parallel ranks"));
  }
  const int64_t queries = shape.num_heads / shard.size;
  resolved.query_heads = {shard.rank * queries, queries};
  std::map<std::string, int> attention_of;
  // Maps a sliding window and eviction counts to the index of their page group.
  std::map<std::pair<int64_t, EvictionCounts>, int> group_of;
  for (int l = 0; l < plan.layers_size(); ++l) {
    const LayerPlan& from = plan.layers(l);
    ResolvedLayer layer;
    const auto [known, is_new] =
        attention_of.try_emplace(AttentionKey(from, shape.num_pairs(l) > 0),
                                 static_cast<int>(resolved.attention.size()));
    layer.attention = known->second;
    if (is_new) {
      KVASIR_ASSIGN_OR_RETURN(
          ResolvedAttention attention,
          LayerResolver(shape, l, shard, resolved.kv_heads).Resolve(from));
      resolved.attention.push_back(std::move(attention));
    }
    const LayerShape& layer_shape = shape.layers[static_cast<size_t>(l)];
    const auto [group, is_new_group] =
        group_of.try_emplace({layer_shape.sliding_window, CountsOf(from)},
                             static_cast<int>(resolved.page_groups.size()));
    layer.page_group = group->second;
    if (is_new_group) {
      resolved.page_groups.push_back(
          {.sliding_window = layer_shape.sliding_window,
           .eviction = CountsOf(from),
           .layers = {}});
    }
    resolved.page_groups[static_cast<size_t>(layer.page_group)]
        .layers.push_back(l);
    if (from.has_eviction()) {
      layer.eviction = ResolveEviction(
          from.eviction(),
          resolved.attention[static_cast<size_t>(layer.attention)],
          shape.num_kv_heads, resolved.kv_heads.count);
    }
    if (from.has_selection()) {
      layer.selection = ResolveSelection(from.selection(), shape.head_dim);
    }
    resolved.layers.push_back(std::move(layer));
  }
  return resolved;
}

int64_t NumResolvedPlans() { return num_resolved_plans; }

ResolvedPart ResolveCodec(const Codec& codec, int64_t width) {
  ResolvedPart part;
  SetCodec(codec, &part);
  ResolvedLatent& latent = part.latents.emplace_back();
  latent.width = width;
  latent.runs = RunsOf(codec, part, width);
  latent.channels = KeepsUnstored(part) ? width : latent.stored_channels();
  return part;
}

int64_t StoredChannels(const Codec& codec, int64_t width) {
  return ResolveCodec(codec, width).channels();
}

std::vector<int64_t> PairDims(RopePairing pairing, int64_t rotary_dim,
                              std::span<const uint32_t> pairs) {
  std::vector<int64_t> dims;
  if (pairing == RopePairing::kInterleaved) {
    for (const int64_t pair : pairs) {
      dims.push_back(2 * pair);
      dims.push_back(2 * pair + 1);
    }
    return dims;
  }
  for (const int64_t pair : pairs) dims.push_back(pair);
  for (const int64_t pair : pairs) dims.push_back(pair + rotary_dim / 2);
  return dims;
}

}  // namespace kvasir::plan
