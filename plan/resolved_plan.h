// A compression plan, resolved once at start for one rank of one model. It has
// the latents (their heads, their widths, their side of RoPE and their runs of
// codes), and which layers hold the same tokens. Layout, arenas, tensor names,
// attention programs, FLOPs, random weights and the reference decoder use it.
// Only planners and writers of artifacts see the protobuf.
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

// Whether a stored key is taken before or after its rotation. kNone: numbers
// that do not rotate.
enum class RopeSide { kBefore, kAfter, kNone };

enum class Lift { kFold, kAtRuntime, kReconstruct, kAnchored };

// The scale of codes. kNone: plain numbers instead of codes.
enum class RangeKind { kNone, kToken, kTokenNorm, kChannel, kSequence };

enum class Transform {
  kNone,
  kHadamardFused,
  kHadamardOnline,
  kBasisStatic,
  kBasisSequence,
};

// Channels [begin, begin + width) of a latent that have one bit width. A last
// run of 0 bits has channels of which nothing is stored.
struct CodeRun {
  int64_t begin = 0;
  int64_t width = 0;
  int bits = 0;

  friend bool operator==(const CodeRun&, const CodeRun&) = default;
};

// The latent that a group of KV heads shares: some numbers per slot.
struct ResolvedLatent {
  std::vector<int64_t> heads;  // KV heads of the model, ascending
  int64_t width = 0;           // R: the width in the plan
  // R': the width in tensors and attention. It leaves out channels of 0 bits,
  // with two exceptions: a basis of the sequence, which is found over all
  // channels, and explicit runs with ranges of their own.
  int64_t channels = 0;
  // Dims of each of its heads that the latent stands for.
  int64_t head_dims = 0;
  // RoPE pairs, ascending: those that a rope_pairs head keeps, or those of a
  // rope_low_rank group.
  std::vector<uint32_t> pairs;
  // The pair of each complex channel; only in rope_low_rank.
  std::vector<uint32_t> channel_pairs;
  std::vector<CodeRun> runs;  // empty: plain numbers

  // Channels of which the cache stores something.
  int64_t stored_channels() const;
};

// How a part's latents give some dims of a head.
struct ResolvedUse {
  Lift lift = Lift::kFold;
  int64_t dims = 0;          // dims of a head
  int64_t rotated_dims = 0;  // how many of them rotate
  int64_t terms = 1;         // 1 + the order of an ANCHORED lift
};

// One part of a side: a space, and how its latents are stored. A joint part of
// the plan becomes one part of each side, with the uses of that side.
struct ResolvedPart {
  Side side = Side::kKey;
  bool joint = false;  // the latents serve key and value
  int index = 0;       // index among its side's parts
  // The beginning of its tensors' names, after "model.layers.{l}.".
  std::string prefix;
  // The beginning of its lifts' names, after the prefix and a point: "up", or
  // "up_key" or "up_value" for a joint part.
  std::string lift_prefix;
  Space space = Space::kFull;
  RopeSide stored = RopeSide::kNone;
  Transform transform = Transform::kNone;
  RangeKind range = RangeKind::kNone;
  bool latent_bias = false;
  bool mean = false;

  // The type of the numbers; unspecified for codes.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // The type of parameters that are stored with codes or belong to a sequence;
  // otherwise unspecified.
  kvasir::v1::DataType param_dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // Bit widths as the plan lists them: one for all channels, or one for each
  // run.
  std::vector<int> bits;
  std::vector<float> levels;   // only for ranges of a token's norm
  bool explicit_runs = false;  // the plan states the channels of the runs
  // Channels that share one range of a token. 0: a range for each run.
  int64_t range_channels = 0;

  std::vector<ResolvedUse> uses;  // empty for a full space
  bool folded = false;            // the lift is folded into q_proj or o_proj
  bool rebuilt = false;           // keys are lifted as a whole
  // The dims of a head that a low_rank part covers, ascending; empty for other
  // spaces.
  std::vector<int64_t> dims;
  // The latents of the whole model, in the plan's order. A full space has one
  // for each head; with a static basis one for all heads; with a basis of the
  // sequence one for the heads of this rank.
  std::vector<ResolvedLatent> latents;

  bool has_basis() const {
    return transform == Transform::kBasisStatic ||
           transform == Transform::kBasisSequence;
  }
  bool has_lift(Lift lift) const;
  // False for the values' copy of a joint part: the key part stores the latents
  // of both.
  bool stores_latents() const { return !joint || side == Side::kKey; }
  int64_t channels() const;  // summed over the latents
  // The latent of a KV head. Every head must have one (CHECK).
  const ResolvedLatent& LatentOf(int64_t kv_head) const;
  // Whether the rank holds the latent: one of its heads belongs to the rank, or
  // it is a latent of this rank only.
  bool Holds(const ResolvedLatent& latent, const HeadRange& rank) const;

  // Bytes of a slot: codes or numbers, rounded up to whole bytes, and
  // parameters.
  int64_t CodesBytes(const ResolvedLatent& latent) const;
  int64_t ParamsBytes(const ResolvedLatent& latent) const;
  // The number of runs of codes that have a range of their own.
  int64_t NumRanges(const ResolvedLatent& latent) const;
};

