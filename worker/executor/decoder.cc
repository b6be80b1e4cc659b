#include "worker/executor/decoder.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/status_macros.h"
#include "kernels/experts/ops.h"
#include "kernels/linear/ops.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::worker {
namespace {

using kernels::Stream;
using kernels::Workspace;

// Lists with one element per rank need no heap memory in groups of at most this
// many ranks. Larger groups are rare.
constexpr size_t kInlineRanks = 32;

struct DenseRows {
  kernels::DevicePtr<const float> x;
  int64_t num_rows = 0;
  kernels::DevicePtr<const float> bias;
  kernels::DType dtype = kernels::DType::kF32;  // the type of x and y
};

// Enqueues y [rows, n] = x [rows, k] * W. The rows of x and of y are
// contiguous.
absl::Status MatmulDense(Stream& stream, const DenseRows& in,
                         const kernels::PackedMatrix& weight,
                         kernels::DevicePtr<float> y, Workspace& workspace) {
  kernels::MatmulParams params;
  params.x = in.x;
  params.x_row_stride = weight.k;
  params.num_rows = in.num_rows;
  params.weight = weight;
  params.bias = in.bias;
  params.y = y;
  params.y_row_stride = weight.n;
  params.dtype = in.dtype;
  params.y_dtype = in.dtype;
  return kernels::Matmul(stream, params, workspace);
}

kernels::ActivationKind ActivationOf(model::MlpKind kind) {
  switch (kind) {
    case model::MlpKind::kGelu:
      return kernels::ActivationKind::kGelu;
    case model::MlpKind::kGeluTanh:
      return kernels::ActivationKind::kGeluTanh;
    case model::MlpKind::kRelu:
    case model::MlpKind::kGatedSilu:  // gated kinds have their own kernel
    case model::MlpKind::kGatedGeluTanh:
      break;
  }
  return kernels::ActivationKind::kRelu;
}

}  // namespace

Decoder::Decoder(kernels::Device* device)
    : activations_{device->activations()}, tables_(device) {}

absl::StatusOr<Decoder> Decoder::Create(const Parts& parts,
                                        kernels::Device* device) {
  Decoder decoder(device);
  decoder.parts_ = parts;
  decoder.hadamard_ = std::make_unique<kernels::HadamardTables>(device);
  KVASIR_RETURN_IF_ERROR(decoder.CreateLayers(device));
  decoder.FindStepKinds();
  decoder.parts_.plan = nullptr;
  return decoder;
}

absl::Status Decoder::CreateLayers(kernels::Device* device) {
  int64_t fresh_bytes = 0;
  for (const KvArenas::Layer& arena : parts_.arenas->layers()) {
    fresh_bytes = std::max(
        fresh_bytes, LayerAttention::FreshBytes(arena, parts_.max_tokens));
  }
  KVASIR_ASSIGN_OR_RETURN(
      fresh_, device->allocator().Allocate(static_cast<size_t>(fresh_bytes),
                                           kernels::MemoryTag::kWorkspace));
  // How much the angle of each pair grows per position: one table for `rope`,
  // and one for `window_rope` if there is one.
  struct Steps {
    std::vector<uint64_t> on_host;
    kernels::DevicePtr<const uint64_t> on_device;
  };
  std::map<const model::RopeSpec*, Steps> steps_of;
  for (int64_t layer = 0; layer < spec().num_layers(); ++layer) {
    const model::RopeSpec& rope = spec().rope_of(layer);
    const auto [found, is_new] = steps_of.try_emplace(&rope);
    if (!is_new) continue;
    Steps& steps = found->second;
    for (const double frequency : rope.frequencies) {
      steps.on_host.push_back(kernels::RopeStep(frequency));
    }
    KVASIR_ASSIGN_OR_RETURN(
        steps.on_device,
        tables_.Add(absl::Span<const uint64_t>(steps.on_host)));
  }
  for (int64_t layer = 0; layer < spec().num_layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    const std::optional<plan::ResolvedEviction>& eviction =
        parts_.plan->layer(layer).eviction;
    const Steps& steps = steps_of.at(&spec().rope_of(layer));
    KVASIR_ASSIGN_OR_RETURN(
        LayerAttention attention,
        LayerAttention::Create(
            {.device = device,
             .spec = parts_.spec,
             .layer = layer,
             .weights = &parts_.weights->layers[index],
             .arena = &parts_.arenas->layers()[index],
             .rings = &parts_.arenas->rings(),
             .rope_steps = steps.on_host,
             .device_rope_steps = steps.on_device,
             .hadamard = hadamard_.get(),
             .fresh = {fresh_.as<char>(), parts_.max_tokens},
             .eviction = eviction.has_value() ? &*eviction : nullptr,
             .mass = parts_.mass,
             .page_tokens = parts_.page_tokens,
             .prompts_as_rows = parts_.prompts_as_rows,
             .profile = parts_.profile,
             .key_tap = parts_.key_tap,
             .clamped_codes = parts_.clamped_codes}));
    attention_.push_back(std::move(attention));
  }
  return absl::OkStatus();
}

