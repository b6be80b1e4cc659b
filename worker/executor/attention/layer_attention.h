// Runs the attention of one layer as its AttentionProgram says: a fused
// projection, ops on the projected columns, reads and writes of the cache, and
// the output projection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/step/step_profile.h"
#include "worker/executor/step/step_rows.h"
#include "worker/program/attention_program.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// The input of one layer's attention: the tokens of a step. Pointers are device
// memory unless noted. T is the number of tokens, B the number of sequences,
// and M the hidden size.
struct AttentionInput {
  kernels::DevicePtr<const float> normed;  // [T, M]
  int64_t num_tokens = 0;                  // T in shapes
  int64_t padded_tokens = 0;  // T after padding (StepBucket::padded)
  int64_t num_sequences = 0;  // B in shapes
  // The rows of each sequence, in the order of `group.sequences`. `first_row`
  // ascends among the prompts, and among the sequences that decode. Host
  // memory; not read if the workspace is counting(). [B]
  absl::Span<const SequenceRows> rows;
  kernels::DevicePtr<const int64_t> positions;  // [T], positions in the text
  AttentionBatch group;                         // in the layer's page group
  // Where the exact (uncompressed) key and value of each token are stored
  // (StepBatch::ring_slots), if the layer keeps them. [T]
  kernels::DevicePtr<const int64_t> key_ring_slots;
  kernels::DevicePtr<const int64_t> value_ring_slots;
  kernels::DevicePtr<float> not_finite;  // see KvAppendParams::not_finite
  // Indexed by LayerAttention::Launch::step. Host memory.
  absl::Span<const kernels::AttentionStep> steps;
};

// Memory for the exact (uncompressed) keys and values of the tokens that the
// step runs. All layers use the same memory, one after the other.
struct FreshRows {
  kernels::DevicePtr<char> memory;
  int64_t max_tokens = 0;
};

// Receives the keys of a layer's tokens, [T, Hkv, D] of this rank, after the
// projection with its bias and after QK-norm, before RoPE.
using KeyTap = std::function<void(int64_t layer, absl::Span<const float> keys)>;

// Owns: the layer's prepared ops and their tables.
// Threads: one at a time.
class LayerAttention {
 public:
  // All pointers must outlive the LayerAttention unless noted.
  struct Parts {
    kernels::Device* device = nullptr;
    const model::DecoderSpec* spec = nullptr;
    int64_t layer = 0;
    const LayerWeights* weights = nullptr;
    const KvArenas::Layer* arena = nullptr;
    const std::vector<KvArenas::Ring>* rings = nullptr;
    // How much RoPE's angle of each pair grows per position. [rotary_dim / 2]
    // on the host and on the device.
    absl::Span<const uint64_t> rope_steps;
    kernels::DevicePtr<const uint64_t> device_rope_steps;
    kernels::HadamardTables* hadamard = nullptr;
    FreshRows fresh;
    // How the layer evicts slots; null if it evicts none. Used only by Create.
    const plan::ResolvedEviction* eviction = nullptr;
    MassRoom mass;
    int64_t page_tokens = 0;
    bool prompts_as_rows = false;
    StepProfile* profile = nullptr;  // may be null
    // May be null. If set, Run waits for the device and calls the tap. The
    // layer must then have one full-rank key part.
    const KeyTap* key_tap = nullptr;
    // The counter of codes that were clamped to their static range.
    kernels::DevicePtr<int64_t> clamped_codes;
  };

  // A prepared launch of the op paged_attention.
  struct Launch {
    LaunchedRows rows = LaunchedRows::kAll;
    kernels::PreparedAttention attention;
    bool lifts_values = false;
    // Floating-point operations for each slot that the launch reads: to rebuild
    // keys from latents, and to lift latents for prompts. One number per KV
    // head; empty if the launch does no such work.
    std::vector<double> rebuild_flops;
    std::vector<double> prompt_lift_flops;
    // Index in AttentionInput::steps. The Decoder sets it.
    size_t step = 0;
  };

