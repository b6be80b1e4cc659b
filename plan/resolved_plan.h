// A compression plan, resolved once at start for one rank of one model: which
// latents there are, of which heads, how wide, on which side of RoPE, in which
// runs of codes, and which layers hold the same tokens. Layout, arenas, tensor
// names, attention programs, FLOPs, random weights and the reference decoder
// take it; only planners and those who write artifacts see the protobuf.
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

// What is stored of a key that rotates: as it is before, or after its rotation.
// kNone: numbers that do not rotate.
enum class RopeSide { kBefore, kAfter, kNone };

enum class Lift { kFold, kAtRuntime, kReconstruct, kAnchored };

// What codes are scaled by. kNone: numbers of a type, no codes.
enum class RangeKind { kNone, kToken, kTokenNorm, kChannel, kSequence };

enum class Transform {
  kNone,
  kHadamardFused,
  kHadamardOnline,
  kBasisStatic,
  kBasisSequence,
};

// Channels [begin, begin + width) of a latent that have one bit width; 0 bits,
// in a last run: they are there, but nothing is stored of them.
struct CodeRun {
  int64_t begin = 0;
  int64_t width = 0;
  int bits = 0;

  friend bool operator==(const CodeRun&, const CodeRun&) = default;
};

// What a group of KV heads shares: some numbers per slot.
struct ResolvedLatent {
  std::vector<int64_t> heads;  // KV heads of the model, ascending
  int64_t width = 0;           // R: numbers that the plan gives it
  // R': those that tensors and attention have. Without the ones whose bits are
  // 0, but for a basis of the sequence, which is found in all of them, and
  // where the plan gives runs of channels with ranges of their own.
  int64_t channels = 0;
  // Dims of each of its heads that it stands for.
  int64_t head_dims = 0;
  // RoPE pairs: kept ones of a rope_pairs head, or those of a rope_low_rank
  // group, ascending.
  std::vector<uint32_t> pairs;
  // rope_low_rank: the pair of each complex channel.
  std::vector<uint32_t> channel_pairs;
  std::vector<CodeRun> runs;  // none: numbers of a type

  // Channels that the cache stores something of.
  int64_t stored_channels() const;
};

// How some dims of a head come from a part's latents.
struct ResolvedUse {
  Lift lift = Lift::kFold;
  int64_t dims = 0;          // of a head
  int64_t rotated_dims = 0;  // of those
  int64_t terms = 1;         // of an ANCHORED lift: its order and one
};

// One part of a side: a space and how its latents are stored. A joint part of
// the plan is one of either side, with the uses of that side.
struct ResolvedPart {
  Side side = Side::kKey;
  bool joint = false;  // its latents serve key and value
  int index = 0;       // in its side's parts
  // What its tensors' names begin with, after "model.layers.{l}.".
  std::string prefix;
  // And after it and a point those of its lifts: "up"; of a joint part "up_key"
  // or "up_value".
  std::string lift_prefix;
  Space space = Space::kFull;
  RopeSide stored = RopeSide::kNone;
  Transform transform = Transform::kNone;
  RangeKind range = RangeKind::kNone;
  bool latent_bias = false;
  bool mean = false;

  // Number type; unspecified for codes.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // Type of parameters that lie beside codes or belong to a sequence; else
  // unspecified.
  kvasir::v1::DataType param_dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  // Bit widths as the plan lists them: one, or one for each run of channels.
  std::vector<int> bits;
  std::vector<float> levels;   // of a token's norm
  bool explicit_runs = false;  // the plan gives the runs' channels
  // Channels of a token's range; 0: a run has one.
  int64_t range_channels = 0;

  std::vector<ResolvedUse> uses;  // none for a full space
  bool folded = false;            // the lift is in q_proj or o_proj
  bool rebuilt = false;           // keys are lifted whole
  // Dims of a head that a low_rank part covers, ascending; else empty.
  std::vector<int64_t> dims;
  // Of the model, in the plan's order. A full space has one per head, with a
  // basis one of all heads, with a basis of the sequence one of the rank's.
  std::vector<ResolvedLatent> latents;

  bool has_basis() const {
    return transform == Transform::kBasisStatic ||
           transform == Transform::kBasisSequence;
  }
  bool has_lift(Lift lift) const;
  // False of a joint part of the values: the keys' is stored for both.
  bool stores_latents() const { return !joint || side == Side::kKey; }
  int64_t channels() const;  // of all latents
  // The latent of a KV head. CHECK: every head has one.
  const ResolvedLatent& LatentOf(int64_t kv_head) const;
  // Some head of the rank has it, or it is the rank's own.
  bool Holds(const ResolvedLatent& latent, const HeadRange& rank) const;