std::vector<Decoder::LayersKernels> Decoder::attention_kernels() const {
  std::vector<LayersKernels> kinds;
  for (const LayerAttention& layer : attention_) {
    if (layer.kernels().decode.empty()) continue;
    const auto found = std::find_if(
        kinds.begin(), kinds.end(),
        [&](const auto& kind) { return kind.kernels == layer.kernels(); });
    if (found == kinds.end()) {
      kinds.push_back({layer.kernels(), 1});
    } else {
      ++found->layers;
    }
  }
  return kinds;
}

void Decoder::FindStepKinds() {
  for (size_t layer = 0; layer < attention_.size(); ++layer) {
    const auto group =
        static_cast<size_t>(parts_.arenas->layers()[layer].page_group);
    for (LayerAttention::Launch* const launch : attention_[layer].launches()) {
      const auto found = std::find_if(
          step_kinds_.begin(), step_kinds_.end(), [&](const StepKind& kind) {
            return kind.page_group == group &&
                   kind.launch->rows == launch->rows &&
                   kind.launch->attention.grid().DividesAs(
                       launch->attention.grid());
          });
      launch->step = static_cast<size_t>(found - step_kinds_.begin());
      if (found == step_kinds_.end()) step_kinds_.push_back({group, launch});
    }
  }
  steps_.resize(step_kinds_.size());
}

absl::Status Decoder::DivideSteps(absl::Span<const SequenceRows> rows,
                                  absl::Span<const AttentionBatch> groups) {
  for (size_t i = 0; i < step_kinds_.size(); ++i) {
    const StepKind& kind = step_kinds_[i];
    const SequenceRange range = SequencesOf(kind.launch->rows, rows);
    KVASIR_ASSIGN_OR_RETURN(
        steps_[i], kernels::DivideStep(kind.launch->attention,
                                       groups[kind.page_group].on_host.subspan(
                                           static_cast<size_t>(range.first),
                                           static_cast<size_t>(range.count))));
  }
  return absl::OkStatus();
}

absl::Status Decoder::Embed(Stream& stream, const TokenBatch& batch,
                            kernels::DevicePtr<float> x,
                            Workspace& workspace) const {
  const ModelWeights& weights = *parts_.weights;
  kernels::EmbeddingParams params;
  params.ids = batch.ids;
  params.num_tokens = batch.num_tokens;
  params.first_id = weights.shard.ids.first;
  params.vocab = weights.shard.ids.count;
  params.hidden = spec().hidden_size;
  params.table = weights.embedding;
  params.table_dtype = weights.embedding_dtype;
  params.packed = weights.head;
  params.position_table = weights.positions;
  params.position_dtype = weights.positions_dtype;
  params.num_positions = spec().max_position_embeddings;
  params.positions = batch.positions;
  params.out = x;
  params.dtype = activations_.dtype;
  params.scale = static_cast<float>(spec().embedding_scale);
  KVASIR_RETURN_IF_ERROR(kernels::Embedding(stream, params, workspace));
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kSum);
  return parts_.collective->AllReduceSum(stream, x,
                                         batch.num_tokens * spec().hidden_size,
                                         activations_.dtype, workspace);
}

