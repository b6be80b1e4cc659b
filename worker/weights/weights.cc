#include "worker/weights/weights.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/tp_dealt.h"
#include "plan/tp_size.h"
#include "worker/weights/attention_weights.h"
#include "worker/weights/weight_jobs.h"

namespace kvasir::worker {
namespace {

static_assert(plan::kIdsPerPanel == kernels::kPanelColumns);

// Loads only the rows `take` of a tensor.
TensorRows Slice(std::string tensor, int64_t columns, RowTake take) {
  return {std::move(tensor), columns, {take}};
}

// Adds the jobs that load a model, and allocates their memory.
class Planner {
 public:
  // `weights->plan` must be set.
  Planner(const model::DecoderSpec& spec, WeightJobs* jobs,
          ModelWeights* weights)
      : spec_(spec),
        shard_(weights->plan->resolved->shard),
        jobs_(jobs),
        weights_(weights) {}

  absl::Status PlanAll() {
    KVASIR_ASSIGN_OR_RETURN(weights_->shard, ShardSizes::Create(spec_, shard_));
    for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
      weights_->layers.emplace_back().attention =
          &weights_->plan->program(layer);
    }
    for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
      KVASIR_RETURN_IF_ERROR(PlanLayer(layer));
    }
    const int64_t m = spec_.hidden_size;
    KVASIR_RETURN_IF_ERROR(
        Vector(std::string(model::kFinalNormName), &weights_->final_norm));
    if (HasNormBias()) {
      KVASIR_RETURN_IF_ERROR(Vector(std::string(model::kFinalNormBiasName),
                                    &weights_->final_norm_bias));
    }
    if (spec_.learned_positions) {
      KVASIR_RETURN_IF_ERROR(Positions());
    }
    const plan::IdRange& ids = weights_->shard.ids;
    const std::string embedding(model::kEmbeddingName);
    const std::string head =
        spec_.tied_head ? embedding : std::string(model::kHeadName);
    KVASIR_RETURN_IF_ERROR(jobs_->Matrix(
        {Slice(head, m, {ids.first, ids.count, 0})}, m, &weights_->head));
    if (spec_.tied_head) return absl::OkStatus();
    return jobs_->Table(embedding, ids.first, ids.count, m,
                        &weights_->embedding_dtype, &weights_->embedding);
  }

 private:
  absl::Status PlanLayer(int64_t index) {
    LayerWeights& layer = weights_->layers[static_cast<size_t>(index)];
    const auto name = [index](const char* part) {
      return model::LayerTensorName(index, part);
    };
    KVASIR_RETURN_IF_ERROR(
        Vector(name("input_layernorm.weight"), &layer.input_norm));
    KVASIR_RETURN_IF_ERROR(
        Vector(name("post_attention_layernorm.weight"), &layer.post_norm));
    if (HasNormBias()) {
      KVASIR_RETURN_IF_ERROR(
          Vector(name("input_layernorm.bias"), &layer.input_norm_bias));
      KVASIR_RETURN_IF_ERROR(
          Vector(name("post_attention_layernorm.bias"), &layer.post_norm_bias));
    }
    if (spec_.qk_norm != model::QkNorm::kNone) {
      KVASIR_RETURN_IF_ERROR(Vector(name("self_attn.q_norm.weight"),
                                    spec_.head_dim, &layer.q_norm));
      KVASIR_RETURN_IF_ERROR(Vector(name("self_attn.k_norm.weight"),
                                    spec_.head_dim, &layer.k_norm));
    }
    KVASIR_RETURN_IF_ERROR(PlanAttention(
        {.spec = &spec_, .layer = index, .first_rank = shard_.rank == 0}, jobs_,
        &layer));
    return spec_.layers[static_cast<size_t>(index)].experts
               ? PlanExperts(index, &layer.experts)
               : PlanMlp(name("mlp."), &layer);
  }

