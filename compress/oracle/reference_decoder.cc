#include "compress/oracle/reference_decoder.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/oracle/outer_forward.h"
#include "compress/runtime/torch_status.h"
#include "model/shapes/attention_shape.h"

namespace kvasir::compress {
namespace {

void MoveTo(const DecoderOptions& options, at::Tensor& tensor) {
  tensor = tensor.to(options.device, at::kFloat);
}

}  // namespace

absl::StatusOr<ReferenceDecoder> ReferenceDecoder::Load(
    const model::Checkpoint& checkpoint,
    const std::optional<kvasir::v1::KvPlan>& plan,
    const DecoderOptions& options) {
  Parts parts;
  parts.spec = checkpoint.spec();
  parts.plan = plan;
  if (plan.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(
        const plan::ResolvedPlan resolved,
        plan::ResolvePlan(*plan, model::AttentionShapeOf(parts.spec)));
    KVASIR_RETURN_IF_ERROR(checkpoint.CheckTensors(
        resolved, /*with_ranges=*/!options.without_ranges));
  }
  KVASIR_ASSIGN_OR_RETURN(parts.outer, LoadOuterTensors(checkpoint));
  for (int64_t layer = 0; layer < parts.spec.num_layers(); ++layer) {
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, LoadLayer(checkpoint, layer));
    // Converts layer by layer, so that only one layer at a time has a second
    // copy in float32.
    KVASIR_RETURN_IF_ERROR(CatchTorch([&] {
      const at::NoGradGuard no_grad;
      for (auto& [name, tensor] : tensors) MoveTo(options, tensor);
      return absl::OkStatus();
    }));
    parts.layers.push_back(std::move(tensors));
  }
  return FromTensors(std::move(parts), options);
}

absl::StatusOr<ReferenceDecoder> ReferenceDecoder::FromTensors(
    Parts parts, const DecoderOptions& options) {
  const model::DecoderSpec& spec = parts.spec;
  if (parts.plan.has_value()) {
    KVASIR_RETURN_IF_ERROR(
        plan::ValidatePlan(*parts.plan, model::AttentionShapeOf(spec)));
  }
  if (static_cast<int64_t>(parts.layers.size()) != spec.num_layers()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the model has ", spec.num_layers(),
        " layers, but tensors are given for ", parts.layers.size(), " layers"));
  }
  return CatchTorch([&]() -> absl::StatusOr<ReferenceDecoder> {
    const at::NoGradGuard no_grad;
    ReferenceDecoder decoder;
    decoder.options_ = options;
    for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
      const kvasir::v1::LayerPlan* plan =
          parts.plan.has_value() ? &parts.plan->layers(static_cast<int>(layer))
                                 : nullptr;
      KVASIR_ASSIGN_OR_RETURN(
          LayerProgram program,
          MakeLayerProgram(spec, plan, layer, options.device));
      TensorMap& tensors = parts.layers[static_cast<size_t>(layer)];
      KVASIR_RETURN_IF_ERROR(CheckLayerTensors(
          program, tensors,
          options.without_ranges ? Ranges::kNotYet : Ranges::kRequired));
      for (auto& [name, tensor] : tensors) MoveTo(options, tensor);
      decoder.programs_.push_back(std::move(program));
    }
    OuterTensors& outer = parts.outer;
    const bool tied = outer.head.is_same(outer.embedding);
    for (at::Tensor* tensor : {&outer.embedding, &outer.positions,
                               &outer.final_norm, &outer.final_norm_bias}) {
      if (tensor->defined()) MoveTo(options, *tensor);
    }
    if (tied) {
      outer.head = outer.embedding;  // shares memory with the embedding
    } else {
      MoveTo(options, outer.head);
    }
    decoder.spec_ = std::move(parts.spec);
    decoder.plan_ = std::move(parts.plan);
    decoder.outer_ = std::move(parts.outer);
    decoder.layers_ = std::move(parts.layers);
    return decoder;
  });
}

Rotation ReferenceDecoder::RotationOf(int64_t num_positions,
                                      int64_t layer) const {
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device());
  // These rotations are not kept, because another layer or a longer text may
  // need other frequencies.
  if (spec_.window_rope.has_value() || !spec_.rope.long_frequencies.empty()) {
    return MakeRotation(spec_.rope_of(layer), num_positions, options);
  }
  const std::lock_guard lock(turned_->mutex);
  if (num_positions > turned_->positions) {
    turned_->rotation = MakeRotation(spec_.rope, num_positions, options);
    turned_->positions = num_positions;
  }
  return turned_->rotation;
}

absl::StatusOr<at::Tensor> ReferenceDecoder::LastHidden(
    const at::Tensor& ids, const LayerHooks& hooks) const {
  if (ids.dim() != 2 || ids.size(1) > spec_.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token ids must have the shape [B, T] with T at most ",
        spec_.max_position_embeddings, ", but have ", ids.dim(), " dims",
        ids.dim() == 2 ? absl::StrCat(" with T = ", ids.size(1)) : ""));
  }
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    at::Tensor hidden = EmbedTokens(spec_, outer_, ids.to(device()));
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Rotation rotation =
          RotationOf(ids.size(1), static_cast<int64_t>(i));
      KVASIR_ASSIGN_OR_RETURN(hidden, LayerForward(programs_[i], layers_[i],
                                                   rotation, hidden, hooks));
    }
    return hidden;
  });
}

absl::StatusOr<at::Tensor> ReferenceDecoder::HeadLogits(
    const at::Tensor& hidden) const {
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    return FinalLogits(spec_, outer_, hidden);
  });
}

absl::StatusOr<at::Tensor> ReferenceDecoder::Logits(
    const at::Tensor& ids, const LayerHooks& hooks) const {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor hidden, LastHidden(ids, hooks));
  return HeadLogits(hidden);
}

}  // namespace kvasir::compress