absl::Status Decoder::Logits(Stream& stream,
                             kernels::DevicePtr<const float> normed,
                             int64_t num_rows, const plan::IdRange& ids,
                             kernels::DevicePtr<float> logits,
                             Workspace& workspace) const {
  const plan::TpShard shard = parts_.collective->shard();
  // An inlined vector, because a step must not allocate from the heap.
  absl::InlinedVector<int64_t, kInlineRanks + 1> first_columns;
  for (int64_t rank = 0; rank < shard.size; ++rank) {
    const plan::IdRange all =
        plan::IdsOfRank({rank, shard.size}, spec().vocab_size);
    first_columns.push_back(
        std::clamp(all.first - ids.first, int64_t{0}, ids.count));
  }
  first_columns.push_back(ids.count);
  const int64_t begin = first_columns[static_cast<size_t>(shard.rank)];
  const int64_t count =
      first_columns[static_cast<size_t>(shard.rank) + 1] - begin;
  if (count > 0) {
    const StepPartScope part_of_step(parts_.profile, stream, StepPart::kHead);
    kernels::MatmulParams params;
    params.x = normed;
    params.x_row_stride = spec().hidden_size;
    params.num_rows = num_rows;
    params.weight = parts_.weights->head.Columns(
        ids.first + begin - parts_.weights->shard.ids.first, count);
    params.y = logits + begin;
    params.y_row_stride = ids.count;
    params.dtype = activations_.dtype;
    KVASIR_RETURN_IF_ERROR(kernels::Matmul(stream, params, workspace));
  }
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kSum);
  KVASIR_RETURN_IF_ERROR(parts_.collective->AllGather(
      stream, logits, num_rows, first_columns, workspace));
  if (spec().logit_cap == 0) return absl::OkStatus();
  return kernels::Activation(
      stream,
      {logits, logits, num_rows, ids.count, kernels::ActivationKind::kSoftCap,
       kernels::DType::kF32, static_cast<float>(spec().logit_cap)},
      workspace);
}

absl::Status Decoder::Run(Stream& stream, const TokenBatch& batch,
                          HiddenStates* out, Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  const int64_t t = batch.num_tokens;
  const int64_t padded = batch.padded_tokens * m;
  out->x = activations_.Take(workspace, padded);
  out->delta = activations_.Take(workspace, padded);
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> normed = activations_.Take(workspace, padded);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Embed(stream, batch, out->x, workspace));

  for (int64_t layer = 0; layer < spec().num_layers(); ++layer) {
    const LayerWeights& weights =
        parts_.weights->layers[static_cast<size_t>(layer)];
    // The method Input also adds the previous layer's output to out->x.
    kernels::DevicePtr<const float> input = normed;
    KVASIR_RETURN_IF_ERROR(
        Input(stream,
              {out->x, layer == 0 ? kernels::DevicePtr<float>() : out->delta,
               weights.input_norm, weights.input_norm_bias, normed, t},
              &input, workspace));
    KVASIR_RETURN_IF_ERROR(
        Attention(stream, batch, layer, input, out->delta, workspace));
    KVASIR_RETURN_IF_ERROR(NormOutput(stream, weights.attention_output_norm, t,
                                      out->delta, workspace));
    const bool parallel = spec().parallel_residual;
    KVASIR_RETURN_IF_ERROR(
        Input(stream,
              {out->x, parallel ? kernels::DevicePtr<float>() : out->delta,
               weights.post_norm, weights.post_norm_bias, normed, t},
              &input, workspace));
    if (parallel) {
      KVASIR_RETURN_IF_ERROR(
          AddMlp(stream, batch, layer, input, out->delta, workspace));
    } else {
      KVASIR_RETURN_IF_ERROR(
          Mlp(stream, batch, layer, input, out->delta, workspace));
      KVASIR_RETURN_IF_ERROR(NormOutput(stream, weights.mlp_output_norm, t,
                                        out->delta, workspace));
    }
  }
  // Each rank has marked tokens with latents that are not finite. Sum the marks
  // over ranks, so that all ranks fail the same sequences.
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kSum);
  return parts_.collective->AllReduceSum(stream, batch.not_finite, t,
                                         kernels::DType::kF32, workspace);
}

absl::Status Decoder::Input(Stream& stream, kernels::NormParams norm,
                            kernels::DevicePtr<const float>* input,
                            Workspace& workspace) const {
  if (!spec().norm_inputs) {
    *input = norm.x;
    norm.out = nullptr;  // adds the residual and does not normalize
    if (!norm.residual) return absl::OkStatus();
  }
  return Norm(stream, norm, workspace);
}

absl::Status Decoder::NormOutput(Stream& stream,
                                 kernels::DevicePtr<const float> weight,
                                 int64_t num_tokens,
                                 kernels::DevicePtr<float> x,
                                 Workspace& workspace) const {
  if (!spec().norm_outputs) return absl::OkStatus();
  return Norm(stream, {x, nullptr, weight, nullptr, x, num_tokens}, workspace);
}

absl::Status Decoder::Norm(Stream& stream, kernels::NormParams norm,
                           Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kNorms);
  norm.columns = spec().hidden_size;
  norm.kind = spec().norm == model::NormKind::kRmsNorm
                  ? kernels::NormKind::kRms
                  : kernels::NormKind::kLayer;
  norm.eps = static_cast<float>(spec().norm_eps);
  norm.dtype = activations_.dtype;
  return kernels::Norm(stream, norm, workspace);
}

