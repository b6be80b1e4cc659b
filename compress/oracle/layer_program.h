// A layer's plan in executable form: which tensors the layer has, and which
// heads, RoPE pairs and channels their rows belong to. The code implements the
// rules of docs/artifact.md and nothing else.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/oracle/fake_quant.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/plan_tensors.h"
#include "model/shapes/decoder_spec.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// One latent of a part, shared by `heads`.
struct ProgramLatent {
  std::vector<int64_t> heads;  // KV heads, ascending
  // Index of the latent's first channel among the stored channels of the part.
  int64_t offset = 0;
  LatentCodec codec;
  // For rope_low_rank: the RoPE pair of each complex channel [C].
  std::vector<int64_t> channel_pairs;
  // For rope_low_rank: a matrix [rotary pairs, C] with 1 where the channel
  // belongs to the pair.
  at::Tensor pair_selector;

  int64_t width() const { return codec.stored_width; }  // R'
};

// One part of a layer's keys or values. Index tensors are int64 on the
// program's device.
struct ProgramPart {
  plan::Space space = plan::Space::kFull;
  int index = 0;            // index in plan::ResolvedSide::parts
  std::string prefix;       // "self_attn.k_proj" or "self_attn.k_proj.part{p}"
  std::string lift_prefix;  // plan::ResolvedPart::lift_prefix
  // whether latents are coded; false in an uncompressed model
  bool coded = true;
  bool post_rope = false;
  // True if the lift is folded into q_proj or o_proj, so that attention works
  // on the latents themselves. Always false for rope_pairs, whose FOLD only
  // leaves out rows of q_proj.
  bool folds = false;
  bool has_bias = false;     // the projection has a bias
  bool has_up_bias = false;  // the lift has a bias
  // If true, codes leave out the bias of the projection: all of it if
  // the stored keys are not rotated, otherwise only what
  // BiasOutsideOfCodes returns.
  bool leaves_bias_out = false;
  bool basis = false;
  bool mean = false;
  std::vector<ProgramLatent> latents;
  int64_t stored_width = 0;   // stored channels of all latents together
  int64_t widest_latent = 0;  // stored channels of the widest latent
  // The dims of each KV head that the part's lift computes, [Hkv][d],
  // ascending. The lift of rope_low_rank computes all rotary dims (the first
  // dims of a head), and gives 0 for pairs that the part does not hold.
  std::vector<std::vector<int64_t>> lifted_dims;
  // The dims of each KV head that the part stores, [Hkv][...]. A folded q_proj
  // has rows for these dims.
  std::vector<std::vector<int64_t>> held_dims;
  at::Tensor lifted_index;  // [Hkv, d]; undefined if the part lifts all D dims
  // The index that puts the lifted heads in ascending order; undefined if they
  // are in this order already.
  at::Tensor head_order;
  // If the part folds: for each KV head, the indices of its latent's channels
  // among the stored channels, [Hkv * widest_latent]. Narrower latents are
  // padded with the index stored_width, which stands for a channel of zeros.
  at::Tensor folded_channels;
  at::Tensor kept_pairs;  // for rope_pairs: [Hkv * n]
  // For rope_low_rank: indices that put all stored real parts before all
  // imaginary ones, indices that undo it, and the RoPE pair of each complex
  // channel.
  at::Tensor complex_split;  // [2 sum of C]
  at::Tensor complex_join;   // [2 sum of C]
  at::Tensor channel_pairs;  // [sum of C]
  // For a rope_low_rank part that folds: the RoPE pair of each complex channel
  // of each KV head, [Hkv * widest_complex()]. Padding has pair 0.
  at::Tensor head_channel_pairs;

  // For rope_low_rank: number of complex channels of the widest latent.
  int64_t widest_complex() const { return widest_latent / 2; }
  // Returns whether the part is stored as codes and not unquantized.
  bool holds_codes() const {
    return coded &&
           latents.front().codec.dtype == kvasir::v1::DATA_TYPE_UNSPECIFIED;
  }
};

// One layer's plan in executable form.
// Threads: immutable after MakeLayerProgram.
struct LayerProgram {
  model::DecoderSpec spec;
  int64_t layer = 0;
  bool rotates = false;
  int64_t sliding_window = 0;  // 0: no sliding window
  std::vector<ProgramPart> key;
  ProgramPart value;
  bool joint = false;  // the values share the latents of the last key part
  // How many tokens keys or values keep exact.
  struct ExactTokens {
    int64_t sinks = 0;   // first tokens of a sequence; 0: none
    int64_t window = 0;  // tokens nearest to the query; 0: none
    bool any() const { return sinks > 0 || window > 0; }
  };
  ExactTokens key_exact;
  ExactTokens value_exact;
  std::optional<plan::LayerEviction> eviction;

  // True if q_proj's rows differ from those of the base model because a key
  // part folds.
  bool query_is_folded = false;
  // True if at least one key part does not fold. Attention's dot product then
  // also includes the dims of a head, in addition to folded latents.
  bool has_plain_key = true;
  // If q_proj is folded: which of its rows compute what. plain_query_rows [Hq *
  // D] has the rows for the dims of parts that do not fold. folded_query_rows
  // has the rows for the latents of each part that folds, [Hq * widest_latent].
  // An index equal to the number of q_proj's rows stands for a row of zeros.
  at::Tensor plain_query_rows;
  std::vector<at::Tensor> folded_query_rows;  // one tensor for each key part
  // If values fold: the indices of the columns that o_proj reads. The output of
  // attention then has Hq * widest_latent columns.
  at::Tensor output_columns;

  bool has_o_bias = false;
  // The attention tensors that the layer needs, by their names without the
  // prefix "model.layers.{l}.".
  std::vector<plan::RequiredTensor> attention_tensors;
};

// Makes the program of one layer. If `plan` is null, the layer is uncompressed
// and has no codes. The plan must have been accepted by plan::ValidatePlan.
// Errors: Unimplemented, naming layer and side, for features that the reference
//   decoder does not apply (ANCHORED, selection, ranges per sequence);
//   InvalidArgument for a space that has no tensors (low rank POST_ROPE).
absl::StatusOr<LayerProgram> MakeLayerProgram(const model::DecoderSpec& spec,
                                              const kvasir::v1::LayerPlan* plan,
                                              int64_t layer,
                                              at::Device device = at::kCPU);

// Whether the ranges of CHANNEL_STATIC codecs must be among a layer's tensors
// (kRequired), or have not been found yet (kNotYet).
enum class Ranges { kRequired, kNotYet };
// The tensors that the layer needs under this program, by their names without
// the prefix "model.layers.{l}.".
std::vector<model::RequiredTensor> LayerTensors(
    const LayerProgram& program, Ranges ranges = Ranges::kRequired);

// Returns InvalidArgument for a tensor that is missing or has a wrong shape,
// naming layer and tensor, with the needed and the actual shape.
absl::Status CheckLayerTensors(const LayerProgram& program,
                               const TensorMap& tensors,
                               Ranges ranges = Ranges::kRequired);

}  // namespace kvasir::compress
