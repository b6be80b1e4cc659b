// Lists every tensor that a decoder needs: the attention tensors that a
// compression plan determines (plan/artifact_tensors.h), and all other tensors.
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

// Every tensor of a model with this plan. Only attention tensors depend on
// the plan.
// Errors: INVALID_ARGUMENT if the plan has another number of layers,
//   UNIMPLEMENTED if artifacts have no tensors for a part of the plan.
absl::StatusOr<std::vector<RequiredTensor>> RequiredTensors(
    const DecoderSpec& spec, const plan::ResolvedPlan& plan);

// The tensors of a layer that no plan changes: those of the MLP and of all
// norms, including the norms of queries and keys.
// "post_attention_layernorm" is the norm of the MLP's input, as in Llama.
// The names omit the prefix "model.layers.{l}.".
std::vector<RequiredTensor> NormAndMlpTensors(const DecoderSpec& spec,
                                              int64_t layer);

// Returns "mlp.experts.{e}.", with which the tensor names of expert e begin
// after "model.layers.{l}.".
std::string ExpertModule(int64_t expert);
// The name of the matrix that chooses a token's experts, [E, M].
inline constexpr char kRouterName[] = "mlp.gate.weight";

// The tensor names that the loader and the writers of checkpoints share.
inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
// The table of learned positions, [max_position_embeddings, M].
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
