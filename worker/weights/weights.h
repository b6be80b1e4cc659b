// A model's weights in the form that the executor uses: packed, and only this
// rank's part.
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

// The part of the model that one rank holds. The matrices q, k, v, gate and up
// are split by output column, o and down by input row, and head and embedding
// by token id. Every rank holds a part of each expert, and the whole matrix of
// the router. Attention is split by heads, as its program says. Every rank
// holds all weights of the norms.
struct ShardSizes {
  int64_t first_q_head = 0;
  int64_t num_q_heads = 0;
  plan::HeadRange kv_heads;
  int64_t first_feature = 0;  // this rank's part of the MLP's features
  int64_t num_features = 0;
  // this rank's part of each expert's features
  int64_t first_expert_feature = 0;
  int64_t num_expert_features = 0;
  plan::IdRange ids;

  // INVALID_ARGUMENT if heads or features cannot be divided equally among the
  // ranks.
  static absl::StatusOr<ShardSizes> Create(const model::DecoderSpec& spec,
                                           plan::TpShard shard);
  RankHeads heads() const { return {{first_q_head, num_q_heads}, kv_heads}; }
};

// The weights of one part of attention, except for the fused projection. R' is
// the width of a latent, d the number of dims of a rebuilt key, D the head_dim,
// C the number of complex channels, and Hq and Hkv are the numbers of this
// rank's query and KV heads.
struct PartWeights {
  // If keys are rebuilt: for each KV head a matrix [d, R'] that makes a key
  // from a latent. If `up_bias` [Hkv, d] is not null, it is added to the keys.
  // For a complex lift: [2, C] for each KV head.
  std::vector<kernels::DevicePtr<const float>> up;  // [Hkv]
  kernels::DevicePtr<const float> up_bias;
  // For other lifts, one matrix for each KV head. A key part has [d, R']
  // matrices, which lift queries to the latent's width. A value part has [R',
  // D] matrices, which make values from sums of latents.
  std::vector<kernels::PackedMatrix> lift;    // [Hkv]
  kernels::DevicePtr<const float> lift_bias;  // [Hq, D], or null
  kernels::PackedMatrix basis;                // [KV heads of the model * D, R']
  kernels::DevicePtr<const float>
      basis_bias;  // [R'], subtracts the mean; or null
  kernels::DevicePtr<const float>
      range_minimum;  // [sum of R']; null: each slot stores its ranges
  kernels::DevicePtr<const float> range_scale;
  // The matrices of the part's prompt lift (prompt_lift.h), if it has one: [d,
  // R'] for keys, [R', d] for values.
  std::vector<kernels::DevicePtr<const float>> prompt_up;  // [Hkv], or empty
};

// The router and the matrices of expert 0 in a mixture of experts. The matrices
// of all experts follow each other in memory. Expert e's gate_up begins e *
// gate_up.bytes() bytes after `gate_up`; its down begins e * down.bytes() bytes
// after `down`.
struct ExpertWeights {
  kernels::PackedMatrix router;   // [M, E]
  kernels::PackedMatrix gate_up;  // [M, 2 * features of an expert]
  kernels::PackedMatrix down;     // [features of an expert, M]
};

// The weights of one layer, in device memory. Vectors are float32, and null if
// the model does not have them. WeightJobs::Matrix says which type matrices
// have. M is the hidden size.
struct LayerWeights {
  // The norms of the inputs and outputs of attention and MLP, [M] each. The
  // weights of RMSNorms include DecoderSpec::norm_weight_offset.
  kernels::DevicePtr<const float> input_norm;
  kernels::DevicePtr<const float> input_norm_bias;
  kernels::DevicePtr<const float> attention_output_norm;
  kernels::DevicePtr<const float> mlp_output_norm;
  // Points into ModelWeights::plan. Layers with equal attention share a
  // program.
  const AttentionProgram* attention = nullptr;
  std::vector<PartWeights> key;  // by key part
  PartWeights value;
  kernels::PackedMatrix qkv;  // [M, attention.projection_columns]
  kernels::DevicePtr<const float> qkv_bias;  // [qkv.n]
  // The norms of queries and keys: [D] for each head, or [Hq * D] and [Hkv * D]
  // for all heads together.
  kernels::DevicePtr<const float> q_norm;
  kernels::DevicePtr<const float> k_norm;
  // A copy of qkv_bias in host memory; null if there is no bias.
  // WeightsWithoutMemory fills it with ones, so that a check of the device's
  // ops includes the ops for a bias.
  std::shared_ptr<const std::vector<float>> host_qkv_bias;
  // The mean of the keys before RoPE, including their bias, in host memory:
  // [Hkv, D]. Null unless a Rank has measured it (worker/ranks/key_means.h).
  std::shared_ptr<const std::vector<float>> key_mean;
  kernels::PackedMatrix o;  // [attention.output_columns, M]
  // [M]; null except on rank 0, because outputs are summed over ranks.
  kernels::DevicePtr<const float> o_bias;
  kernels::DevicePtr<const float> post_norm;       // [M]
  kernels::DevicePtr<const float> post_norm_bias;  // [M]
  // [M, 2 * features]. An MLP without gate has only up_proj: [M, features].
  kernels::PackedMatrix gate_up;
  kernels::DevicePtr<const float> gate_up_bias;  // [gate_up.n]
  kernels::PackedMatrix down;                    // [features, M]
  kernels::DevicePtr<const float> down_bias;     // [M]; null except on rank 0
  // A layer with experts has these matrices instead of gate_up and down.
  ExpertWeights experts;
};

