// Describes the work of one rank for a layer's attention under a compression
// plan. The program states which rows of which tensors make up one fused
// projection, and which columns of a token's row of activations hold its
// results. It also states how the inputs and outputs of the op paged_attention
// are computed. It contains no weights: attention_weights loads them, and
// layer_attention runs the program.
//
// A token's row has the columns of the fused projection:
//   | queries, part by part | latents, part by part |
// and then the columns that are computed from them:
//   | queries that a matrix lifts | latents that a basis makes |
// Rows of q_proj are reordered when they are loaded, so that the columns of a
// token's row that one op reads lie side by side. Within a part, query heads
// keep the model's order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/artifact_tensors.h"
#include "plan/attention_shape.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"

namespace kvasir::worker {

// The heads of one rank.
struct RankHeads {
  plan::HeadRange query;
  plan::HeadRange kv;
};

// Rows [row, row + count) of a tensor, which become columns from `column` on.
struct RowTake {
  int64_t row = 0;
  int64_t count = 0;
  int64_t column = 0;

  friend bool operator==(const RowTake&, const RowTake&) = default;
};

// The rows that the fused projection takes from one matrix of the model, whose
// tensors are "<name>.weight" and "<name>.bias".
struct Projection {
  std::string name;
  bool has_bias = false;
  std::vector<RowTake> takes;
};

// The columns in a row of each query head h of the rank, [Hq]: `width[h]`
// columns from `column[h]` on.
struct HeadSpans {
  std::vector<int64_t> column;
  std::vector<int64_t> width;
};

// Heads whose columns lie side by side. RoPE rotates the first 2 * num_pairs
// dimensions of each.
struct Rotation {
  int64_t column = 0;  // the first column of the first head
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  plan::RopePairing pairing = plan::RopePairing::kHalfSplit;
  int64_t num_pairs = 0;
  // For each rotated pair, the pair of the model that gives its angle:
  // [num_pairs] if all heads are alike, else [num_heads, num_pairs].
  std::vector<uint32_t> pairs;

  bool per_head() const {
    return static_cast<int64_t>(pairs.size()) != num_pairs;
  }
  friend bool operator==(const Rotation&, const Rotation&) = default;
};

// The latent that a group of KV heads shares.
struct LatentProgram {
  // The latent's index within its part. The name of the lift's tensor contains
  // this index.
  int64_t index = 0;
  // The KV heads of this rank that share the latent, counted from the rank's
  // first head.
  std::vector<int64_t> heads;
  // For each head in `heads`: its index in the plan's list of heads that share
  // the latent. That list has the heads of all ranks.
  std::vector<int64_t> places;
  int64_t width = 0;  // called R' in the shapes below
  // How many of the R' channels are stored. The others have 0 bits.
  int64_t stored = 0;
  int64_t column = 0;  // counted from the part's first latent column
  // Only for rope_low_rank. `pairs` has the pairs of a head that the latent
  // covers. For each complex channel, `channel_place` has the index of the
  // channel's pair in `pairs`.
  std::vector<uint32_t> pairs;
  std::vector<int64_t> channel_place;
};

// How prompts read a part if decode reads its latents directly. For prompts,
// attention first expands (lifts) each latent to a vector of `dims` elements
// for every KV head (prompt_lift.h).
struct PromptLift {
  int64_t dims = 0;
  // Lifting is cheaper than reading latents directly if at least this many
  // query rows read a slot.
  int64_t from_rows = 0;

