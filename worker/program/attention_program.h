// The work of one rank for a layer's attention under a compression plan: which
// rows of which tensors make one fused projection, where every number lies in a
// token's row, and what happens to it before and after paged_attention. Pure
// data about tensors and columns: attention_weights loads the numbers,
// layer_attention runs the program.
//
// A token's row has the columns of the fused projection, followed by the
// columns computed from them: | queries, part by part | latents, part by part |
// | queries that a matrix lifts | latents that a basis makes | Rows of q_proj
// are selected when they are loaded, so that the columns an op works on lie
// side by side. Query heads keep the model's order within a part.
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

// For each query head, `width` numbers from `column` on. [Hq]
struct HeadSpans {
  std::vector<int64_t> column;
  std::vector<int64_t> width;
};

// Heads that lie side by side. The first 2 * num_pairs numbers of each are
// rotated.
struct Rotation {
  int64_t column = 0;  // of the first head
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
  // its number in the part, which is in the lift's tensor name
  int64_t index = 0;
  // KV heads on this rank, counted from the rank's first
  std::vector<int64_t> heads;
  // the places of these heads among all heads of the group
  std::vector<int64_t> places;
  int64_t width = 0;  // R'
  // how many of them are stored; the others take no bytes in a slot
  int64_t stored = 0;
  int64_t column = 0;  // in the row of the part's latents
  // For rope_low_rank: the pairs of a head that it covers, and for each complex
  // channel the place of its pair among them.
  std::vector<uint32_t> pairs;
  std::vector<int64_t> channel_place;
};

// How prompts read a part that is absorbed for output: each latent is first
// lifted to `dims` numbers of every KV head (prompt_lift.h).
struct PromptLift {
  int64_t dims = 0;  // d
  // The number of rows from which on lifting is cheaper.
  int64_t from_rows = 0;

  friend bool operator==(const PromptLift&, const PromptLift&) = default;
};

// The columns that one part of a side computes from the fused projection.
struct PartProgram {
  std::string prefix;       // of tensor names, after "model.layers.{l}."
  std::string lift_prefix;  // plan::ResolvedPart::lift_prefix
  // Latents with a head on this rank, in the plan's order.
  std::vector<LatentProgram> latents;
  std::vector<int32_t> group_of_head;  // index in `latents` [Hkv]
  int64_t latent_column = 0;           // of the first latent in a token's row
  int64_t latent_columns = 0;          // sum of R'
  // The projection's columns for this part: the latents themselves, or the
  // input of the basis.
  int64_t source_column = 0;
  int64_t source_columns = 0;
  std::vector<Rotation> rotations;  // of the source columns
  bool has_basis = false;           // latents = basis (source - mean)
  bool has_mean = false;            // of the basis
  // latents get a Hadamard transform before they are stored
  bool hadamard = false;
  // Whether codes use a static range for each channel, and which channels are
  // on this rank.
  bool static_ranges = false;
  std::vector<RowTake> range_takes;
  // Set by PlanPromptLifts.
  std::optional<PromptLift> prompt_lift;
};

// How whole keys are rebuilt from latents when they are read.
struct RebuildProgram {
  int64_t dims = 0;  // d
  // by a matrix [d, R'] per head; false: the latent is the key
  bool lifted = false;
  bool has_bias = false;
  // Rotates d numbers; `column` is 0, heads are this rank's KV heads.
  Rotation rotation;
};

enum class QueryLift {
  kNone,     // the projection already gives what meets the latents
  kMatrix,   // q' = lift^T q, with a matrix [d, R'] per KV head
  kComplex,  // q'_ft = conj(u_ft) q_f
};

struct KeyProgram : PartProgram {
  HeadSpans projected;  // the columns of the queries in a token's row
  std::vector<Rotation> query_rotations;
  std::optional<RebuildProgram> rebuild;  // absent: absorbed
  QueryLift lift = QueryLift::kNone;
  // The queries as attention takes them: `projected`, or after the lift.
  HeadSpans query;
};

struct ValueProgram : PartProgram {
  // Spans in a row of attention's result. Heads are in the model's order.
  HeadSpans attended;
  int64_t attended_columns = 0;
  // True if each head's sum is lifted to D numbers by a matrix [D, R'] per KV
  // head, plus the mean of the basis if it has one. False if o_proj takes the
  // sums.
  bool lifted = false;
};

struct AttentionProgram {
  RankHeads heads;
  int64_t head_dim = 0;  // D
  bool rotates = false;
  std::vector<Projection> projections;
  bool has_bias = false;           // whether any projection has one
  int64_t projection_columns = 0;  // columns of the fused projection
  int64_t row_columns = 0;         // columns of a token's row
  std::vector<KeyProgram> key;
  ValueProgram value;
  // The values' latents are those of the last key part: they share columns,
  // pages and exact rows.
  bool joint = false;
  // The columns of o_proj that this rank has, and the number of all.
  int64_t output_first_column = 0;
  int64_t output_columns = 0;
  int64_t output_all_columns = 0;
  bool output_bias = false;
  // Every tensor of attention, with names that follow "model.layers.{l}.".
  std::vector<plan::RequiredTensor> tensors;
};

// Makes a rank's program for layers of this attention, which the build must
// serve (served_plan.h). `layer` is the first of them. Returns the errors of
// plan::TensorsOf.
absl::StatusOr<AttentionProgram> MakeAttentionProgram(
    const plan::ResolvedAttention& attention, const plan::AttentionShape& shape,
    int64_t layer, const RankHeads& heads);

// The number of programs that this process has made.
int64_t NumAttentionPrograms();

}  // namespace kvasir::worker
