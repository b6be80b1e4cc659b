// A model's weights as the executor uses them: packed, and only this rank's
// part.
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

// The part of a layer that one rank holds. q, k, v, gate and up are split by
// output column; o and down by input row (attention by heads, as its program
// says); head and embedding by token id. Norms are whole on every rank.
struct ShardSizes {
  int64_t first_q_head = 0;
  int64_t num_q_heads = 0;
  plan::HeadRange kv_heads;
  int64_t first_feature = 0;  // in the intermediate size
  int64_t num_features = 0;
  plan::IdRange ids;

  // INVALID_ARGUMENT if the heads or features do not divide equally.
  static absl::StatusOr<ShardSizes> Create(const model::DecoderSpec& spec,
                                           plan::TpShard shard);
  RankHeads heads() const { return {{first_q_head, num_q_heads}, kv_heads}; }
};

// The weights of one part of attention, in addition to its columns of the fused
// projection.
struct PartWeights {
  // For rebuilt keys: the matrix from a latent to the key of each KV head [d,
  // R'], and what is added to the key [Hkv, d] (or null). For a complex lift:
  // [2, C].
  std::vector<kernels::DevicePtr<const float>> up;  // [Hkv]
  kernels::DevicePtr<const float> up_bias;
  // Otherwise, for each KV head: the matrix from a query to what meets its
  // latent (d x R'), or from a sum of latents to a value (R' x D).
  std::vector<kernels::PackedMatrix> lift;    // [Hkv]
  kernels::DevicePtr<const float> lift_bias;  // [Hq, D], or null
  kernels::PackedMatrix basis;                // [KV heads of the model * D, R']
  kernels::DevicePtr<const float>
      basis_bias;  // [R'], subtracts the mean; or null
  kernels::DevicePtr<const float>
      range_minimum;  // [sum of R']; null: ranges are stored in slots
  kernels::DevicePtr<const float> range_scale;
  // The lifts that prompts use in addition, if the part has a prompt_lift: for
  // each KV head a key's [d, R'] or a value's [R', d].
  std::vector<kernels::DevicePtr<const float>> prompt_up;  // [Hkv], or empty
};

// Device memory. Vectors are float32, and null if the model has none. Matrices
// keep their stored type, or are float32 if their parts were stored in
// different types.
struct LayerWeights {
  kernels::DevicePtr<const float> input_norm;       // [M]
  kernels::DevicePtr<const float> input_norm_bias;  // [M]
  // Points into ModelWeights::plan. Layers that are alike share one.
  const AttentionProgram* attention = nullptr;
  std::vector<PartWeights> key;  // by key part
  PartWeights value;
  kernels::PackedMatrix qkv;  // [M, attention.projection_columns]
  kernels::DevicePtr<const float> qkv_bias;  // [qkv.n]
  kernels::PackedMatrix o;                   // [attention.output_columns, M]
  // [M]; only on rank 0, because it is summed over ranks
  kernels::DevicePtr<const float> o_bias;
  kernels::DevicePtr<const float> post_norm;       // [M]
  kernels::DevicePtr<const float> post_norm_bias;  // [M]
  // [M, 2 * features]; for a plain MLP only up_proj: [M, features].
  kernels::PackedMatrix gate_up;
  kernels::DevicePtr<const float> gate_up_bias;  // [gate_up.n]
  kernels::PackedMatrix down;                    // [features, M]
  kernels::DevicePtr<const float> down_bias;     // [M]; only on rank 0
};

// Owns: all weight memory, under the tag "weights".
struct ModelWeights {
  std::shared_ptr<const ServedPlan> plan;  // owns the programs
  ShardSizes shard;
  std::vector<LayerWeights> layers;
  kernels::DevicePtr<const float> final_norm;       // [M]
  kernels::DevicePtr<const float> final_norm_bias;  // [M]
  kernels::PackedMatrix head;                       // [M, shard.ids.count]
  // Row-major [shard.ids.count, M]. Null if the head is tied: then the packed
  // head is used for both.
  kernels::DevicePtr<const void> embedding;
  kernels::DType embedding_dtype = kernels::DType::kF32;
  // Learned positions [max_position_embeddings, M], only on rank 0 because they
  // are summed over ranks. Null if the model has none.
  kernels::DevicePtr<const void> positions;
  kernels::DType positions_dtype = kernels::DType::kF32;

  // WeightSource::WeightTiles, for what this rank has read.
  std::string weight_tiles;
  // Bytes of all matrices that a step reads. Not counted: the embedding, which
  // is only looked up, and prompt lifts, which a decode step does not read.
  int64_t matrix_bytes = 0;
  // Bytes of matrices whose numbers were rounded to the type of activations.
  int64_t rounded_bytes = 0;
  // Bytes of the checkpoint that this rank has read.
  int64_t read_bytes = 0;

  std::vector<kernels::DeviceBuffer> buffers;
};

struct LoadOptions {
  // Loading uses all threads of the pool; each reads and packs whole matrices.
  base::ThreadPool* pool = nullptr;
  // Per thread; larger if a row needs it. Small enough that data is still in
  // the second-level cache when it is packed.
  size_t read_buffer_bytes = size_t{512} << 10;
  // Limit of host memory, over all threads, in which matrices are packed before
  // they go to a device that needs that (Device::stages_writes). A larger
  // matrix goes when no other one is staged.
  int64_t max_staged_bytes = int64_t{1} << 30;
  // Called by one thread at a time, with the bytes packed so far and in total.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// The bytes that LoadWeights would allocate on a device of this format. Reads
// nothing. Returns the errors of LoadWeights, except those of reading and
// memory.
absl::StatusOr<int64_t> CountWeightBytes(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         const MatrixFormat& format);

// The bytes that LoadWeights would read from the source on this rank, in whole
// tiles.
absl::StatusOr<int64_t> CountReadBytes(const model::DecoderSpec& spec,
                                       std::shared_ptr<const ServedPlan> plan,
                                       WeightSource* source);

// The weights as LoadWeights returns them, but with null pointers. Used to find
// out whether a device has the ops that steps need. Reads nothing.
absl::StatusOr<ModelWeights> WeightsWithoutMemory(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const MatrixFormat& format);

// Reads this rank's part of every tensor once, and packs it while it is read,
// without a second copy. The rank is that of the resolved plan. Returns the
// errors of WeightJobs, and INVALID_ARGUMENT with tensor, channel and value for
// invalid ranges of codes.
absl::StatusOr<ModelWeights> LoadWeights(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         kernels::Device* device,
                                         const LoadOptions& options);

}  // namespace kvasir::worker