  static absl::StatusOr<LayerAttention> Create(const Parts& parts);
  // The attention kernels for sequences that decode. Prompts use the same
  // kernels unless they lift latents (prompt_lift.h).
  const kernels::AttentionKernels& kernels() const {
    return launch_->attention.kernels();
  }
  LayerAttention(LayerAttention&&) = default;

  // How many bytes of FreshRows::memory the layer needs.
  static int64_t FreshBytes(const KvArenas::Layer& arena, int64_t max_tokens);

  // Writes the tokens' latents into the cache and computes the tokens'
  // attention over the cache. The caller must sum `out` [T, M] over ranks to
  // get the layer's output.
  absl::Status Run(kernels::Stream& stream, const AttentionInput& input,
                   kernels::DevicePtr<float> out,
                   kernels::Workspace& workspace) const;

  // Only for a layer that evicts: chooses the slots to keep and moves their
  // latents to the front of the sequence's pages (kernels::EvictSelect,
  // kernels::EvictCompact).
  absl::Status Evict(kernels::Stream& stream, const kernels::EvictionRows& rows,
                     const kernels::EvictionStep& step,
                     kernels::Workspace& workspace) const;

  // Returns one launch for all rows. If prompts lift latents (prompt_lift.h),
  // returns one launch for prompts and one for sequences that decode. The
  // pointers are valid as long as this object.
  std::vector<Launch*> launches() const;

  // Sums of Launch::rebuild_flops and Launch::prompt_lift_flops over the slots
  // that a step reads.
  struct SlotWork {
    double rebuild_flops = 0;
    double prompt_lift_flops = 0;
  };
  // Counts the operations of one step, on the host. `sequences` and `rows` are
  // in the same order.
  SlotWork WorkOn(absl::Span<const kernels::AttentionSequence> sequences,
                  absl::Span<const SequenceRows> rows) const;

 private:
  // The heads that one launch of RoPE rotates. All have the same pairing.
  struct Turn {
    kernels::RopePairing pairing = kernels::RopePairing::kHalfSplit;
    std::vector<kernels::RopeHead> queries;
    std::vector<kernels::RopeHead> keys;
    // Used instead of `queries` and `keys` if the heads are contiguous and all
    // their pairs rotate.
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
  // The prepared ops of one key part.
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
  // The exact (uncompressed) rows of a part. `fresh_groups` is empty if the
  // part keeps no exact rows.
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
  // Activations of a step's tokens: one row per token. Rows begin `stride`
  // activations apart.
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
  // Enqueues a matrix product with activations of the type `activations_`.
  absl::Status Matmul(kernels::Stream& stream, kernels::MatmulParams params,
                      kernels::Workspace& workspace) const;
  absl::Status PrepareHadamard(
      const std::vector<kernels::HadamardPlace>& places, int64_t stride,
      bool transposed, std::optional<kernels::PreparedHadamard>* out);
  absl::Status PrepareKeyBias();
  // Returns the first column of each KV head's key in a token's row.
  std::vector<size_t> KeyColumns() const;
  absl::Status TapKeys(kernels::Stream& stream, const Rows& rows) const;
  absl::Status LeaveKeyBiasToScores(absl::Span<const float> bias,
                                    std::vector<float>* cached);
  void PlaceExact();
  absl::Status PrepareAppends();
  absl::Status PrepareEviction();
  // Prepares the launch for all rows, for prompts (with their lifts), or for
  // sequences that decode.
  absl::StatusOr<std::unique_ptr<Launch>> MakeLaunch(LaunchedRows rows) const;

