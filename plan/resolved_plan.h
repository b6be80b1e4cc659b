// A compression plan, resolved once at start for one rank of one model: all
// latents with their sizes, and the groups of layers that share page ids. Code
// that lays out pages, names tensors, compiles attention or counts bytes uses
// it instead of the plan's protobuf.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plan/attention_shape.h"
#include "plan/plan.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::plan {

enum class Space { kFull, kLowRank, kRopePairs, kRopeLowRank };

// Whether keys are stored before or after RoPE rotates them. kNone: RoPE does
// not rotate the stored numbers at all.
enum class RopeSide { kBefore, kAfter, kNone };

enum class Lift { kFold, kAtRuntime, kReconstruct, kAnchored };

// The numbers that share one range (scale and minimum) of codes.
enum class RangeKind {
  kNone,       // none: the numbers are stored unquantized
  kToken,      // channels of one token
  kTokenNorm,  // like kToken, but codes are relative to the latent's length
  kChannel,    // one channel of all tokens
  kSequence,   // one channel of all tokens of a sequence
};

enum class Transform {
  kNone,
  kHadamardFused,
  kHadamardOnline,
  kBasisStatic,
  kBasisSequence,
};

// Channels [begin, begin + width) of a latent, which all have the same number
// of bits. A run of 0 bits comes last, and nothing is stored for its channels.
struct CodeRun {
  int64_t begin = 0;
  int64_t width = 0;
  int bits = 0;

  friend bool operator==(const CodeRun&, const CodeRun&) = default;
};

// A latent: the numbers that a group of KV heads shares in each slot.
struct ResolvedLatent {
  std::vector<int64_t> heads;  // KV heads of the model, ascending
  int64_t width = 0;           // R: the width in the plan
  // R': the width in tensors and in attention. Channels of 0 bits are left out,
  // except with a basis for each sequence, or with explicit runs and static
  // ranges.
  int64_t channels = 0;
  // The number of dimensions of each head that the latent represents.
  int64_t head_dims = 0;
  // RoPE pairs, ascending. In rope_pairs: those that the head keeps. In
  // rope_low_rank: those that the group's latent represents.
  std::vector<uint32_t> pairs;
  // For each complex channel, the RoPE pair that it represents. Only
  // in rope_low_rank.
  std::vector<uint32_t> channel_pairs;
  std::vector<CodeRun> runs;  // empty: unquantized numbers

  // The number of channels with more than 0 bits: the cache stores only these.
  int64_t stored_channels() const;
};

// Describes how some dimensions of a head are computed from a part's latents.
struct ResolvedUse {
  Lift lift = Lift::kFold;
  int64_t dims = 0;          // the dimensions of a head that this use computes
  int64_t rotated_dims = 0;  // the number of these dimensions that RoPE rotates
  int64_t terms = 1;         // for kAnchored: its order + 1; else 1
};

// One part of the keys or values of a layer: its space, and how its latents are
// stored. A joint part of the plan becomes one ResolvedPart on each side, with
// the uses of that side.
struct ResolvedPart {
  Side side = Side::kKey;
  bool joint = false;  // both key and value are computed from the latents
  int index = 0;       // index among its side's parts
  // The prefix of the part's tensor names after "model.layers.{l}.".
  std::string prefix;
  // "up"; in a joint part "up_key" or "up_value". The names of the part's lifts
  // begin with `prefix`, a dot and this.
  std::string lift_prefix;
  Space space = Space::kFull;
  RopeSide stored = RopeSide::kNone;
  Transform transform = Transform::kNone;
  RangeKind range = RangeKind::kNone;
  bool latent_bias = false;
  bool mean = false;

