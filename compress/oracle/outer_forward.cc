#include "compress/oracle/outer_forward.h"

#include "compress/oracle/attention_core.h"

namespace kvasir::compress {

at::Tensor Normalize(const model::DecoderSpec& spec, const at::Tensor& x,
                     const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor wide = x.to(at::kFloat);
  if (spec.norm == model::NormKind::kLayerNorm) {
    return at::layer_norm(wide, {wide.size(-1)}, weight, bias, spec.norm_eps)
        .to(x.scalar_type());
  }
  const at::Tensor scale =
      at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + spec.norm_eps);
  if (spec.norm_weight_offset != 0) {
    return (wide * scale * (weight + spec.norm_weight_offset))
        .to(x.scalar_type());
  }
  return (wide * scale).to(x.scalar_type()) * weight;
}

at::Tensor Activate(model::MlpKind kind, const at::Tensor& up,
                    const at::Tensor& gate) {
  switch (kind) {
    case model::MlpKind::kGatedSilu:
      return at::silu(gate) * up;
    case model::MlpKind::kGatedGeluTanh:
      return at::gelu(gate, "tanh") * up;
    case model::MlpKind::kGelu:
      return at::gelu(up);
    case model::MlpKind::kGeluTanh:
      return at::gelu(up, "tanh");
    case model::MlpKind::kRelu:
      break;
  }
  return at::relu(up);
}

at::Tensor EmbedTokens(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& ids) {
  at::Tensor tokens = at::embedding(outer.embedding, ids);
  if (spec.embedding_scale != 1) tokens = tokens * spec.embedding_scale;
  if (!outer.positions.defined()) return tokens;
  return tokens + outer.positions.slice(0, 0, ids.size(1));
}

at::Tensor FinalNorm(const model::DecoderSpec& spec, const OuterTensors& outer,
                     const at::Tensor& hidden) {
  return Normalize(spec, hidden, outer.final_norm, outer.final_norm_bias);
}

at::Tensor FinalLogits(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& hidden) {
  return SoftCap(at::linear(FinalNorm(spec, outer, hidden), outer.head),
                 spec.logit_cap);
}

}  // namespace kvasir::compress