  absl::Status PlanExperts(int64_t index, ExpertWeights* experts) {
    const ShardSizes& shard = weights_->shard;
    const int64_t m = spec_.hidden_size;
    const int64_t features = shard.num_expert_features;
    const int64_t count = spec_.experts.count;
    KVASIR_RETURN_IF_ERROR(
        jobs_->Matrix({Slice(model::LayerTensorName(index, model::kRouterName),
                             m, {0, count, 0})},
                      m, &experts->router));
    std::vector<std::vector<TensorRows>> gate_up;
    std::vector<std::vector<TensorRows>> down;
    for (int64_t expert = 0; expert < count; ++expert) {
      const std::string prefix =
          model::LayerTensorName(index, model::ExpertModule(expert));
      const RowTake gate{shard.first_expert_feature, features, 0};
      const RowTake up{shard.first_expert_feature, features, features};
      gate_up.push_back({Slice(prefix + "gate_proj.weight", m, gate),
                         Slice(prefix + "up_proj.weight", m, up)});
      TensorRows rows = Slice(prefix + "down_proj.weight",
                              spec_.experts.intermediate_size, {0, m, 0});
      rows.first_column = shard.first_expert_feature;
      down.push_back({std::move(rows)});
    }
    KVASIR_RETURN_IF_ERROR(
        jobs_->Matrices(std::move(gate_up), m, &experts->gate_up));
    return jobs_->Matrices(std::move(down), features, &experts->down);
  }

  absl::Status PlanMlp(const std::string& prefix, LayerWeights* layer) {
    const ShardSizes& shard = weights_->shard;
    const int64_t m = spec_.hidden_size;
    std::vector<TensorRows> in;
    std::vector<TensorRows> bias;
    int64_t columns = 0;
    const auto add = [&](const char* part) {
      const RowTake take{shard.first_feature, shard.num_features, columns};
      in.push_back(Slice(absl::StrCat(prefix, part, ".weight"), m, take));
      bias.push_back(Slice(absl::StrCat(prefix, part, ".bias"), 1, take));
      columns += shard.num_features;
    };
    if (model::IsGated(spec_.mlp)) add("gate_proj");
    add("up_proj");
    KVASIR_RETURN_IF_ERROR(jobs_->Matrix(std::move(in), m, &layer->gate_up));
    TensorRows down =
        Slice(prefix + "down_proj.weight", spec_.intermediate_size, {0, m, 0});
    down.first_column = shard.first_feature;
    KVASIR_RETURN_IF_ERROR(
        jobs_->Matrix({std::move(down)}, shard.num_features, &layer->down));
    if (!spec_.mlp_bias) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(
        jobs_->Floats(std::move(bias), columns, &layer->gate_up_bias));
    return SummedBias(prefix + "down_proj.bias", &layer->down_bias);
  }

  bool HasNormBias() const { return spec_.norm == model::NormKind::kLayerNorm; }

  absl::Status Vector(std::string tensor, int64_t size,
                      kernels::DevicePtr<const float>* out) {
    return jobs_->Floats({Slice(std::move(tensor), 1, {0, size, 0})}, size,
                         out);
  }
  // Loads a vector of the model's hidden size.
  absl::Status Vector(std::string tensor,
                      kernels::DevicePtr<const float>* out) {
    return Vector(std::move(tensor), spec_.hidden_size, out);
  }

  absl::Status Positions() {
    const std::string tensor(model::kPositionsName);
    const int64_t m = spec_.hidden_size;
    if (shard_.rank == 0) {
      return jobs_->Table(tensor, 0, spec_.max_position_embeddings, m,
                          &weights_->positions_dtype, &weights_->positions);
    }
    jobs_->ReadOnly(tensor, m);
    return absl::OkStatus();
  }

