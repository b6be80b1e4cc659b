// The attention of one layer, as its program says: the fused projection, what
// happens to its columns, the cache, and the output projection.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/attention/ops.h"
#include "kernels/attention/paged_attention.h"
#include "kernels/attention/planner/attention_plan.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/hadamard_tables.h"
#include "kernels/latents/ops.h"
#include "model/shapes/decoder_spec.h"
#include "worker/executor/kv_arenas.h"
#include "worker/executor/step_profile.h"
#include "worker/program/attention_program.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// What attention needs to know in one page group. Device memory.
struct AttentionBatch {
  const int64_t* slots = nullptr;  // [T]
  // [B], prompts first.
  const kernels::AttentionSequence* sequences = nullptr;
};

// A sequence's rows of a step. Host memory.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  bool prompt = false;  // else output
};

// The tokens of a step, as attention sees them. Device memory.
struct AttentionInput {
  const float* normed = nullptr;  // [T, M]
  int64_t num_tokens = 0;         // T
  int64_t num_sequences = 0;      // B
  // Of the sequences in the group's order [B], by rising rows among prompts and
  // among output; host memory. Not looked at while the workspace counts.
  absl::Span<const SequenceRows> rows;
  const int64_t* positions = nullptr;  // [T], logical
  AttentionBatch group;                // of the layer's page group
  // Where exact rows are kept, if the layer's sides have a window. [T]
  const int64_t* key_ring_slots = nullptr;
  const int64_t* value_ring_slots = nullptr;
  int32_t* not_finite = nullptr;  // kernels::KvAppendParams
};