// Owns: all weight memory, under the tag "weights".
struct ModelWeights {
  std::shared_ptr<const ServedPlan> plan;  // owns the programs
  ShardSizes shard;
  std::vector<LayerWeights> layers;
  kernels::DevicePtr<const float> final_norm;       // [M]
  kernels::DevicePtr<const float> final_norm_bias;  // [M]
  kernels::PackedMatrix head;                       // [M, shard.ids.count]
  // Row-major [shard.ids.count, M]. Null if head and embedding share their
  // weights, because `head` is then used for both.
  kernels::DevicePtr<const void> embedding;
  kernels::DType embedding_dtype = kernels::DType::kF32;
  // Learned positions [max_position_embeddings, M]. Null if the model has none,
  // and on all ranks except rank 0, because embeddings are summed over ranks.
  kernels::DevicePtr<const void> positions;
  kernels::DType positions_dtype = kernels::DType::kF32;

  // The value of WeightSource::WeightTiles after loading: the hashes of the
  // tiles that this rank has read.
  std::string weight_tiles;
  // Bytes of all matrices that a decode step may read. A step reads only those
  // experts of a mixture that its tokens use. Excludes prompt lifts and the
  // embedding, of which a step reads only a few rows.
  int64_t matrix_bytes = 0;
  // Bytes of the matrices that were converted to another type when they were
  // loaded.
  int64_t rounded_bytes = 0;
  // Bytes of the checkpoint that this rank has read.
  int64_t read_bytes = 0;

  std::vector<kernels::DeviceBuffer> buffers;
};

struct LoadOptions {
  // Loading uses all threads of this pool. Each thread reads and packs whole
  // matrices.
  base::ThreadPool* pool = nullptr;
  // The read buffer of each thread, which grows if a row needs more. It is
  // small enough that data is still in the CPU's second-level cache when it is
  // packed.
  size_t read_buffer_bytes = size_t{512} << 10;
  // Only for devices that stage writes (Device::stages_writes): threads pack
  // matrices in host memory, from which they are copied to the device. This
  // limits the memory of all threads together. A matrix above the limit is
  // staged by itself.
  int64_t max_staged_bytes = int64_t{1} << 30;
  // Called by one thread at a time, with the bytes packed so far and in total.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
};

// Counts the bytes that LoadWeights would allocate on a device with this
// format. Reads nothing. Returns the errors of LoadWeights, except those of
// reading and of memory.
absl::StatusOr<int64_t> CountWeightBytes(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         const MatrixFormat& format);

// Counts the bytes that LoadWeights would read from the source on this rank, in
// whole tiles of the checkpoint (model/checkpoint/fingerprint.h).
absl::StatusOr<int64_t> CountReadBytes(const model::DecoderSpec& spec,
                                       std::shared_ptr<const ServedPlan> plan,
                                       WeightSource* source);

// Returns the weights as LoadWeights does, but with null pointers and without
// reading anything. Used to find out whether a device has the ops that steps
// need.
absl::StatusOr<ModelWeights> WeightsWithoutMemory(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const MatrixFormat& format);

// Reads this rank's part of every tensor once and packs it while reading, so
// that there is never a second copy of the model. The resolved plan says which
// rank this is. Returns the errors of WeightJobs, and INVALID_ARGUMENT with
// tensor, row and value for an invalid static range.
absl::StatusOr<ModelWeights> LoadWeights(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         kernels::Device* device,
                                         const LoadOptions& options);

}  // namespace kvasir::worker