  // Loads the bias of an output that is summed over the ranks. Only rank 0 adds
  // the bias, so that it counts once. The other ranks read it only for the
  // fingerprint of the weights.
  absl::Status SummedBias(const std::string& tensor,
                          kernels::DevicePtr<const float>* out) {
    if (shard_.rank == 0) return Vector(tensor, out);
    jobs_->ReadOnly(tensor, 1);
    return absl::OkStatus();
  }

  const model::DecoderSpec& spec_;
  const plan::TpShard shard_;
  WeightJobs* const jobs_;
  ModelWeights* const weights_;
};

}  // namespace

absl::StatusOr<ShardSizes> ShardSizes::Create(const model::DecoderSpec& spec,
                                              plan::TpShard shard) {
  KVASIR_RETURN_IF_ERROR(plan::CheckTpSize(model::TpDealtOf(spec), shard.size));
  ShardSizes sizes;
  KVASIR_ASSIGN_OR_RETURN(sizes.kv_heads,
                          plan::KvHeadsOfRank(shard, spec.num_kv_heads));
  sizes.num_q_heads = spec.num_heads / shard.size;
  sizes.first_q_head = shard.rank * sizes.num_q_heads;
  sizes.num_features = spec.intermediate_size / shard.size;
  sizes.first_feature = shard.rank * sizes.num_features;
  sizes.num_expert_features = spec.experts.intermediate_size / shard.size;
  sizes.first_expert_feature = shard.rank * sizes.num_expert_features;
  sizes.ids = plan::IdsOfRank(shard, spec.vocab_size);
  return sizes;
}

absl::StatusOr<int64_t> CountWeightBytes(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         const MatrixFormat& format) {
  ModelWeights weights;
  weights.plan = std::move(plan);
  WeightJobs jobs(source, format, weights.plan->resolved->shard);
  KVASIR_RETURN_IF_ERROR(Planner(spec, &jobs, &weights).PlanAll());
  return jobs.bytes();
}

absl::StatusOr<int64_t> CountReadBytes(const model::DecoderSpec& spec,
                                       std::shared_ptr<const ServedPlan> plan,
                                       WeightSource* source) {
  ModelWeights weights;
  weights.plan = std::move(plan);
  WeightJobs jobs(source, MatrixFormat(), weights.plan->resolved->shard);
  KVASIR_RETURN_IF_ERROR(Planner(spec, &jobs, &weights).PlanAll());
  return jobs.ReadBytes();
}

absl::StatusOr<ModelWeights> WeightsWithoutMemory(
    const model::DecoderSpec& spec, std::shared_ptr<const ServedPlan> plan,
    WeightSource* source, const MatrixFormat& format) {
  ModelWeights weights;
  weights.plan = std::move(plan);
  WeightJobs jobs(source, format, weights.plan->resolved->shard);
  KVASIR_RETURN_IF_ERROR(Planner(spec, &jobs, &weights).PlanAll());
  weights.matrix_bytes = jobs.matrix_bytes();
  return weights;
}

absl::StatusOr<ModelWeights> LoadWeights(const model::DecoderSpec& spec,
                                         std::shared_ptr<const ServedPlan> plan,
                                         WeightSource* source,
                                         kernels::Device* device,
                                         const LoadOptions& options) {
  ModelWeights weights;
  weights.plan = std::move(plan);
  WeightJobs jobs(source, device, &weights.buffers,
                  weights.plan->resolved->shard);
  KVASIR_RETURN_IF_ERROR(Planner(spec, &jobs, &weights).PlanAll());
  weights.matrix_bytes = jobs.matrix_bytes();
  weights.rounded_bytes = jobs.rounded_bytes();
  KVASIR_ASSIGN_OR_RETURN(weights.read_bytes, jobs.ReadBytes());
  KVASIR_RETURN_IF_ERROR(
      jobs.Run({options.pool, options.read_buffer_bytes,
                options.max_staged_bytes, options.progress}));
  weights.weight_tiles = source->WeightTiles();
  return weights;
}

}  // namespace kvasir::worker
