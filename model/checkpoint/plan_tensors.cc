#include "model/checkpoint/plan_tensors.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

// Lists all tensors of a model. `attention` is a function that returns the
// attention tensors of a layer.
template <typename Attention>
std::vector<RequiredTensor> ModelTensors(const DecoderSpec& spec,
                                         const Attention& attention) {
  const int64_t m = spec.hidden_size;
  std::vector<RequiredTensor> tensors;
  tensors.push_back({std::string(kEmbeddingName), {spec.vocab_size, m}});
  if (spec.learned_positions) {
    tensors.push_back(
        {std::string(kPositionsName), {spec.max_position_embeddings, m}});
  }
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    const std::vector<RequiredTensor> beside = NormAndMlpTensors(spec, layer);
    for (const auto* list : {&attention(layer), &beside}) {
      for (const RequiredTensor& tensor : *list) {
        tensors.push_back({LayerTensorName(layer, tensor.name), tensor.shape,
                           tensor.f32_only});
      }
    }
  }
  tensors.push_back({std::string(kFinalNormName), {m}});
  if (spec.norm == NormKind::kLayerNorm) {
    tensors.push_back({std::string(kFinalNormBiasName), {m}});
  }
  if (!spec.tied_head) {
    tensors.push_back({std::string(kHeadName), {spec.vocab_size, m}});
  }
  return tensors;
}

}  // namespace

std::string ExpertModule(int64_t expert) {
  return absl::StrCat("mlp.experts.", expert, ".");
}

std::vector<RequiredTensor> NormAndMlpTensors(const DecoderSpec& spec,
                                              int64_t layer) {
  const int64_t m = spec.hidden_size;
  std::vector<RequiredTensor> tensors;
  const auto add = [&](const std::string& module, std::vector<int64_t> shape,
                       bool bias) {
    if (bias) tensors.push_back({absl::StrCat(module, ".bias"), {shape[0]}});
    tensors.push_back({absl::StrCat(module, ".weight"), std::move(shape)});
  };
  const bool norm_bias = spec.norm == NormKind::kLayerNorm;
  if (spec.norm_inputs) {
    add("input_layernorm", {m}, norm_bias);
    add("post_attention_layernorm", {m}, norm_bias);
  }
  if (spec.norm_outputs) {
    add("self_attn.output_norm", {m}, norm_bias);
    add("mlp.output_norm", {m}, norm_bias);
  }
  if (spec.qk_norm != QkNorm::kNone) {
    const bool all = spec.qk_norm == QkNorm::kAllHeads;
    add("self_attn.q_norm", {(all ? spec.num_heads : 1) * spec.head_dim},
        false);
    add("self_attn.k_norm", {(all ? spec.num_kv_heads : 1) * spec.head_dim},
        false);
  }
  const auto add_mlp = [&](const std::string& prefix, int64_t f) {
    if (IsGated(spec.mlp)) {
      add(prefix + "gate_proj", {f, m}, spec.mlp_bias);
    }
    add(prefix + "up_proj", {f, m}, spec.mlp_bias);
    add(prefix + "down_proj", {m, f}, spec.mlp_bias);
  };
  if (!spec.layers[static_cast<size_t>(layer)].experts) {
    add_mlp("mlp.", spec.intermediate_size);
    return tensors;
  }
  tensors.push_back({kRouterName, {spec.experts.count, m}});
  for (int64_t expert = 0; expert < spec.experts.count; ++expert) {
    add_mlp(ExpertModule(expert), spec.experts.intermediate_size);
  }
  return tensors;
}

std::vector<RequiredTensor> RequiredTensors(const DecoderSpec& spec) {
  const std::vector<RequiredTensor> attention =
      plan::PlainAttentionTensors(AttentionShapeOf(spec));
  return ModelTensors(spec, [&](int64_t) -> const std::vector<RequiredTensor>& {
    return attention;
  });
}

absl::StatusOr<std::vector<RequiredTensor>> RequiredTensors(
    const DecoderSpec& spec, const plan::ResolvedPlan& plan) {
  if (plan.num_layers() != spec.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan's number of layers is ", plan.num_layers(),
                     ", but the model's is ", spec.num_layers()));
  }
  std::vector<std::vector<RequiredTensor>> attention(plan.attention.size());
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    auto& own = attention[static_cast<size_t>(plan.layer(layer).attention)];
    if (!own.empty()) continue;
    KVASIR_ASSIGN_OR_RETURN(
        plan::AttentionTensors tensors,
        plan::TensorsOf(plan.attention_of(layer), plan.shape, layer));
    own = std::move(tensors.tensors);
  }
  return ModelTensors(
      spec, [&](int64_t layer) -> const std::vector<RequiredTensor>& {
        return attention[static_cast<size_t>(plan.layer(layer).attention)];
      });
}

}  // namespace kvasir::model
