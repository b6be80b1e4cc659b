// Which tensors attention has under a compression plan: the names and shapes of
// docs/artifact.md, in one place for the loader, the writers and the engine.
//
// The plans given here were accepted by cache::ValidatePlan for the same model;
// whoever reads a plan from a file judges it first.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::model {

// A tensor that a decoder needs, under our name: Llama's own, in every family
// (family_tensors.h has those of the files).
struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
  // Ranges of codes: rounded ones would be other codes.
  bool f32_only = false;

  friend bool operator==(const RequiredTensor&,
                         const RequiredTensor&) = default;
};

// Every tensor of a full-rank model.
std::vector<RequiredTensor> RequiredTensors(const DecoderSpec& spec);

// The same under a plan; only attention tensors differ.
// Errors: INVALID_ARGUMENT for a plan of another number of layers or KV heads,
//   UNIMPLEMENTED for a part that the artifact has no tensors for.
absl::StatusOr<std::vector<RequiredTensor>> RequiredTensors(
    const DecoderSpec& spec, const kvasir::v1::KvPlan& plan);

// What a layer has beside attention, by names after "model.layers.{l}.".
std::vector<RequiredTensor> NormAndMlpTensors(const DecoderSpec& spec);

// Names, in one place for loader and writers.
std::string LayerTensorName(int64_t layer, std::string_view part);
inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
// Learned positions [max_position_embeddings, M].
inline constexpr std::string_view kPositionsName =
    "model.embed_positions.weight";
inline constexpr std::string_view kFinalNormName = "model.norm.weight";
inline constexpr std::string_view kFinalNormBiasName = "model.norm.bias";
inline constexpr std::string_view kHeadName = "lm_head.weight";

enum class KvSide { kKey, kValue };

// What a part's tensor names begin with, after "model.layers.{l}.":
// "self_attn.k_proj", or "self_attn.k_proj.part1" of a side of several parts.
std::string PartPrefix(KvSide side, int part, int num_parts);
// "up.3.weight", after a part's prefix and a point.
std::string LiftName(int64_t group);

// One latent of a part.
struct LatentTensors {
  std::vector<int64_t> heads;  // KV heads that share it, ascending
  // Rows that make it: R', 2n or 2C; D of a full space without a basis.
  int64_t channels = 0;
  // Dims of each of its heads that it stands for.
  int64_t head_dims = 0;
};

// One part of a layer's key or value.
struct PartTensors {
  KvSide side = KvSide::kKey;
  std::string prefix;  // as PartPrefix
  // In the plan's order. A full space has one per head, with a basis one of
  // all.
  std::vector<LatentTensors> latents;
  // Dims of a head that a low_rank part covers, ascending; else empty.
  std::vector<int64_t> dims;
  bool folded = false;   // the lift is in q_proj or o_proj
  bool rebuilt = false;  // keys are lifted whole (RECONSTRUCT, ANCHORED)

  int64_t channels() const;  // of all latents
  // The latent of a KV head. CHECK: every head has one.
  const LatentTensors& LatentOf(int64_t kv_head) const;
};

// Attention of one layer under a plan.
struct AttentionTensors {
  std::vector<PartTensors> key;
  std::vector<PartTensors> value;
  std::vector<int64_t> query_rows;      // of q_proj, for each query head [Hq]
  std::vector<int64_t> output_columns;  // of o_proj, for each query head [Hq]
  bool output_bias = false;
  // All of them, full names, in the order of use.
  std::vector<RequiredTensor> tensors;
};

// Errors as RequiredTensors.
absl::StatusOr<AttentionTensors> DescribeAttention(
    const DecoderSpec& spec, int64_t layer, const kvasir::v1::LayerPlan& plan);

// Channels of a latent of `width` numbers that its codec stores: all but those
// whose bits are 0.
int64_t StoredChannels(const kvasir::v1::Codec& codec, int64_t width);

// Dims of a head that the model's RoPE turns as these pairs, in the order in
// which a head of just these pairs would have them: rows of a rope_pairs part.
std::vector<int64_t> PairDims(const RopeSpec& rope,
                              std::span<const uint32_t> pairs);

// Dims of a head that a low_rank part covers, ascending: those of its uses'
// pairs, those that do not rotate, or all.
std::vector<int64_t> CoveredDims(const DecoderSpec& spec, int64_t layer,
                                 KvSide side, const kvasir::v1::Part& part);

}  // namespace kvasir::model