  friend bool operator==(const PromptLift&, const PromptLift&) = default;
};

// One part of a side (keys or values): the columns of the fused projection that
// it uses, and how latents are made from them.
struct PartProgram {
  std::string prefix;       // of tensor names, after "model.layers.{l}."
  std::string lift_prefix;  // see plan::ResolvedPart::lift_prefix
  // The latents that some head of this rank uses, in the plan's order.
  std::vector<LatentProgram> latents;
  std::vector<int32_t> group_of_head;  // of a KV head: index in `latents`
  int64_t latent_column = 0;           // first latent's column in a token's row
  int64_t latent_columns = 0;          // sum of the latents' R'
  // The columns of the fused projection for this part: the latents themselves,
  // or the input of the basis.
  int64_t source_column = 0;
  int64_t source_columns = 0;
  std::vector<Rotation> rotations;  // applied to the source columns
  bool has_basis = false;           // latents = basis * (source - mean)
  bool has_mean = false;
  // Whether latents are multiplied by a Hadamard matrix before they are stored.
  bool hadamard = false;
  // Whether codes use a static range per channel. If so, the next member says
  // which of the plan's channels are on this rank.
  bool static_ranges = false;
  std::vector<RowTake> range_takes;
  // Set by PlanPromptLifts; empty if prompts do not lift the part.
  std::optional<PromptLift> prompt_lift;
};

// How full-rank keys are rebuilt from latents when they are read.
struct RebuildProgram {
  int64_t dims = 0;  // called d in the shapes below
  // Whether a matrix [d, R'] per head makes the key from the latent. If not,
  // the latent itself is the key.
  bool lifted = false;
  bool has_bias = false;
  // How RoPE rotates the d dimensions of each KV head of this rank. `column`
  // is 0.
  Rotation rotation;
};

// Where the bias of the key projection is added, or the mean of the keys if it
// was measured (LayerWeights::key_mean). A large bias or mean would use up most
// of a code's levels. So the cache omits them from keys whose codes have a
// scale for each token.
enum class KeyBias {
  kCached,   // the keys in the cache include the bias
  kScored,   // attention adds the bias to scores (kernels/latents/key_bias.h)
  kRebuilt,  // latents are keys before RoPE; reading them adds the bias
};

enum class QueryLift {
  kNone,     // attention reads the projected queries
  kMatrix,   // q' = lift^T q, with a matrix [d, R'] per KV head
  kComplex,  // q'_ft = conj(lift_ft) q_f, for pair f and its t-th channel
};

struct KeyProgram : PartProgram {
  HeadSpans projected;  // the columns of the queries in a token's row
  std::vector<Rotation> query_rotations;
  std::optional<RebuildProgram> rebuild;  // empty: attention reads latents
  QueryLift lift = QueryLift::kNone;
  // The columns of the queries that attention reads: `projected`, or the lifted
  // queries.
  HeadSpans query;
};

struct ValueProgram : PartProgram {
  // The columns of each query head's sum of latents, in a row of attention's
  // result.
  HeadSpans attended;
  int64_t attended_columns = 0;
  // Whether a matrix [D, R'] per KV head lifts each head's sum of latents to D
  // dimensions and adds the mean of the basis, if there is one. If false,
  // o_proj reads the sums themselves.
  bool lifted = false;
};

struct AttentionProgram {
  RankHeads heads;
  int64_t head_dim = 0;  // called D in the shapes above
  bool rotates = false;
  std::vector<Projection> projections;
  bool has_bias = false;  // whether any projection has a bias
  KeyBias key_bias = KeyBias::kCached;
  int64_t projection_columns = 0;  // columns of the fused projection
  int64_t row_columns = 0;         // columns of a token's row
  std::vector<KeyProgram> key;
  ValueProgram value;
  // Whether the values use the latents of the last key part. If so, keys and
  // values share columns, pages and exact (uncompressed) rows.
  bool joint = false;
  // The input columns of o_proj: the first one and their number on this rank,
  // and their number on all ranks.
  int64_t output_first_column = 0;
  int64_t output_columns = 0;
  int64_t output_all_columns = 0;
  bool output_bias = false;
  // All tensors of the layer's attention. Names are without
  // "model.layers.{l}.".
  std::vector<plan::RequiredTensor> tensors;
};

// Makes a rank's program for all layers with this attention, of which `layer`
// is the first. This build must be able to serve it (served_plan.h). Returns
// the errors of plan::TensorsOf.
absl::StatusOr<AttentionProgram> MakeAttentionProgram(
    const plan::ResolvedAttention& attention, const plan::AttentionShape& shape,
    int64_t layer, const RankHeads& heads);

// The number of programs that this process has made so far. For tests.
int64_t NumAttentionPrograms();

}  // namespace kvasir::worker