absl::Status Decoder::Attention(Stream& stream, const TokenBatch& batch,
                                int64_t layer,
                                kernels::DevicePtr<const float> normed,
                                kernels::DevicePtr<float> out,
                                Workspace& workspace) const {
  const auto index = static_cast<size_t>(layer);
  const KvArenas::Layer& arena = parts_.arenas->layers()[index];
  const auto page_group = static_cast<size_t>(arena.page_group);
  const auto ring_slots = [&batch](int64_t ring) {
    return ring < 0 ? kernels::DevicePtr<const int64_t>()
                    : batch.ring_slots[static_cast<size_t>(ring)];
  };
  KVASIR_RETURN_IF_ERROR(
      attention_[index].Run(stream,
                            {.normed = normed,
                             .num_tokens = batch.num_tokens,
                             .padded_tokens = batch.padded_tokens,
                             .num_sequences = batch.num_sequences,
                             .rows = batch.rows,
                             .positions = batch.positions,
                             .group = batch.groups[page_group],
                             .key_ring_slots = ring_slots(arena.key_ring),
                             .value_ring_slots = ring_slots(arena.value_ring),
                             .not_finite = batch.not_finite,
                             .steps = steps_},
                            out, workspace));
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kSum);
  return parts_.collective->AllReduceSum(stream, out,
                                         batch.num_tokens * spec().hidden_size,
                                         activations_.dtype, workspace);
}

absl::Status Decoder::Mlp(Stream& stream, const TokenBatch& batch,
                          int64_t layer, kernels::DevicePtr<const float> normed,
                          kernels::DevicePtr<float> out,
                          Workspace& workspace) const {
  const auto index = static_cast<size_t>(layer);
  const LayerWeights& weights = parts_.weights->layers[index];
  {
    const StepPartScope part_of_step(parts_.profile, stream, StepPart::kMlp);
    KVASIR_RETURN_IF_ERROR(
        spec().layers[index].experts
            ? Experts(stream, batch, weights.experts, normed, out, workspace)
            : DenseMlp(stream, batch, weights, normed, out, workspace));
  }
  const StepPartScope summing(parts_.profile, stream, StepPart::kSum);
  return parts_.collective->AllReduceSum(stream, out,
                                         batch.num_tokens * spec().hidden_size,
                                         activations_.dtype, workspace);
}

absl::Status Decoder::DenseMlp(Stream& stream, const TokenBatch& batch,
                               const LayerWeights& weights,
                               kernels::DevicePtr<const float> normed,
                               kernels::DevicePtr<float> out,
                               Workspace& workspace) const {
  const int64_t features = parts_.weights->shard.num_features;
  const int64_t num_tokens = batch.num_tokens;
  Workspace::Scope scope(&workspace);
  const bool gated_mlp = model::IsGated(spec().mlp);
  const kernels::DevicePtr<float> gate_up =
      activations_.Take(workspace, batch.padded_tokens * weights.gate_up.n);
  // An MLP without gate applies its activation in place.
  const kernels::DevicePtr<float> gated =
      gated_mlp ? activations_.Take(workspace, batch.padded_tokens * features)
                : gate_up;
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(MatmulDense(
      stream, {normed, num_tokens, weights.gate_up_bias, activations_.dtype},
      weights.gate_up, gate_up, workspace));
  if (gated_mlp) {
    KVASIR_RETURN_IF_ERROR(kernels::SiluMul(
        stream,
        {gate_up, gated, num_tokens, features, activations_.dtype,
         spec().mlp == model::MlpKind::kGatedSilu
             ? kernels::GateKind::kSilu
             : kernels::GateKind::kGeluTanh},
        workspace));
  } else {
    KVASIR_RETURN_IF_ERROR(
        kernels::Activation(stream,
                            {gate_up, gated, num_tokens, features,
                             ActivationOf(spec().mlp), activations_.dtype},
                            workspace));
  }
  return MatmulDense(stream,
                     {gated, num_tokens, weights.down_bias, activations_.dtype},
                     weights.down, out, workspace);
}