  // The type of the stored numbers; unspecified for codes.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // The type of the parameters of codes, such as scales, that are stored in
  // each slot or once for each sequence. Unspecified if there are none.
  kvasir::v1::DataType param_dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // The widths of codes in bits, as the plan lists them: one width for all
  // channels, or one for each run.
  std::vector<int> bits;
  // the numbers that codes stand for; only if `range` is kTokenNorm
  std::vector<float> levels;
  bool explicit_runs = false;  // the plan lists the channels of each run
  // The number of channels that share a token's range. 0: each run has its
  // own range.
  int64_t range_channels = 0;

  std::vector<ResolvedUse> uses;  // empty for a full space
  bool folded = false;            // the lift is folded into q_proj or o_proj
  // full-rank keys are computed from the latents before attention reads them
  bool rebuilt = false;
  // The dimensions of a head that a low_rank part represents, ascending; empty
  // for other spaces.
  std::vector<int64_t> dims;
  // The latents of all ranks, in the plan's order. A part with a full space has
  // one latent for each head. If its transform is kBasisStatic, it has one
  // latent for all heads together. If it is kBasisSequence, it has one latent
  // for the heads of this rank.
  std::vector<ResolvedLatent> latents;

  bool has_basis() const {
    return transform == Transform::kBasisStatic ||
           transform == Transform::kBasisSequence;
  }
  bool has_lift(Lift lift) const;
  // False for a joint part on the value side, because the key side stores
  // its latents.
  bool stores_latents() const { return !joint || side == Side::kKey; }
  int64_t channels() const;  // of all latents together
  // Returns the latent of a KV head. CHECKs that there is one.
  const ResolvedLatent& LatentOf(int64_t kv_head) const;
  // Returns true if a rank that has the heads `rank` stores the latent: one of
  // these heads uses the latent, or the latent exists only on this rank.
  bool Holds(const ResolvedLatent& latent, const HeadRange& rank) const;

  // The bytes that a latent takes in a slot. CodesBytes: its codes or
  // unquantized numbers, rounded up to whole bytes. ParamsBytes: the parameters
  // of its codes, such as scales.
  int64_t CodesBytes(const ResolvedLatent& latent) const;
  int64_t ParamsBytes(const ResolvedLatent& latent) const;
  // The number of ranges (scale and minimum) that a token has in this latent.
  int64_t NumRanges(const ResolvedLatent& latent) const;
};

struct ResolvedSide {
  std::vector<ResolvedPart> parts;  // joint parts come last
  // The numbers of tokens that are also stored exactly, in addition to their
  // codes: the latest tokens, and the first tokens of the sequence.
  int64_t exact_window = 0;
  int64_t exact_sinks = 0;

  // True if a part of this side stores codes. A joint part counts on
  // both sides.
  bool has_codes() const;
};

// The parts of a layer's keys and values. Layers with equal parts
// share one object.
struct ResolvedAttention {
  bool rotates = false;
  ResolvedSide key;
  ResolvedSide value;

  const ResolvedSide& side(Side which) const {
    return which == Side::kKey ? key : value;
  }
};

// The bytes of a slot's metadata in one eviction unit: 4 for the position,
// 4 for the received attention, and 1 for the accuracy of each side that
// has codes.
inline int64_t EvictionUnitBytes(const ResolvedAttention& attention) {
  return 4 + 4 + (attention.key.has_codes() ? 1 : 0) +
         (attention.value.has_codes() ? 1 : 0);
}

// The rule by which a layer chooses the slots that it keeps.
struct ResolvedEviction {
  // The eviction units: sets of KV heads that evict the same tokens. They cover
  // the heads of all ranks. If the plan lists no units, ResolvePlan starts from
  // the smallest sets for which no latent has heads in two sets. It merges
  // neighbouring sets until their metadata takes less than 5 % of a slot.
  std::vector<std::vector<int64_t>> units;
  int64_t sinks = 0;
  int64_t recent = 0;
  // true: the slots with the best scores stay; false: the latest slots stay
  bool scored = true;
  float lambda = 0;
  // the factor of the codes' accuracy in a score: 1 or 0.5
  float friendliness = 1;
  // the factor by which the received attention is multiplied at each eviction
  float decay = 1;
  bool rolling = false;  // RoPE positions are slot indices
};