  absl::Status Project(kernels::Stream& stream, const AttentionInput& input,
                       const Rows& rows, kernels::Workspace& workspace) const;
  // Normalizes the projected queries and keys, for models with QK-norm.
  absl::Status NormalizeHeads(kernels::Stream& stream, const Rows& rows,
                              kernels::Workspace& workspace) const;
  absl::Status RotateRows(kernels::Stream& stream, const AttentionInput& input,
                          const Rows& rows,
                          kernels::Workspace& workspace) const;
  absl::Status MakeLatents(kernels::Stream& stream, const PartProgram& part,
                           const PartWeights& weights, const Rows& rows,
                           kernels::Workspace& workspace) const;
  // Calls `call` for each run of consecutive rows whose queries attend directly
  // to the part's latents. If prompts lift the part, these are only the rows of
  // sequences that decode; otherwise all rows.
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
  // Does nothing if `append` is empty.
  absl::Status Append(kernels::Stream& stream,
                      const std::optional<kernels::PreparedKvAppend>& append,
                      const kernels::KvAppendRows& rows,
                      kernels::Workspace& workspace) const;
  // The number of parts in the cache. The key parts come first; the value part
  // is the last.
  size_t num_parts() const { return keys_.size() + 1; }
  bool is_key(size_t part) const { return part < keys_.size(); }
  // Returns the parameters with which KvAppend copies a part's latents from the
  // token rows to `to`.
  kernels::KvAppendPart Appended(size_t part,
                                 const kernels::LatentPart& to) const;
  kernels::ExactSlots ExactSlotsOf(int64_t ring) const;
  bool evicts() const { return parts_.arena->metadata.num_units > 0; }
  const std::vector<int32_t>& UnitOfGroup(size_t part) const {
    return is_key(part) ? parts_.arena->key[part].unit_of_group
                        : parts_.arena->value.front().unit_of_group;
  }
  // The key bias or mean that attention adds to scores, with its tables in host
  // memory.
  struct ScoredKeyBias {
    std::optional<kernels::PreparedKeyBias> op;
    kernels::AttentionKeyBias read;
    std::vector<uint64_t> steps;
    std::vector<int64_t> query_column;
  };
  // The weighted sums that attention computes for each token: of latents and,
  // if needed, of values lifted from latents.
  struct Sums {
    Rows latents;
    Rows values;  // null if the output projection reads `latents`
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
  kernels::Activations activations_;  // the device's type of activations
  kernels::RopePairing pairing_;      // the model's pairing
  // Tables for the RoPE op: the index of the angle that rotates each pair of a
  // head. Needed only while `turns_` are prepared.
  std::vector<std::vector<int32_t>> pair_tables_;
  // Parameters of ops point into these vectors. The pointers stay valid when
  // this object moves, because a moved vector keeps its memory.
  std::vector<Rotate> turns_;
  std::vector<Key> keys_;
  Value value_;
  std::vector<Exact> exact_;  // [parts]
  std::optional<kernels::PreparedKvAppend> append_;
  std::optional<kernels::PreparedKvAppend> append_fresh_;
  // Ops that copy exact rows into the side pages, where later steps read them.
  std::optional<kernels::PreparedKvAppend> keep_keys_;
  std::optional<kernels::PreparedKvAppend> keep_values_;
  std::optional<kernels::PreparedEviction> eviction_;
  // Owns the memory of the two biases below.
  kernels::DeviceTables tables_;
  // The bias of the fused projection, minus what cached keys leave out.
  kernels::DevicePtr<const float> qkv_bias_;
  // The whole key bias or mean [Hkv, D], if it is added to rebuilt keys; else
  // null.
  kernels::DevicePtr<const float> rebuilt_key_bias_;
  std::unique_ptr<ScoredKeyBias> key_bias_;  // null: scores need no key bias
  // The number of columns of a token's row. The columns of the
  // program are followed by the columns that the key bias needs for
  // each query (kernels::KeyBiasColumns).
  int64_t row_columns_ = 0;
  bool rolling_ = false;  // keys rotate by slot number, not by text position
  std::unique_ptr<Launch> launch_;
  std::unique_ptr<Launch> prompt_launch_;  // null if prompts lift nothing
};

// The range of a step's sequences that a launch covers. A step lists prompts
// before sequences that decode.
struct SequenceRange {
  int64_t first = 0;
  int64_t count = 0;
};
SequenceRange SequencesOf(LaunchedRows launched,
                          absl::Span<const SequenceRows> rows);

}  // namespace kvasir::worker
