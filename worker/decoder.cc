#include "worker/decoder.h"

#include <cmath>
#include <vector>

#include "base/status_macros.h"
#include "kernels/ops.h"
#include "kernels/read_back.h"
#include "worker/advance.h"

namespace kvasir::worker {
namespace {

using kernels::Stream;
using kernels::Workspace;

struct DenseRows {
  const float* x = nullptr;
  int64_t num_rows = 0;
  const float* bias = nullptr;
};

// y [rows, n] = x [rows, k] W, both without gaps between rows.
absl::Status MatmulDense(Stream& stream, const DenseRows& in,
                         const kernels::PackedMatrix& weight, float* y,
                         Workspace& workspace) {
  kernels::MatmulParams params;
  params.x = in.x;
  params.x_row_stride = weight.k;
  params.num_rows = in.num_rows;
  params.weight = weight;
  params.bias = in.bias;
  params.y = y;
  params.y_row_stride = weight.n;
  return kernels::Matmul(stream, params, workspace);
}

kernels::ActivationKind ActivationOf(model::MlpKind kind) {
  switch (kind) {
    case model::MlpKind::kGelu:
      return kernels::ActivationKind::kGelu;
    case model::MlpKind::kGeluTanh:
      return kernels::ActivationKind::kGeluTanh;
    case model::MlpKind::kRelu:
    case model::MlpKind::kGatedSilu:  // has no activation of its own
      break;
  }
  return kernels::ActivationKind::kRelu;
}

}  // namespace

absl::StatusOr<Decoder> Decoder::Create(const Parts& parts,
                                        kernels::DeviceAllocator* allocator,
                                        kernels::Stream* stream) {
  Decoder decoder;
  decoder.parts_ = parts;
  std::vector<uint64_t> steps;
  for (const double frequency : parts.spec->rope.frequencies) {
    steps.push_back(kernels::RopeStep(frequency));
  }
  for (int64_t head = 0; head < parts.weights->shard.num_q_heads; ++head) {
    decoder.head_columns_.push_back(head * parts.spec->head_dim);
  }
  const size_t bytes = steps.size() * sizeof(uint64_t);
  KVASIR_ASSIGN_OR_RETURN(
      decoder.rope_steps_,
      allocator->Allocate(bytes, kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*stream, decoder.rope_steps_.data(),
                                         steps.data(), bytes));
  return decoder;
}

absl::Status Decoder::Embed(Stream& stream, const TokenBatch& batch, float* x,
                            Workspace& workspace) const {
  const ModelWeights& weights = *parts_.weights;
  kernels::EmbeddingParams params;
  params.ids = batch.ids;
  params.num_tokens = batch.num_tokens;
  params.vocab = spec().vocab_size;
  params.hidden = spec().hidden_size;
  params.table = weights.embedding;
  params.table_dtype = weights.embedding_dtype;
  params.packed = weights.head;
  params.position_table = weights.positions;
  params.position_dtype = weights.positions_dtype;
  params.num_positions = spec().max_position_embeddings;
  params.positions = batch.positions;
  params.out = x;
  return kernels::Embedding(stream, params, workspace);
}

absl::Status Decoder::Run(Stream& stream, const TokenBatch& batch,
                          HiddenStates* out, Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  const int64_t t = batch.num_tokens;
  out->x = workspace.Take<float>(t * m);
  out->delta = workspace.Take<float>(t * m);
  Workspace::Scope scope(&workspace);
  float* const normed = workspace.Take<float>(t * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Embed(stream, batch, out->x, workspace));

  for (int64_t layer = 0; layer < spec().num_layers(); ++layer) {
    const LayerWeights& weights =
        parts_.weights->layers[static_cast<size_t>(layer)];
    // What the layer before added enters with this norm.
    KVASIR_RETURN_IF_ERROR(
        Norm(stream,
             {out->x, layer == 0 ? nullptr : out->delta, weights.input_norm,
              weights.input_norm_bias, normed, t},
             workspace));
    KVASIR_RETURN_IF_ERROR(
        Attention(stream, batch, layer, normed, out->delta, workspace));
    const bool parallel = spec().parallel_residual;
    KVASIR_RETURN_IF_ERROR(
        Norm(stream,
             {out->x, parallel ? nullptr : out->delta, weights.post_norm,
              weights.post_norm_bias, normed, t},
             workspace));
    if (parallel) {
      KVASIR_RETURN_IF_ERROR(
          AddMlp(stream, t, layer, normed, out->delta, workspace));
    } else {
      KVASIR_RETURN_IF_ERROR(
          Mlp(stream, t, layer, normed, out->delta, workspace));
    }
  }
  return absl::OkStatus();
}

absl::Status Decoder::Norm(Stream& stream, const NormRows& rows,
                           Workspace& workspace) const {
  const auto fill = [&](auto& norm) {
    norm.x = rows.x;
    norm.residual = rows.residual;
    norm.weight = rows.weight;
    norm.out = rows.out;
    norm.num_rows = rows.num_rows;
    norm.columns = spec().hidden_size;
    norm.eps = static_cast<float>(spec().norm_eps);
  };
  if (spec().norm == model::NormKind::kRmsNorm) {
    kernels::RmsNormParams norm;
    fill(norm);
    return kernels::RmsNorm(stream, norm, workspace);
  }
  kernels::LayerNormParams norm;
  fill(norm);
  norm.bias = rows.bias;
  return kernels::LayerNorm(stream, norm, workspace);
}

absl::Status Decoder::Attention(Stream& stream, const TokenBatch& batch,
                                int64_t layer, const float* normed, float* out,
                                Workspace& workspace) const {
  const LayerWeights& weights =
      parts_.weights->layers[static_cast<size_t>(layer)];
  const KvArenas::Layer& arena =
      parts_.arenas->layers()[static_cast<size_t>(layer)];
  const AttentionBatch& group =
      batch.groups[static_cast<size_t>(arena.page_group)];
  const ShardSizes& shard = parts_.weights->shard;
  const int64_t t = batch.num_tokens;
  const int64_t d = spec().head_dim;
  const int64_t q_columns = shard.num_q_heads * d;
  const int64_t kv_columns = shard.kv_heads.count * d;
  const int64_t columns = weights.qkv.n;

  Workspace::Scope scope(&workspace);
  float* const qkv = workspace.Take<float>(t * columns);
  float* const attended = workspace.Take<float>(t * q_columns);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(MatmulDense(stream, {normed, t, weights.qkv_bias},
                                     weights.qkv, qkv, workspace));

  kernels::RopeParams rope;
  rope.q = {qkv, columns, shard.num_q_heads, d};
  rope.k = {Advance(qkv, q_columns), columns, shard.kv_heads.count, d};
  rope.num_tokens = t;
  rope.positions = batch.positions;
  rope.steps = rope_steps_.as<uint64_t>();
  rope.rotary_dim = spec().rope.rotary_dim;
  rope.pairing = spec().rope.pairing == model::RopePairing::kHalfSplit
                     ? kernels::RopePairing::kHalfSplit
                     : kernels::RopePairing::kInterleaved;
  rope.attention_factor = static_cast<float>(spec().rope.attention_factor);
  if (spec().layers[static_cast<size_t>(layer)].rope) {
    KVASIR_RETURN_IF_ERROR(kernels::Rope(stream, rope, workspace));
  }

  const KvArenas::Part& keys = arena.key.front();
  const KvArenas::Part& values = arena.value.front();
  kernels::KvAppendPart rows[2];
  rows[0].rows = Advance(qkv, q_columns);
  rows[0].row_stride = columns;
  rows[0].part = keys.latents;
  rows[1].rows = Advance(qkv, q_columns + kv_columns);
  rows[1].row_stride = columns;
  rows[1].part = values.latents;
  kernels::KvAppendParams append;
  append.parts = rows;
  append.num_parts = 2;
  append.slots = group.slots;
  append.num_tokens = t;
  append.page_tokens = parts_.page_tokens;
  KVASIR_RETURN_IF_ERROR(kernels::KvAppend(stream, append, workspace));

  kernels::AttentionKeyPart key_part;
  key_part.latents = keys.latents;
  key_part.group_of_head = keys.group_of_head.data();
  key_part.query_column = head_columns_.data();
  kernels::AttentionValuePart value_part;
  value_part.latents = values.latents;
  value_part.group_of_head = values.group_of_head.data();
  value_part.out_column = head_columns_.data();
  kernels::PagedAttentionParams attention;
  attention.q = qkv;
  attention.q_row_stride = columns;
  attention.out = attended;
  attention.out_row_stride = q_columns;
  attention.num_heads = shard.num_q_heads;
  attention.num_kv_heads = shard.kv_heads.count;
  attention.keys = &key_part;
  attention.num_key_parts = 1;
  attention.values = &value_part;
  attention.num_value_parts = 1;
  attention.page_tokens = parts_.page_tokens;
  attention.sequences = group.sequences;
  attention.num_sequences = batch.num_sequences;
  attention.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
  attention.window = spec().layers[static_cast<size_t>(layer)].sliding_window;
  KVASIR_RETURN_IF_ERROR(kernels::PagedAttention(stream, attention, workspace));

  KVASIR_RETURN_IF_ERROR(MatmulDense(stream, {attended, t, weights.o_bias},
                                     weights.o, out, workspace));
  return parts_.collective->AllReduceSum(stream, out, t * spec().hidden_size,
                                         workspace);
}

absl::Status Decoder::Mlp(Stream& stream, int64_t num_tokens, int64_t layer,
                          const float* normed, float* out,
                          Workspace& workspace) const {
  const LayerWeights& weights =
      parts_.weights->layers[static_cast<size_t>(layer)];
  const int64_t features = parts_.weights->shard.num_features;
  Workspace::Scope scope(&workspace);
  const bool gated_mlp = model::IsGated(spec().mlp);
  float* const gate_up = workspace.Take<float>(num_tokens * weights.gate_up.n);
  // A plain activation stays in its place.
  float* const gated =
      gated_mlp ? workspace.Take<float>(num_tokens * features) : gate_up;
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(MatmulDense(stream,
                                     {normed, num_tokens, weights.gate_up_bias},
                                     weights.gate_up, gate_up, workspace));
  if (gated_mlp) {
    KVASIR_RETURN_IF_ERROR(kernels::SiluMul(
        stream, {gate_up, gated, num_tokens, features}, workspace));
  } else {
    KVASIR_RETURN_IF_ERROR(kernels::Activation(
        stream,
        {gate_up, gated, num_tokens, features, ActivationOf(spec().mlp)},
        workspace));
  }
  KVASIR_RETURN_IF_ERROR(MatmulDense(stream,
                                     {gated, num_tokens, weights.down_bias},
                                     weights.down, out, workspace));
  return parts_.collective->AllReduceSum(
      stream, out, num_tokens * spec().hidden_size, workspace);
}

absl::Status Decoder::AddMlp(Stream& stream, int64_t num_tokens, int64_t layer,
                             const float* normed, float* sum,
                             Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  Workspace::Scope scope(&workspace);
  float* const added = workspace.Take<float>(num_tokens * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(
      Mlp(stream, num_tokens, layer, normed, added, workspace));
  kernels::AddRowsParams add;
  add.y = sum;
  add.y_row_stride = m;
  add.x = added;
  add.x_row_stride = m;
  add.num_rows = num_tokens;
  add.columns = m;
  return kernels::AddRows(stream, add, workspace);
}

absl::Status Decoder::FinalNorm(Stream& stream, const HiddenStates& hidden,
                                const int32_t* rows, int64_t num_rows,
                                float* out, Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  Workspace::Scope scope(&workspace);
  float* const delta = workspace.Take<float>(num_rows * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  kernels::GatherRowsParams gather;
  gather.x_row_stride = m;
  gather.rows = rows;
  gather.out_row_stride = m;
  gather.num_rows = num_rows;
  gather.columns = m;
  gather.x = hidden.delta;
  gather.out = delta;
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(stream, gather, workspace));
  gather.x = hidden.x;
  gather.out = out;
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(stream, gather, workspace));
  return Norm(stream,
              {out, delta, parts_.weights->final_norm,
               parts_.weights->final_norm_bias, out, num_rows},
              workspace);
}

}  // namespace kvasir::worker
