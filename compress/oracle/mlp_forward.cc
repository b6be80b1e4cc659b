#include "compress/oracle/mlp_forward.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/oracle/outer_forward.h"
#include "model/checkpoint/plan_tensors.h"

namespace kvasir::compress {
namespace {

// Data shared by the functions of one MlpForward call.
struct MlpCall {
  const model::DecoderSpec& spec;
  int64_t layer;
  const TensorMap& tensors;

  absl::StatusOr<at::Tensor> Get(const std::string& name) const {
    const auto it = tensors.find(name);
    if (it == tensors.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", layer, ": there is no tensor ", name));
    }
    return it->second;
  }
  absl::StatusOr<at::Tensor> Project(const std::string& module,
                                     const at::Tensor& x) const {
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor weight, Get(module + ".weight"));
    if (!spec.mlp_bias) return at::linear(x, weight);
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor bias, Get(module + ".bias"));
    return at::linear(x, weight, bias);
  }
};

// Applies the MLP whose tensors begin with `prefix`.
absl::StatusOr<at::Tensor> GatedOrPlain(const MlpCall& call,
                                        const std::string& prefix,
                                        const at::Tensor& x) {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor up,
                          call.Project(prefix + "up_proj", x));
  at::Tensor gate;
  if (model::IsGated(call.spec.mlp)) {
    KVASIR_ASSIGN_OR_RETURN(gate, call.Project(prefix + "gate_proj", x));
  }
  return call.Project(prefix + "down_proj", Activate(call.spec.mlp, up, gate));
}

// Applies the experts to rows [T, M].
absl::StatusOr<at::Tensor> Experts(const MlpCall& call,
                                   const at::Tensor& rows) {
  const model::ExpertsSpec& experts = call.spec.experts;
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor router,
                          call.Get(model::kRouterName));
  const at::Tensor shares = at::linear(rows, router).to(at::kFloat).softmax(-1);
  auto [weights, chosen] = at::topk(shares, experts.top_k);
  if (experts.normalize) {
    weights = weights / weights.sum(-1, /*keepdim=*/true);
  }
  at::Tensor out = at::zeros_like(rows);
  for (int64_t expert = 0; expert < experts.count; ++expert) {
    // One row for each token that chose this expert: the token, and the index
    // of the expert among the top_k experts of the token.
    const at::Tensor places = (chosen == expert).nonzero();
    if (places.size(0) == 0) continue;
    const at::Tensor tokens = places.select(1, 0);
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor result,
                            GatedOrPlain(call, model::ExpertModule(expert),
                                         rows.index_select(0, tokens)));
    const at::Tensor weight =
        weights.index_select(0, tokens).gather(1, places.slice(1, 1, 2));
    out = out.index_add(0, tokens, result * weight.to(result.scalar_type()));
  }
  return out;
}

}  // namespace

absl::StatusOr<at::Tensor> MlpForward(const model::DecoderSpec& spec,
                                      int64_t layer, const TensorMap& tensors,
                                      const at::Tensor& x) {
  const MlpCall call{spec, layer, tensors};
  if (!spec.layers[static_cast<size_t>(layer)].experts) {
    return GatedOrPlain(call, "mlp.", x);
  }
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor out,
                          Experts(call, x.reshape({-1, x.size(-1)})));
  return out.view(x.sizes());
}

}  // namespace kvasir::compress