  // Bytes of a slot: whole bytes of codes (or numbers), and parameters.
  int64_t CodesBytes(const ResolvedLatent& latent) const;
  int64_t ParamsBytes(const ResolvedLatent& latent) const;
  // Runs of codes that have a range of their own.
  int64_t NumRanges(const ResolvedLatent& latent) const;
};

struct ResolvedSide {
  std::vector<ResolvedPart> parts;  // joint ones last
  // Tokens nearest to the query, and first ones of the sequence, that are kept
  // exact beside the codes.
  int64_t exact_window = 0;
  int64_t exact_sinks = 0;

  // Some latent is stored in codes; those of a joint part are both sides'.
  bool has_codes() const;
};

// What layers that are alike share.
struct ResolvedAttention {
  bool rotates = false;
  ResolvedSide key;
  ResolvedSide value;

  const ResolvedSide& side(Side which) const {
    return which == Side::kKey ? key : value;
  }
};

// What an eviction unit keeps of a slot: position (4 bytes), attention mass
// received (4), and a logarithmic error (1) for each side that has codes.
inline int64_t EvictionUnitBytes(const ResolvedAttention& attention) {
  return 4 + 4 + (attention.key.has_codes() ? 1 : 0) +
         (attention.value.has_codes() ? 1 : 0);
}

// Which slots a layer keeps.
struct ResolvedEviction {
  // KV heads that give up the same tokens: the plan's units, or the finest that
  // no latent straddles, halved in number until their metadata is cheap. Of the
  // whole model, whatever a rank holds.
  std::vector<std::vector<int64_t>> units;
  int64_t sinks = 0;
  int64_t recent = 0;
  bool scored = true;  // others stay by score; false: the latest ones
  float lambda = 0;
  float friendliness = 1;  // its factor: 1 or 0.5
  float decay = 1;         // of the attention received, behind each eviction
  bool rolling = false;    // positions are slots
};

// How many slots stay of a sequence, and when the others go.
struct EvictionCounts {
  int64_t budget_tokens = 0;  // slots that stay; 0: a share of the prompt
  double budget_ratio = 0;    // that share; then `least_tokens` at least
  int64_t least_tokens = 0;
  int64_t every_tokens = 0;  // 0: nothing is evicted
  // Last queries of a stretch of the prompt whose attention counts; 0: all.
  int64_t observation_window = 0;

  bool evicts() const { return every_tokens > 0; }
  friend auto operator<=>(const EvictionCounts&,
                          const EvictionCounts&) = default;
};

struct ResolvedSelection {
  int64_t chunk_slots = 0;
  int64_t outlier_chunks = 0;
  bool exact_outliers = false;
  // Of a landmark of one KV head.
  int64_t landmark_bytes = 0;
};

struct ResolvedLayer {
  int attention = 0;   // in ResolvedPlan::attention
  int page_group = 0;  // in ResolvedPlan::page_groups
  std::optional<ResolvedEviction> eviction;
  std::optional<ResolvedSelection> selection;
};

// Layers that hold the same tokens at any length.
struct ResolvedPageGroup {
  int64_t sliding_window = 0;  // 0: none
  EvictionCounts eviction;
  std::vector<int64_t> layers;  // ascending
};

// Immutable once it is made.
struct ResolvedPlan {
  kvasir::v1::KvPlan source;  // for identities, names and texts
  AttentionShape shape;
  TpShard shard;
  HeadRange kv_heads;     // of the rank
  HeadRange query_heads;  // of the rank; none where the shape tells of none
  std::vector<ResolvedAttention> attention;  // without repetitions
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

// One layer's attention, for those who make or read artifacts layer by layer.
// The plan was judged for the model; INVALID_ARGUMENT for heads of another one.
absl::StatusOr<ResolvedAttention> ResolveAttention(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer, TpShard shard = {});

// What one layer gives up; nothing: it does not evict. As above.
struct LayerEviction {
  ResolvedEviction slots;
  EvictionCounts counts;
};
absl::StatusOr<std::optional<LayerEviction>> ResolveLayerEviction(
    const kvasir::v1::LayerPlan& plan, const AttentionShape& shape,
    int64_t layer);

// How many plans this process has resolved.
int64_t NumResolvedPlans();

// A part of one latent of `width` numbers, of which no more is told than how
// it is stored.
ResolvedPart ResolveCodec(const kvasir::v1::Codec& codec, int64_t width);

// Channels of a latent of `width` numbers that its codec stores: all but those
// whose bits are 0.
int64_t StoredChannels(const kvasir::v1::Codec& codec, int64_t width);

// Dims of a head that RoPE turns as these pairs, in the order in which a head
// of just these pairs would have them: rows of a rope_pairs part.
std::vector<int64_t> PairDims(RopePairing pairing, int64_t rotary_dim,
                              std::span<const uint32_t> pairs);

}  // namespace kvasir::plan