// How many slots of a sequence stay, and when the others are evicted.
struct EvictionCounts {
  int64_t budget_tokens = 0;  // slots that stay; 0: budget_ratio applies
  double budget_ratio = 0;    // share of the prompt, at least `least_tokens`
  int64_t least_tokens = 0;
  int64_t every_tokens = 0;  // 0: nothing is evicted
  // An eviction inside a prompt counts only the attention of the latest
  // queries, as many as this number. 0: it counts the attention of all queries.
  int64_t observation_window = 0;

  bool evicts() const { return every_tokens > 0; }
  friend auto operator<=>(const EvictionCounts&,
                          const EvictionCounts&) = default;
};

struct ResolvedSelection {
  int64_t chunk_slots = 0;
  int64_t outlier_chunks = 0;
  bool exact_outliers = false;
  // The bytes of one KV head's landmark.
  int64_t landmark_bytes = 0;
};

struct ResolvedLayer {
  int attention = 0;   // index into ResolvedPlan::attention
  int page_group = 0;  // index into ResolvedPlan::page_groups
  std::optional<ResolvedEviction> eviction;
  std::optional<ResolvedSelection> selection;
};

// A group of layers that hold the same number of tokens at any length, so that
// they share page ids.
struct ResolvedPageGroup {
  int64_t sliding_window = 0;  // 0: none
  EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
};

// Immutable after ResolvePlan has returned it.
struct ResolvedPlan {
  // the plan that was resolved
  kvasir::v1::KvPlan source;
  AttentionShape shape;
  TpShard shard;
  HeadRange kv_heads;  // the KV heads of this rank
  // the query heads of this rank; empty if the shape has none
  HeadRange query_heads;
  std::vector<ResolvedAttention> attention;  // without duplicates
  std::vector<ResolvedLayer> layers;
  std::vector<ResolvedPageGroup> page_groups;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  const ResolvedLayer& layer(int64_t index) const {
    return layers[static_cast<size_t>(index)];
  }
  const ResolvedAttention& attention_of(int64_t index) const {
    return attention[static_cast<size_t>(layer(index).attention)];
  }
};

// Validates the plan (ValidatePlan) and resolves it. INVALID_ARGUMENT if the
// plan is invalid or cannot be divided among the shard's ranks.
absl::StatusOr<ResolvedPlan> ResolvePlan(const kvasir::v1::KvPlan& plan,
                                         const AttentionShape& shape,
                                         TpShard shard = {});

// Resolves the attention of one layer, for code that makes or reads artifacts
// layer by layer. The plan must have been validated for the model.
// INVALID_ARGUMENT if the plan's heads do not fit `shape`.
absl::StatusOr<ResolvedAttention> ResolveAttention(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer, TpShard shard = {});

// Resolves the eviction of one layer of a validated plan. Empty if the layer
// does not evict.
struct LayerEviction {
  ResolvedEviction slots;
  EvictionCounts counts;
};
absl::StatusOr<std::optional<LayerEviction>> ResolveLayerEviction(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer);

// The number of plans that this process has resolved. Tests use it to check
// that a plan is resolved only once.
int64_t NumResolvedPlans();

// Returns a part with one latent of `width` numbers, in which only the fields
// that determine how the latent is stored are set.
ResolvedPart ResolveCodec(const kvasir::v1::Codec& codec, int64_t width);

// How many channels of a latent with `width` numbers the codec stores: all
// except those of 0 bits.
int64_t StoredChannels(const kvasir::v1::Codec& codec, int64_t width);

// The dimensions of a head that belong to these RoPE pairs, in the same order
// as in a head that has only these pairs.
std::vector<int64_t> PairDims(RopePairing pairing, int64_t rotary_dim,
                              std::span<const uint32_t> pairs);

}  // namespace kvasir::plan
