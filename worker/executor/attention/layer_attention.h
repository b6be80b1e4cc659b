// The attention of one layer, as its program says: the fused projection, what
// happens to its columns, the cache, and the output projection.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/attention/ops.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/activations.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/eviction/ops.h"
#include "kernels/latents/ops.h"
#include "kernels/rowwise/ops.h"
#include "model/shapes/decoder_spec.h"
#include "plan/resolved_plan.h"
#include "worker/executor/attention/mass_room.h"
#include "worker/executor/kv_arenas.h"
#include "worker/executor/step_profile.h"
#include "worker/program/attention_program.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// What attention needs to know in one page group.
struct AttentionBatch {
  kernels::DevicePtr<const int64_t> slots;  // [T]
  // Slots of the tokens in their sequences, which are the positions of layers
  // whose positions roll. [T]
  kernels::DevicePtr<const int64_t> slot_positions;
  // [B], prompts first: on the device, and on the host, where it is divided
  // (not looked at while the workspace counts).
  kernels::DevicePtr<const kernels::AttentionSequence> sequences;
  absl::Span<const kernels::AttentionSequence> on_host;
  // Those of output once more, on the device, where prompts are launched apart.
  kernels::DevicePtr<const kernels::AttentionSequence> output_sequences;
};

// A sequence's rows of a step. Host memory.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  bool prompt = false;  // else output
};

// Which sequences of a step a launch of attention has.
enum class LaunchedRows : uint8_t { kAll, kPrompts, kOutput };

// The tokens of a step, as attention sees them. Device memory.
struct AttentionInput {
  kernels::DevicePtr<const float> normed;  // [T, M]
  int64_t num_tokens = 0;                  // T
  int64_t padded_tokens = 0;               // StepBucket's, for workspaces
  int64_t num_sequences = 0;               // B
  // Of the sequences in the group's order [B], by rising rows among prompts and
  // among output; host memory. Not looked at while the workspace counts.
  absl::Span<const SequenceRows> rows;
  kernels::DevicePtr<const int64_t> positions;  // [T], logical
  AttentionBatch group;                         // of the layer's page group
  // Where exact rows are kept, if the layer's sides have some. [T]
  kernels::DevicePtr<const int64_t> key_ring_slots;
  kernels::DevicePtr<const int64_t> value_ring_slots;
  kernels::DevicePtr<float> not_finite;  // kernels::KvAppendParams
  // By LayerAttention::Launch::step; host memory.
  absl::Span<const kernels::AttentionStep> steps;
};

// What the exact rows of a step's own tokens lie in, of one layer at a time.
struct FreshRows {
  kernels::DevicePtr<char> memory;
  int64_t max_tokens = 0;
};

// Owns: the ops that are prepared for the layer, with their tables.
// Threads: one at a time.
class LayerAttention {
 public:
  // All outlive it.
  struct Parts {
    kernels::Device* device = nullptr;
    const model::DecoderSpec* spec = nullptr;
    int64_t layer = 0;
    const LayerWeights* weights = nullptr;
    const KvArenas::Layer* arena = nullptr;
    const std::vector<KvArenas::Ring>* rings = nullptr;
    // [rotary_dim / 2], on the host and on the device.
    absl::Span<const uint64_t> rope_steps;
    kernels::DevicePtr<const uint64_t> device_rope_steps;
    kernels::HadamardTables* hadamard = nullptr;
    FreshRows fresh;
    // Which slots the layer gives up; null: none. Only while it is prepared.
    const plan::ResolvedEviction* eviction = nullptr;
    MassRoom mass;
    int64_t page_tokens = 0;
    bool prompts_as_rows = false;
    StepProfile* profile = nullptr;  // or null
    // Codes that static ranges clamped are added to it.
    kernels::DevicePtr<int64_t> clamped_codes;
  };

  // A launch of paged_attention.
  struct Launch {
    LaunchedRows rows = LaunchedRows::kAll;
    kernels::PreparedAttention attention;
    bool lifts_values = false;
    // Of a slot, by KV head; empty: nothing is.
    std::vector<double> rebuild_flops;
    std::vector<double> prompt_lift_flops;
    // In AttentionInput::steps; who divides steps sets it.
    size_t step = 0;
  };

