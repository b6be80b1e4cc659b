// A model's weights as the executor uses them: packed, and only this rank's
// part of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/linear/matmul.h"
#include "model/shapes/decoder_spec.h"
#include "plan/tp_shard.h"
#include "worker/program/attention_program.h"
#include "worker/program/served_plan.h"
#include "worker/weights/matrix_format.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// What one rank holds of a layer. q, k, v, gate and up are split by output
// column, o and down by input row (attention by heads, as its program says),
// head and embedding by token id; norms are whole on every rank.
struct ShardSizes {
  int64_t first_q_head = 0;
  int64_t num_q_heads = 0;
  plan::HeadRange kv_heads;
  int64_t first_feature = 0;  // of the intermediate size
  int64_t num_features = 0;
  plan::IdRange ids;

  // INVALID_ARGUMENT when the heads or features cannot be dealt out equally.
  static absl::StatusOr<ShardSizes> Create(const model::DecoderSpec& spec,
                                           plan::TpShard shard);
  RankHeads heads() const { return {{first_q_head, num_q_heads}, kv_heads}; }
};

// What a part of attention has beside its columns of the fused projection.
struct PartWeights {
  // Rebuilt keys: how a latent becomes the key of each KV head [d, R'], and
  // what is added to it [Hkv, d] (or null). A complex lift: [2, C].
  std::vector<kernels::DevicePtr<const float>> up;  // [Hkv]
  kernels::DevicePtr<const float> up_bias;
  // Otherwise, of each KV head: from a query to what meets its latent (d x R'),
  // or from a sum of latents to a value (R' x D).
  std::vector<kernels::PackedMatrix> lift;    // [Hkv]
  kernels::DevicePtr<const float> lift_bias;  // [Hq, D], or null
  kernels::PackedMatrix basis;                // [KV heads of the model * D, R']
  kernels::DevicePtr<const float>
      basis_bias;  // [R']: takes the mean off; or null
  kernels::DevicePtr<const float>
      range_minimum;  // [sum of R']; null: ranges in slots
  kernels::DevicePtr<const float> range_scale;
  // Lifts that prompts take beside these, where the part has a prompt_lift: of
  // each KV head, a key's [d, R'] or a value's [R', d].
  std::vector<kernels::DevicePtr<const float>> prompt_up;  // [Hkv], or none
};

// Device memory. Vectors are float32, null where the model has none. Matrices
// keep the type they were stored in (float32 where fused parts were stored
// differently).
struct LayerWeights {
  kernels::DevicePtr<const float> input_norm;       // [M]
  kernels::DevicePtr<const float> input_norm_bias;  // [M]
  // In ModelWeights::plan; layers that are alike share one.
  const AttentionProgram* attention = nullptr;
  std::vector<PartWeights> key;  // by key part
  PartWeights value;
  kernels::PackedMatrix qkv;  // [M, attention.projection_columns]
  kernels::DevicePtr<const float> qkv_bias;  // [qkv.n]
  kernels::PackedMatrix o;                   // [attention.output_columns, M]
  kernels::DevicePtr<const float> o_bias;  // [M]; on rank 0 only: it is summed
  kernels::DevicePtr<const float> post_norm;       // [M]
  kernels::DevicePtr<const float> post_norm_bias;  // [M]
  // [M, 2 * features]; of a plain MLP up_proj alone: [M, features].
  kernels::PackedMatrix gate_up;
  kernels::DevicePtr<const float> gate_up_bias;  // [gate_up.n]
  kernels::PackedMatrix down;                    // [features, M]
  kernels::DevicePtr<const float> down_bias;     // [M]; on rank 0 only
};

// Owns: all weight memory, under the tag "weights".
struct ModelWeights {
  std::shared_ptr<const ServedPlan> plan;  // the programs' owner
  ShardSizes shard;
  std::vector<LayerWeights> layers;
  kernels::DevicePtr<const float> final_norm;       // [M]
  kernels::DevicePtr<const float> final_norm_bias;  // [M]
  kernels::PackedMatrix head;                       // [M, shard.ids.count]
  // Row-major [shard.ids.count, M]; null when the head is tied: the packed head
  // serves both.
  kernels::DevicePtr<const void> embedding;
  kernels::DType embedding_dtype = kernels::DType::kF32;
  // Learned positions [max_position_embeddings, M], on rank 0 only: they are
  // summed; null where there are none.
  kernels::DevicePtr<const void> positions;
  kernels::DType positions_dtype = kernels::DType::kF32;

  // WeightSource's, of what this rank has read.
  std::string weight_tiles;
  // Of all matrices that a step streams (the embedding is only looked up in,
  // and a step that decodes leaves the prompts' lifts alone).
  int64_t matrix_bytes = 0;
  // Of matrices whose numbers were rounded to the type of activations.
  int64_t rounded_bytes = 0;
  // Of the checkpoint, that this rank has read.
  int64_t read_bytes = 0;

  std::vector<kernels::DeviceBuffer> buffers;
};

struct LoadOptions {
  // Runs on all threads of the pool; each reads and packs whole matrices.
  base::ThreadPool* pool = nullptr;
  // Per thread; more where a row needs it. Small enough that what was read is
  // still in the second-level cache when it is packed.
  size_t read_buffer_bytes = size_t{512} << 10;
  // Of the host, that matrices are packed in before they go to a device which
  // wants that (Device::stages_writes): all threads together, but a matrix that
  // is larger goes alone.
  int64_t max_staged_bytes = int64_t{1} << 30;
  // Called from one thread at a time with the bytes packed so far and in all.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// What LoadWeights would allocate on a device of this format. Reads nothing;
// its errors but those of reading and memory.
absl::StatusOr<int64_t> CountWeightBytes(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         const MatrixFormat& format);

// What LoadWeights would ask of the source: of a group of ranks each its part,
// in whole tiles.
absl::StatusOr<int64_t> CountReadBytes(const model::DecoderSpec& spec,
                                       std::shared_ptr<const ServedPlan> plan,
                                       WeightSource* source);

// As LoadWeights would give them, without memory: pointers are null. For asking
// whether a device has what steps need. Reads nothing.
absl::StatusOr<ModelWeights> WeightsWithoutMemory(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const MatrixFormat& format);

// Reads the part of every tensor that belongs to the rank which the plan was
// resolved for, once, and packs it while it is read: no second copy is held.
// Errors of
// WeightJobs, and INVALID_ARGUMENT for ranges of codes that are none, with
// tensor, channel and value.
absl::StatusOr<ModelWeights> LoadWeights(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         kernels::Device* device,
                                         const LoadOptions& options);

}  // namespace kvasir::worker