absl::Status Decoder::Experts(Stream& stream, const TokenBatch& batch,
                              const ExpertWeights& weights,
                              kernels::DevicePtr<const float> normed,
                              kernels::DevicePtr<float> out,
                              Workspace& workspace) const {
  const model::ExpertsSpec& experts = spec().experts;
  const int64_t m = spec().hidden_size;
  const int64_t features = parts_.weights->shard.num_expert_features;
  const int64_t rows = batch.num_tokens * experts.top_k;
  const int64_t padded_rows = batch.padded_tokens * experts.top_k;
  Workspace::Scope scope(&workspace);
  const auto logits =
      workspace.Take<float>(batch.padded_tokens * experts.count);
  kernels::RouteParams route;
  route.logits = logits;
  route.num_tokens = batch.num_tokens;
  route.num_experts = experts.count;
  route.top_k = experts.top_k;
  route.normalize = experts.normalize;
  route.experts = workspace.Take<int32_t>(padded_rows);
  route.weights = workspace.Take<float>(padded_rows);
  route.places = workspace.Take<int32_t>(padded_rows);
  route.tokens = workspace.Take<int32_t>(padded_rows);
  route.first_rows = workspace.Take<int32_t>(experts.count + 1);
  route.load = parts_.expert_load;
  // The rows of the tokens, sorted by expert; later the experts' results.
  const kernels::DevicePtr<float> sorted =
      activations_.Take(workspace, padded_rows * m);
  const kernels::DevicePtr<float> gate_up =
      activations_.Take(workspace, padded_rows * weights.gate_up.n);
  const kernels::DevicePtr<float> gated =
      activations_.Take(workspace, padded_rows * features);
  KVASIR_RETURN_IF_ERROR(workspace.status());

  kernels::MatmulParams router;
  router.x = normed;
  router.x_row_stride = m;
  router.num_rows = batch.num_tokens;
  router.weight = weights.router;
  router.y = logits;
  router.y_row_stride = experts.count;
  router.dtype = activations_.dtype;
  KVASIR_RETURN_IF_ERROR(kernels::Matmul(stream, router, workspace));
  KVASIR_RETURN_IF_ERROR(kernels::Route(stream, route, workspace));

  kernels::GatherRowsParams gather;
  gather.x = normed;
  gather.x_row_stride = m;
  gather.rows = route.tokens;
  gather.out = sorted;
  gather.out_row_stride = m;
  gather.num_rows = rows;
  gather.columns = m;
  gather.dtype = activations_.dtype;
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(stream, gather, workspace));
  const auto multiply = [&](const kernels::PackedMatrix& weight,
                            kernels::DevicePtr<const float> x,
                            kernels::DevicePtr<float> y) {
    kernels::GroupedMatmulParams product;
    product.x = x;
    product.x_row_stride = weight.k;
    product.num_rows = rows;
    product.first_rows = route.first_rows;
    product.num_groups = experts.count;
    product.weight = weight;
    product.y = y;
    product.y_row_stride = weight.n;
    product.dtype = activations_.dtype;
    return kernels::GroupedMatmul(stream, product, workspace);
  };
  KVASIR_RETURN_IF_ERROR(multiply(weights.gate_up, sorted, gate_up));
  KVASIR_RETURN_IF_ERROR(kernels::SiluMul(
      stream, {gate_up, gated, rows, features, activations_.dtype}, workspace));
  KVASIR_RETURN_IF_ERROR(multiply(weights.down, gated, sorted));
  return kernels::MixExperts(
      stream,
      {sorted, route.weights, route.places, out, batch.num_tokens,
       experts.top_k, m, activations_.dtype},
      workspace);
}

absl::Status Decoder::AddMlp(Stream& stream, const TokenBatch& batch,
                             int64_t layer,
                             kernels::DevicePtr<const float> normed,
                             kernels::DevicePtr<float> sum,
                             Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> added =
      activations_.Take(workspace, batch.padded_tokens * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Mlp(stream, batch, layer, normed, added, workspace));
  kernels::AddRowsParams add;
  add.y = sum;
  add.y_row_stride = m;
  add.x = added;
  add.x_row_stride = m;
  add.num_rows = batch.num_tokens;
  add.columns = m;
  add.dtype = activations_.dtype;
  return kernels::AddRows(stream, add, workspace);
}

absl::Status Decoder::FinalNorm(Stream& stream, const HiddenStates& hidden,
                                kernels::DevicePtr<const int32_t> rows,
                                int64_t num_rows, kernels::DevicePtr<float> out,
                                Workspace& workspace) const {
  const int64_t m = spec().hidden_size;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<float> delta =
      activations_.Take(workspace, num_rows * m);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  kernels::GatherRowsParams gather;
  gather.x_row_stride = m;
  gather.rows = rows;
  gather.out_row_stride = m;
  gather.num_rows = num_rows;
  gather.columns = m;
  gather.dtype = activations_.dtype;
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
