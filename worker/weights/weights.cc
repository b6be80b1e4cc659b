#include "worker/weights/weights.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/tp_dealt.h"
#include "plan/tp_size.h"
#include "worker/weights/attention_weights.h"
#include "worker/weights/smoothing.h"
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
    KVASIR_RETURN_IF_ERROR(Norm(std::string(model::kFinalNorm),
                                &weights_->final_norm,
                                &weights_->final_norm_bias));
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
    const auto norm = [&](const char* module,
                          kernels::DevicePtr<const float>* weight,
                          kernels::DevicePtr<const float>* bias) {
      return Norm(model::LayerTensorName(index, module), weight, bias);
    };
    if (spec_.norm_inputs) {
      KVASIR_RETURN_IF_ERROR(
          norm("input_layernorm", &layer.input_norm, &layer.input_norm_bias));
      KVASIR_RETURN_IF_ERROR(norm("post_attention_layernorm", &layer.post_norm,
                                  &layer.post_norm_bias));
    }
    if (spec_.norm_outputs) {
      KVASIR_RETURN_IF_ERROR(
          norm("self_attn.output_norm", &layer.attention_output_norm, nullptr));
      KVASIR_RETURN_IF_ERROR(
          norm("mlp.output_norm", &layer.mlp_output_norm, nullptr));
    }
    if (spec_.qk_norm == model::QkNorm::kHeads) {
      KVASIR_RETURN_IF_ERROR(QkNorms(index, &layer));
    } else if (spec_.qk_norm == model::QkNorm::kAllHeads) {
      KVASIR_RETURN_IF_ERROR(RmsWeight(name("self_attn.q_norm.weight"),
                                       spec_.num_heads * spec_.head_dim,
                                       &layer.q_norm));
      KVASIR_RETURN_IF_ERROR(RmsWeight(name("self_attn.k_norm.weight"),
                                       spec_.num_kv_heads * spec_.head_dim,
                                       &layer.k_norm));
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

  // Loads the norms of the queries and keys of each head, and smooths them if
  // the plan has no tensors that were computed from the keys.
  absl::Status QkNorms(int64_t index, LayerWeights* layer) {
    const int64_t d = spec_.head_dim;
    const AttentionProgram& program = weights_->plan->program(index);
    const bool smooths =
        !program.key[0].has_basis && !program.key[0].static_ranges;
    WeightJob job;
    std::vector<WeightMemory*> memory;
    for (const char* part :
         {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}) {
      WeightSink sink;
      sink.takes = {{0, d, 0}};
      const int64_t bytes = d * static_cast<int64_t>(sizeof(float));
      KVASIR_ASSIGN_OR_RETURN(sink.memory, jobs_->Allocate(bytes));
      job.bytes += bytes;
      memory.push_back(sink.memory);
      job.reads.push_back(
          {model::LayerTensorName(index, part), 1, {std::move(sink)}});
    }
    layer->q_norm = memory[0]->floats();
    layer->k_norm = memory[1]->floats();
    const model::RopeSpec& rope = spec_.rope_of(index);
    const bool rotates = spec_.layers[static_cast<size_t>(index)].rope;
    job.finish = [memory, d, smooths, pairing = rope.pairing,
                  rotary_dim = rotates ? rope.rotary_dim : 0,
                  offset = static_cast<float>(spec_.norm_weight_offset)] {
      const auto numbers = [d](const WeightMemory* norm) {
        return absl::MakeSpan(norm->host_floats(), static_cast<size_t>(d));
      };
      for (const WeightMemory* const norm : memory) {
        for (float& weight : numbers(norm)) weight += offset;
      }
      if (smooths) {
        SmoothQkNorms(pairing, rotary_dim, numbers(memory[0]),
                      numbers(memory[1]));
      }
      return absl::OkStatus();
    };
    jobs_->Add(std::move(job));
    return absl::OkStatus();
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

  // Loads the norm of a vector of the model's hidden size.
  absl::Status Norm(const std::string& module,
                    kernels::DevicePtr<const float>* weight,
                    kernels::DevicePtr<const float>* bias) {
    if (!HasNormBias()) {
      return RmsWeight(module + ".weight", spec_.hidden_size, weight);
    }
    KVASIR_RETURN_IF_ERROR(Vector(module + ".weight", weight));
    return Vector(module + ".bias", bias);
  }
  absl::Status RmsWeight(std::string tensor, int64_t size,
                         kernels::DevicePtr<const float>* out) {
    std::function<void(absl::Span<float>)> add_offset;
    if (spec_.norm_weight_offset != 0) {
      add_offset = [offset = static_cast<float>(spec_.norm_weight_offset)](
                       absl::Span<float> weights) {
        for (float& weight : weights) weight += offset;
      };
    }
    return jobs_->Floats({Slice(std::move(tensor), 1, {0, size, 0})}, size, out,
                         std::move(add_offset));
  }
  // Loads a vector of the model's hidden size.
  absl::Status Vector(std::string tensor,
                      kernels::DevicePtr<const float>* out) {
    const int64_t m = spec_.hidden_size;
    return jobs_->Floats({Slice(std::move(tensor), 1, {0, m, 0})}, m, out);
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