  static absl::StatusOr<LayerAttention> Create(const Parts& parts);
  // Of output, and of prompts that lift nothing.
  const kernels::AttentionKernels& kernels() const {
    return launch_->attention.kernels();
  }
  LayerAttention(LayerAttention&&) = default;

  // Bytes of FreshRows::memory that the layer takes.
  static int64_t FreshBytes(const KvArenas::Layer& arena, int64_t max_tokens);

  // Writes the tokens' latents into the cache and attends through it. out
  // [T, M] is this rank's share of the sum.
  absl::Status Run(kernels::Stream& stream, const AttentionInput& input,
                   kernels::DevicePtr<float> out,
                   kernels::Workspace& workspace) const;

  // Of a layer that evicts: what slots stay, and their latents to the front.
  // kernels::EvictSelect's and kernels::EvictCompact's.
  absl::Status Evict(kernels::Stream& stream, const kernels::EvictionRows& rows,
                     const kernels::EvictionStep& step,
                     kernels::Workspace& workspace) const;

  // One, or one of prompts and one of output. They stay where they are.
  std::vector<Launch*> launches() const;

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
  struct Rotate {
    kernels::PreparedRope rope;
    int64_t query_column = 0;
    int64_t key_column = 0;
  };
  // Of one key part.
  struct Key {
    kernels::LatentPart latents;
    kernels::KeyRebuild rebuild;
    kernels::KeyRebuild prompt_lift;
    std::vector<int32_t> pair_dims;
    std::vector<uint64_t> steps;
    std::optional<kernels::PreparedLift> lift;
    std::vector<kernels::PreparedComplexLift> complex_lifts;
    std::optional<kernels::PreparedHadamard> hadamard;
    std::optional<kernels::PreparedHadamard> query_hadamard;
  };
  // Exact rows of a part; no groups if its side has none.
  struct Exact {
    std::vector<kernels::LatentGroup> fresh_groups;
    kernels::ExactRows rows;
  };
  struct Value {
    kernels::LatentPart latents;
    std::optional<kernels::PreparedHadamard> hadamard;
    std::optional<kernels::PreparedHadamard> sum_hadamard;
    std::optional<kernels::PreparedLift> lift;
    std::vector<int64_t> lifted_column;  // [Hq]
  };
  // A token's rows of one step.
  struct Rows {
    kernels::DevicePtr<float> row;  // [T, row_columns] activations
    int64_t stride = 0;
    int64_t num_tokens = 0;
  };

  explicit LayerAttention(const Parts& parts);
  absl::Status PrepareAll();
  std::vector<Turn> MakeTurns();
  void AddTurn(const Rotation& rotation, bool query, std::vector<Turn>* turns);
  absl::Status PrepareTurns();
  absl::Status MakeKey(size_t part, Key* key);
  absl::Status PrepareComplexLifts(const KeyProgram& part,
                                   const PartWeights& weights, Key* key);
  void MakeRebuild(const KeyProgram& part, const PartWeights& weights,
                   Key* key);
  absl::Status MakeValue();
  // A product of rows with `weight`, into rows.
  absl::Status Matmul(kernels::Stream& stream, kernels::MatmulParams params,
                      kernels::Workspace& workspace) const;
  absl::Status PrepareHadamard(
      const std::vector<kernels::HadamardPlace>& places, int64_t stride,
      bool transposed, std::optional<kernels::PreparedHadamard>* out);
  void PlaceExact();
  absl::Status PrepareAppends();
  absl::Status PrepareEviction();
  // Of prompts, with their lifts, or of output.
  absl::StatusOr<std::unique_ptr<Launch>> MakeLaunch(LaunchedRows rows) const;

