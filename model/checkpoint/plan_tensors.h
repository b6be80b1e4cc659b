// Every tensor that a decoder needs: attention's tensors under a compression
// plan (plan/artifact_tensors.h), and all tensors that no plan changes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/decoder_spec.h"
#include "plan/artifact_tensors.h"
#include "plan/resolved_plan.h"

namespace kvasir::model {

using plan::LayerTensorName;
using plan::RequiredTensor;

// Every tensor of a model without compression.
std::vector<RequiredTensor> RequiredTensors(const DecoderSpec& spec);

// The tensors that a model needs under a plan. Only attention tensors differ.
// Errors: INVALID_ARGUMENT for a plan with another number of layers,
//   UNIMPLEMENTED for a part that the artifact has no tensors for.
absl::StatusOr<std::vector<RequiredTensor>> RequiredTensors(
    const DecoderSpec& spec, const plan::ResolvedPlan& plan);

// The tensors of a layer that no plan changes: those of the MLP and of all
// norms, including the norms of queries and keys.
// "post_attention_layernorm" is the norm of the MLP's input, as in Llama.
// The names omit the prefix "model.layers.{l}.".
std::vector<RequiredTensor> NormAndMlpTensors(const DecoderSpec& spec,
                                              int64_t layer);

// The module of a layer's expert, without the prefix "model.layers.{l}.":
// "mlp.experts.{e}.".
std::string ExpertModule(int64_t expert);
// The router of a layer with experts, [E, M].
inline constexpr char kRouterName[] = "mlp.gate.weight";

// The tensor names that the loader and the writers of checkpoints share.
inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
// Learned positions [max_position_embeddings, M].
inline constexpr std::string_view kPositionsName =
    "model.embed_positions.weight";
inline constexpr std::string_view kFinalNorm = "model.norm";
inline constexpr std::string_view kFinalNormName = "model.norm.weight";
inline constexpr std::string_view kFinalNormBiasName = "model.norm.bias";
inline constexpr std::string_view kHeadName = "lm_head.weight";

// Returns plan::PairDims for a model's RoPE.
inline std::vector<int64_t> PairDims(const RopeSpec& rope,
                                     std::span<const uint32_t> pairs) {
  return plan::PairDims(rope.pairing, rope.rotary_dim, pairs);
}

}  // namespace kvasir::model