struct ResolvedSide {
  std::vector<ResolvedPart> parts;  // joint parts come last
  // Tokens that are also kept exact, in addition to their codes: the nearest to
  // the query, and the first of the sequence.
  int64_t exact_window = 0;
  int64_t exact_sinks = 0;

  // Whether a latent is stored in codes. Latents of a joint part count on both
  // sides.
  bool has_codes() const;
};

// The data that layers with equal attention share.
struct ResolvedAttention {
  bool rotates = false;
  ResolvedSide key;
  ResolvedSide value;

  const ResolvedSide& side(Side which) const {
    return which == Side::kKey ? key : value;
  }
};

// Metadata bytes of a slot in an eviction unit: position (4), attention mass
// received (4), and a logarithmic error (1) for each side that has codes.
inline int64_t EvictionUnitBytes(const ResolvedAttention& attention) {
  return 4 + 4 + (attention.key.has_codes() ? 1 : 0) +
         (attention.value.has_codes() ? 1 : 0);
}

// The rule for the slots that a layer keeps.
struct ResolvedEviction {
  // KV heads that give up the same tokens, of the whole model, whatever this
  // rank holds. They are the plan's units, or else the finest sets for which no
  // latent spans two sets, halved in number until their metadata is cheap.
  std::vector<std::vector<int64_t>> units;
  int64_t sinks = 0;
  int64_t recent = 0;
  bool scored = true;  // the other slots stay by score; false: the latest stay
  float lambda = 0;
  float friendliness = 1;  // factor of friendliness: 1 or 0.5
  // factor of the attention received, applied at each eviction
  float decay = 1;
  bool rolling = false;  // positions are slot indices
};

// How many slots of a sequence stay, and when the others go.
struct EvictionCounts {
  int64_t budget_tokens = 0;  // slots that stay; 0: see budget_ratio
  double budget_ratio = 0;    // share of the prompt, at least `least_tokens`
  int64_t least_tokens = 0;
  int64_t every_tokens = 0;  // 0: nothing is evicted
  // Only the attention of this many last queries before a point of the prompt
  // counts. 0: that of all queries.
  int64_t observation_window = 0;

  bool evicts() const { return every_tokens > 0; }
  friend auto operator<=>(const EvictionCounts&,
                          const EvictionCounts&) = default;
};

struct ResolvedSelection {
  int64_t chunk_slots = 0;
  int64_t outlier_chunks = 0;
  bool exact_outliers = false;
  // Bytes of a landmark of one KV head.
  int64_t landmark_bytes = 0;
};

struct ResolvedLayer {
  int attention = 0;   // index into ResolvedPlan::attention
  int page_group = 0;  // index into ResolvedPlan::page_groups
  std::optional<ResolvedEviction> eviction;
  std::optional<ResolvedSelection> selection;
};

// Layers that hold the same tokens at any length.
struct ResolvedPageGroup {
  int64_t sliding_window = 0;  // 0: none
  EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
};

// Immutable after it is made.
struct ResolvedPlan {
  kvasir::v1::KvPlan source;  // for identities, names and texts
  AttentionShape shape;
  TpShard shard;
  HeadRange kv_heads;  // heads of this rank
  // heads of this rank; empty if the shape has no query heads
  HeadRange query_heads;
  std::vector<ResolvedAttention> attention;  // each different attention once
  std::vector<ResolvedLayer> layers;         // [L]
  std::vector<ResolvedPageGroup> page_groups;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  const ResolvedLayer& layer(int64_t index) const {
    return layers[static_cast<size_t>(index)];
  }
  const ResolvedAttention& attention_of(int64_t index) const {
    return attention[static_cast<size_t>(layer(index).attention)];
  }
};

// Judges the plan (ValidatePlan) and resolves it. INVALID_ARGUMENT for a plan
// without a meaning, and for a shard that does not suit the heads or the widths
// of a basis per rank.
absl::StatusOr<ResolvedPlan> ResolvePlan(const kvasir::v1::KvPlan& plan,
                                         const AttentionShape& shape,
                                         TpShard shard = {});

// The attention of one layer, for code that makes or reads artifacts layer by
// layer. The plan must have been judged for the model. INVALID_ARGUMENT if its
// heads are those of another model.
absl::StatusOr<ResolvedAttention> ResolveAttention(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer, TpShard shard = {});

// The eviction of one layer; empty if the layer does not evict. The same
// conditions apply.
struct LayerEviction {
  ResolvedEviction slots;
  EvictionCounts counts;
};
absl::StatusOr<std::optional<LayerEviction>> ResolveLayerEviction(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer);

// The number of plans that this process has resolved.
int64_t NumResolvedPlans();

// A part of one latent of `width` numbers, in which only the storage is filled
// in.
ResolvedPart ResolveCodec(const kvasir::v1::Codec& codec, int64_t width);

// The channels of a latent of `width` numbers that its codec stores: all except
// those of 0 bits.
int64_t StoredChannels(const kvasir::v1::Codec& codec, int64_t width);

// The dims of a head that RoPE rotates as these pairs. They are in the order in
// which a head of only these pairs would have them, which is the order of the
// rows of a rope_pairs part.
std::vector<int64_t> PairDims(RopePairing pairing, int64_t rotary_dim,
                              std::span<const uint32_t> pairs);

}  // namespace kvasir::plan