  absl::Status Project(kernels::Stream& stream, const AttentionInput& input,
                       const Rows& rows, kernels::Workspace& workspace) const;
  absl::Status RotateRows(kernels::Stream& stream, const AttentionInput& input,
                          const Rows& rows,
                          kernels::Workspace& workspace) const;
  absl::Status MakeLatents(kernels::Stream& stream, const PartProgram& part,
                           const PartWeights& weights, const Rows& rows,
                           kernels::Workspace& workspace) const;
  // Calls for the rows that read the part absorbed, run by run.
  absl::Status ForAbsorbedRows(
      const PartProgram& part, const AttentionInput& input,
      const kernels::Workspace& workspace,
      absl::FunctionRef<absl::Status(int64_t first, int64_t count)> call) const;
  absl::Status LiftQueries(kernels::Stream& stream, const Key& key,
                           const kernels::LiftRows& rows,
                           kernels::Workspace& workspace) const;
  absl::Status Hadamard(
      kernels::Stream& stream,
      const std::optional<kernels::PreparedHadamard>& hadamard,
      const Rows& rows, kernels::Workspace& workspace) const;
  // `append` may be none.
  absl::Status Append(kernels::Stream& stream,
                      const std::optional<kernels::PreparedKvAppend>& append,
                      const kernels::KvAppendRows& rows,
                      kernels::Workspace& workspace) const;
  // Parts of the cache: those of the keys, then the value's.
  size_t num_parts() const { return keys_.size() + 1; }
  bool is_key(size_t part) const { return part < keys_.size(); }
  // A part's latents in the rows; `to` says where they go.
  kernels::KvAppendPart Appended(size_t part,
                                 const kernels::LatentPart& to) const;
  kernels::ExactSlots ExactSlotsOf(int64_t ring) const;
  bool evicts() const { return parts_.arena->metadata.num_units > 0; }
  const std::vector<int32_t>& UnitOfGroup(size_t part) const {
    return is_key(part) ? parts_.arena->key[part].unit_of_group
                        : parts_.arena->value.front().unit_of_group;
  }
  // What comes out of attention, row by row: absorbed sums of latents, or
  // values where they are lifted, before attention or behind it.
  struct Sums {
    Rows latents;
    Rows values;  // no memory: o_proj takes the latents
  };
  absl::Status Attend(kernels::Stream& stream, const AttentionInput& input,
                      const Rows& rows, const Sums& sums,
                      kernels::Workspace& workspace) const;
  absl::Status LiftSums(kernels::Stream& stream, const AttentionInput& input,
                        const Sums& sums, kernels::Workspace& workspace) const;
  absl::Status Output(kernels::Stream& stream, const Rows& rows,
                      kernels::DevicePtr<float> out,
                      kernels::Workspace& workspace) const;

  const AttentionProgram& program() const { return *parts_.weights->attention; }

  Parts parts_;
  kernels::Activations activations_;  // the device's
  kernels::RopePairing pairing_;      // of the model
  // Which angle each number of a head turns by, as the op takes it, while it is
  // prepared.
  std::vector<std::vector<int32_t>> pair_tables_;
  // Vectors keep their memory when this moves.
  std::vector<Rotate> turns_;
  std::vector<Key> keys_;
  Value value_;
  std::vector<Exact> exact_;  // [parts]
  std::optional<kernels::PreparedKvAppend> append_;
  std::optional<kernels::PreparedKvAppend> append_fresh_;
  // Puts what later steps read as exact rows into the side pages.
  std::optional<kernels::PreparedKvAppend> keep_keys_;
  std::optional<kernels::PreparedKvAppend> keep_values_;
  std::optional<kernels::PreparedEviction> eviction_;
  bool rolling_ = false;  // positions are slots
  std::unique_ptr<Launch> launch_;
  std::unique_ptr<Launch> prompt_launch_;  // null: prompts lift nothing
};

// The sequences of a launch among a step's: prompts come first.
struct SequenceRange {
  int64_t first = 0;
  int64_t count = 0;
};
SequenceRange SequencesOf(LaunchedRows launched,
                          absl::Span<const SequenceRows> rows);

}  // namespace kvasir::worker
