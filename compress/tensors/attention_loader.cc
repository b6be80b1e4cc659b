#include "compress/tensors/attention_loader.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {

absl::StatusOr<AttentionWeights> LoadAttention(
    const model::Checkpoint& checkpoint, int64_t layer) {
  const model::DecoderSpec& spec = checkpoint.spec();
  AttentionWeights weights;
  auto load = [&](const char* part, at::Tensor& into) -> absl::Status {
    const std::string name =
        model::LayerTensorName(layer, absl::StrCat("self_attn.", part));
    KVASIR_ASSIGN_OR_RETURN(into, LoadTensor(checkpoint, name));
    if (!at::isfinite(into).all().item<bool>()) {
      return absl::InvalidArgumentError(
          absl::StrCat(checkpoint.folder(), ": tensor ", name,
                       " has numbers that are not finite"));
    }
    return absl::OkStatus();
  };
  KVASIR_RETURN_IF_ERROR(load("q_proj.weight", weights.query));
  KVASIR_RETURN_IF_ERROR(load("k_proj.weight", weights.key));
  KVASIR_RETURN_IF_ERROR(load("v_proj.weight", weights.value));
  KVASIR_RETURN_IF_ERROR(load("o_proj.weight", weights.output));
  if (spec.qkv_bias) {
    KVASIR_RETURN_IF_ERROR(load("q_proj.bias", weights.query_bias));
    KVASIR_RETURN_IF_ERROR(load("k_proj.bias", weights.key_bias));
    KVASIR_RETURN_IF_ERROR(load("v_proj.bias", weights.value_bias));
  }
  if (spec.o_bias) {
    KVASIR_RETURN_IF_ERROR(load("o_proj.bias", weights.output_bias));
  }
  return weights;
}

}  // namespace kvasir::compress