// Owns: the program's tables.
// Threads: one at a time.
class LayerAttention {
 public:
  // All outlive it.
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    int64_t layer = 0;
    const LayerWeights* weights = nullptr;
    const KvArenas::Layer* arena = nullptr;
    const std::vector<KvArenas::Ring>* rings = nullptr;
    const uint64_t* rope_steps = nullptr;         // [rotary_dim / 2]
    kernels::HadamardTables* hadamard = nullptr;  // only in the constructor
    int64_t page_tokens = 0;
    StepProfile* profile = nullptr;  // or null
    // Device memory: codes that static ranges clamped are added to it.
    int64_t* clamped_codes = nullptr;
  };

  explicit LayerAttention(const Parts& parts);
  LayerAttention(LayerAttention&&) = default;

  // Writes the tokens' latents into the cache and attends through it. out
  // [T, M] is this rank's share of the sum.
  absl::Status Run(kernels::Stream& stream, const AttentionInput& input,
                   float* out, kernels::Workspace& workspace) const;

  // Operations that a step over sequences makes of slots as it reads them.
  struct SlotWork {
    double rebuild_flops = 0;
    double prompt_lift_flops = 0;
  };
  // In the same order; host memory.
  SlotWork WorkOn(absl::Span<const kernels::AttentionSequence> sequences,
                  absl::Span<const SequenceRows> rows) const;

 private:
  // Heads that turn by the same pairing, in one launch.
  struct Turn {
    kernels::RopePairing pairing = kernels::RopePairing::kHalfSplit;
    std::vector<kernels::RopeHead> queries;
    std::vector<kernels::RopeHead> keys;
    // Instead of heads: whole ones side by side that turn all pairs.
    kernels::RopeTensor whole_queries;
    kernels::RopeTensor whole_keys;
    int64_t whole_query_column = 0;
    int64_t whole_key_column = 0;
  };
  // Of one key part.
  struct Key {
    kernels::LatentPart latents;
    kernels::KeyRebuild rebuild;
    kernels::KeyRebuild prompt_lift;
    std::vector<int32_t> pair_dims;
    std::vector<uint64_t> steps;
    std::vector<kernels::ComplexChannels> channels;   // [Hkv]
    std::vector<std::vector<int32_t>> channel_place;  // by latent
    std::vector<kernels::HadamardLatent> hadamard;
    std::vector<kernels::HadamardLatent> query_hadamard;
  };
  // Exact rows of a part in one step; no groups without a window.
  struct Exact {
    std::vector<kernels::LatentGroup> fresh_groups;
    kernels::ExactRows rows;
  };
  struct Value {
    kernels::LatentPart latents;
    std::vector<kernels::HadamardLatent> hadamard;
    std::vector<kernels::HadamardLatent> sum_hadamard;
    std::vector<int64_t> lifted_column;  // [Hq]
  };
  // What launches of paged_attention have in common. Points to itself.
  struct Launch {
    std::vector<kernels::AttentionKeyPart> keys;
    kernels::AttentionValuePart value;
    kernels::ValueLift value_lift;
    // Layouts of exact rows; a step has rows of its own.
    std::vector<kernels::ExactRows> exact;  // [parts]
    kernels::PagedAttentionParams params;   // without a step's rows
    std::unique_ptr<kernels::AttentionPlan> plan;
    // Of a slot, by KV head; empty: nothing is.
    std::vector<double> rebuild_flops;
    std::vector<double> prompt_lift_flops;
  };
  // A token's rows of one step.
  struct Rows {
    float* row = nullptr;  // [T, row_columns]
    int64_t stride = 0;
    int64_t num_tokens = 0;

    Rows Part(int64_t first, int64_t count) const;
  };

  void AddTurns();
  void AddTurn(const Rotation& rotation, bool query);
  void MakeKey(const KeyProgram& part, const PartWeights& weights,
               const KvArenas::Part& arena, Key* key);
  void MakeRebuild(const KeyProgram& part, const PartWeights& weights,
                   Key* key);
  void MakeValue(const PartWeights& weights, const KvArenas::Part& arena);
  // Of prompts, with their lifts, or of output.
  std::unique_ptr<Launch> MakeLaunch(bool prompts) const;

  absl::Status Project(kernels::Stream& stream, const AttentionInput& input,
                       const Rows& rows, kernels::Workspace& workspace) const;
  absl::Status Rotate(kernels::Stream& stream, const AttentionInput& input,
                      const Rows& rows, kernels::Workspace& workspace) const;
  absl::Status MakeLatents(kernels::Stream& stream, const PartProgram& part,
                           const PartWeights& weights, const Rows& rows,
                           kernels::Workspace& workspace) const;
  // Calls for the rows that read the part absorbed, run by run.
  absl::Status ForAbsorbedRows(
      const PartProgram& part, const AttentionInput& input,
      const kernels::Workspace& workspace,
      absl::FunctionRef<absl::Status(int64_t first, int64_t count)> call) const;
  absl::Status LiftQueries(kernels::Stream& stream, size_t part,
                           const Rows& rows,
                           kernels::Workspace& workspace) const;
  absl::Status ComplexLiftQueries(kernels::Stream& stream, size_t part,
                                  const Rows& rows,
                                  kernels::Workspace& workspace) const;
  absl::Status Hadamard(kernels::Stream& stream,
                        const std::vector<kernels::HadamardLatent>& latents,
                        bool transposed, const Rows& rows,
                        kernels::Workspace& workspace) const;
  absl::Status Append(kernels::Stream& stream, const AttentionInput& input,
                      const Rows& rows, kernels::Workspace& workspace) const;
  // Parts of the cache: those of the keys, then the value's.
  size_t num_parts() const { return keys_.size() + 1; }
  bool is_key(size_t part) const { return part < keys_.size(); }
  // A part's latents in the rows; `to` says where they go.
  kernels::KvAppendPart Appended(size_t part, const Rows& rows,
                                 const kernels::LatentPart& to) const;
  // Takes memory for the step's own exact rows. [parts]
  std::vector<Exact> PlaceExact(int64_t num_tokens,
                                kernels::Workspace& workspace) const;
  absl::Status AppendFresh(kernels::Stream& stream, const Rows& rows,
                           const std::vector<Exact>& exact,
                           kernels::Workspace& workspace) const;
  // Puts what the next step sees into the rings.
  absl::Status KeepExact(kernels::Stream& stream, const AttentionInput& input,
                         const Rows& rows, const std::vector<Exact>& exact,
                         kernels::Workspace& workspace) const;
  kernels::ExactWindow WindowOf(int64_t ring) const;
  // What comes out of attention, row by row: absorbed sums of latents, or
  // values where they are lifted, before attention or behind it.
  struct Sums {
    Rows latents;
    Rows values;  // no memory: o_proj takes the latents
  };
  absl::Status Attend(kernels::Stream& stream, const AttentionInput& input,
                      const Rows& rows, const std::vector<Exact>& exact,
                      const Sums& sums, kernels::Workspace& workspace) const;
  // Of some of the sequences.
  struct SequenceRange {
    int64_t first = 0;
    int64_t count = 0;
  };
  absl::Status Attend(kernels::Stream& stream, const AttentionInput& input,
                      const Launch& launch, SequenceRange sequences,
                      const Rows& rows, const std::vector<Exact>& exact,
                      const Sums& sums, kernels::Workspace& workspace) const;
  absl::Status LiftSums(kernels::Stream& stream, const AttentionInput& input,
                        const Sums& sums, kernels::Workspace& workspace) const;
  absl::Status Output(kernels::Stream& stream, const Rows& rows, float* out,
                      kernels::Workspace& workspace) const;

  const AttentionProgram& program() const { return *parts_.weights->attention; }

  Parts parts_;
  kernels::RopePairing pairing_;  // of the model
  // Which angle each number of a head turns by, as the op takes it. Vectors
  // keep their memory when this moves.
  std::vector<std::vector<int32_t>> pair_tables_;
  std::vector<Turn> turns_;
  std::vector<Key> keys_;
  Value value_;
  std::unique_ptr<Launch> launch_;
  std::unique_ptr<Launch> prompt_launch_;  // null: prompts lift nothing
};

}  // namespace kvasir::worker
