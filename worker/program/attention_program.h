// What one rank does for a layer's attention under a compression plan: which
// rows of which tensors make one fused projection, where every number lies in a
// token's row, and what happens to it before and after paged_attention. Pure:
// it names tensors and columns, and holds no numbers (attention_weights loads
// them, layer_attention runs the program).
//
// A token's row: the columns of the fused projection, and behind them what is
// made of them.
//   | queries, part by part | latents, part by part | queries that a matrix
//     lifts | latents that a basis makes |
// Rows of q_proj are selected when they are loaded, so that every op finds what
// it works on side by side. Query heads keep the model's order inside a part.
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

// Heads of one rank.
struct RankHeads {
  plan::HeadRange query;
  plan::HeadRange kv;
};

// Rows [row, row + count) of a tensor become columns from `column` on.
struct RowTake {
  int64_t row = 0;
  int64_t count = 0;
  int64_t column = 0;

  friend bool operator==(const RowTake&, const RowTake&) = default;
};

// A tensor's share of the fused projection: "<name>.weight" and "<name>.bias",
// in the order of its rows.
struct Projection {
  std::string name;
  bool has_bias = false;
  std::vector<RowTake> takes;
};

// Numbers of each head [Hq]: `width` from `column` on.
struct HeadSpans {
  std::vector<int64_t> column;
  std::vector<int64_t> width;
};

// Heads side by side whose first 2 * num_pairs numbers turn.
struct Rotation {
  int64_t column = 0;  // of the first head
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  plan::RopePairing pairing = plan::RopePairing::kHalfSplit;
  int64_t num_pairs = 0;
  // The model's pair by whose angle each pair turns: [num_pairs] of all heads,
  // or of each [num_heads, num_pairs].
  std::vector<uint32_t> pairs;

  bool per_head() const {
    return static_cast<int64_t>(pairs.size()) != num_pairs;
  }
  friend bool operator==(const Rotation&, const Rotation&) = default;
};

// What a group of KV heads shares.
struct LatentProgram {
  int64_t index = 0;            // in the part: names its lift
  std::vector<int64_t> heads;   // the rank's, counted from its first
  std::vector<int64_t> places;  // of those heads among all that share it
  int64_t width = 0;            // R'
  int64_t stored = 0;           // of them: the others cost a slot nothing
  int64_t column = 0;           // in a row of the part's latents
  // rope_low_rank: the pairs of a head that it stands for, and of each complex
  // channel its pair's place among them.
  std::vector<uint32_t> pairs;
  std::vector<int64_t> channel_place;
};

// How prompts read a part that is absorbed for output: each latent is lifted to
// `dims` numbers of every KV head first (prompt_lift.h).
struct PromptLift {
  int64_t dims = 0;  // d
  // It pays where so many rows see a slot.
  int64_t from_rows = 0;

  friend bool operator==(const PromptLift&, const PromptLift&) = default;
};

// What one part of a side does with the fused projection.
struct PartProgram {
  std::string prefix;       // of tensor names, after "model.layers.{l}."
  std::string lift_prefix;  // plan::ResolvedPart::lift_prefix
  // Those that have a head on the rank, in the plan's order.
  std::vector<LatentProgram> latents;
  std::vector<int32_t> group_of_head;  // [Hkv]: in `latents`
  int64_t latent_column = 0;           // of the latents in a token's row
  int64_t latent_columns = 0;          // sum of R'
  // What the projection gives: the latents, or what the basis makes them of.
  int64_t source_column = 0;
  int64_t source_columns = 0;
  std::vector<Rotation> rotations;  // of it
  bool has_basis = false;           // latents = basis (source - mean)
  bool has_mean = false;            // of the basis
  bool hadamard = false;  // each latent is rotated before it is stored
  // Ranges that are the channel's own, and the channels of them on this rank.
  bool static_ranges = false;
  std::vector<RowTake> range_takes;
  // Set by PlanPromptLifts.
  std::optional<PromptLift> prompt_lift;
};

// How whole keys are rebuilt where they are read.
struct RebuildProgram {
  int64_t dims = 0;     // d
  bool lifted = false;  // by a matrix [d, R'] per head; else the latent is it
  bool has_bias = false;
  // Of d numbers; `column` is 0, heads are the rank's KV heads.
  Rotation rotation;
};

enum class QueryLift {
  kNone,     // the projection's rows are what the latents meet
  kMatrix,   // q' = lift^T q, a matrix [d, R'] per KV head
  kComplex,  // q'_ft = conj(u_ft) q_f
};

struct KeyProgram : PartProgram {
  HeadSpans projected;  // the queries' rows
  std::vector<Rotation> query_rotations;
  std::optional<RebuildProgram> rebuild;  // else absorbed
  QueryLift lift = QueryLift::kNone;
  // What attention takes; as `projected` without a lift.
  HeadSpans query;
};

struct ValueProgram : PartProgram {
  // In a row of what attention gives; heads in the model's order.
  HeadSpans attended;
  int64_t attended_columns = 0;
  // Each head's sum is lifted to D numbers by a matrix [D, R'] per KV head,
  // plus the basis' mean where it has one; else o_proj takes it as it is.
  bool lifted = false;
};

struct AttentionProgram {
  RankHeads heads;
  int64_t head_dim = 0;  // D
  bool rotates = false;
  std::vector<Projection> projections;
  bool has_bias = false;           // of any projection
  int64_t projection_columns = 0;  // of the fused projection
  int64_t row_columns = 0;         // of a token's row
  std::vector<KeyProgram> key;
  ValueProgram value;
  // The values' latents are those of the last key part: the same columns, pages
  // and exact rows.
  bool joint = false;
  // Of o_proj: the rank's columns of all.
  int64_t output_first_column = 0;
  int64_t output_columns = 0;
  int64_t output_all_columns = 0;
  bool output_bias = false;
  // Every tensor of attention, by names after "model.layers.{l}.".
  std::vector<plan::RequiredTensor> tensors;
};

// The program of a rank for layers of this attention, which a build serves
// (served_plan.h); `layer` is the first of them. plan::TensorsOf's errors.
absl::StatusOr<AttentionProgram> MakeAttentionProgram(
    const plan::ResolvedAttention& attention, const plan::AttentionShape& shape,
    int64_t layer, const RankHeads& heads);

// How many programs this process has made.
int64_t NumAttentionPrograms();

}  // namespace kvasir::worker
