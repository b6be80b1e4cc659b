#include "compress/oracle/outer_forward.h"

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
  return (wide * scale).to(x.scalar_type()) * weight;
}

at::Tensor EmbedTokens(const OuterTensors& outer, const at::Tensor& ids) {
  const at::Tensor tokens = at::embedding(outer.embedding, ids);
  if (!outer.positions.defined()) return tokens;
  return tokens + outer.positions.slice(0, 0, ids.size(1));
}

at::Tensor FinalNorm(const model::DecoderSpec& spec, const OuterTensors& outer,
                     const at::Tensor& hidden) {
  return Normalize(spec, hidden, outer.final_norm, outer.final_norm_bias);
}

at::Tensor FinalLogits(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& hidden) {
  return at::linear(FinalNorm(spec, outer, hidden), outer.head);
}

}  // namespace kvasir::compress
