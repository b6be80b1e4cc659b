// A layer's plan in executable form: the tensors of the layer, and how their
// rows map to heads, RoPE pairs and channels. Follows docs/artifact.md only.
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

// One latent of a part, which `heads` share.
struct ProgramLatent {
  std::vector<int64_t> heads;  // KV heads, ascending
  int64_t offset = 0;          // within the part's stored channels
  LatentCodec codec;
  // For rope_low_rank: the RoPE pair of each complex channel [C].
  std::vector<int64_t> channel_pairs;
  at::Tensor pair_selector;  // for rope_low_rank: [rotary pairs, C], 1 where
                             // pair and channel belong together

  int64_t width() const { return codec.stored_width; }  // R'
};

// One part of a side. Index tensors are int64 on the program's device.
struct ProgramPart {
  plan::Space space = plan::Space::kFull;
  int index = 0;            // in plan::ResolvedSide::parts
  std::string prefix;       // "self_attn.k_proj" or "self_attn.k_proj.part{p}"
  std::string lift_prefix;  // plan::ResolvedPart::lift_prefix
  bool coded = true;        // false for the uncompressed model
  bool post_rope = false;
  // True if the lift is part of q_proj or o_proj, so that attention runs over
  // the latents themselves. Never set for rope_pairs, whose FOLD only leaves
  // out rows.
  bool folds = false;
  bool has_bias = false;     // the projection has a bias
  bool has_up_bias = false;  // the lift has a bias
  bool basis = false;
  bool mean = false;
  std::vector<ProgramLatent> latents;
  int64_t stored_width = 0;   // sum of R'
  int64_t widest_latent = 0;  // the greatest R'
  // Ascending dims of each KV head that the part's lift gives, [Hkv][d]. (The
  // dims of RoPE pairs come first.) rope_low_rank gives all rotary dims, with
  // zeros in pairs that it does not hold.
  std::vector<std::vector<int64_t>> lifted_dims;
  // Dims that the part holds, [Hkv][...]. A folded q_proj has rows for them.
  std::vector<std::vector<int64_t>> held_dims;
  at::Tensor lifted_index;  // [Hkv, d]; undefined if the part lifts all D dims
  at::Tensor head_order;  // Brings lifted heads into ascending order; undefined
                          // if they are in order.
  at::Tensor folded_channels;  // If the part folds: [Hkv * widest_latent],
                               // where stored_width stands for zero.
  at::Tensor kept_pairs;       // for rope_pairs: [Hkv * n]
  // For rope_low_rank: indices that put all stored real parts before all
  // imaginary ones, indices that undo it, and the RoPE pair of each complex
  // channel.
  at::Tensor complex_split;  // [2 sum of C]
  at::Tensor complex_join;   // [2 sum of C]
  at::Tensor channel_pairs;  // [sum of C]
  // For rope_low_rank that folds: the RoPE pair of each channel of a head, [Hkv
  // * C].
  at::Tensor head_channel_pairs;

  // Number of complex channels of the widest latent of a rope_low_rank part.
  int64_t widest_complex() const { return widest_latent / 2; }
  // True if the part is stored as codes and not as numbers of a type.
  bool holds_codes() const {
    return coded &&
           latents.front().codec.dtype == kvasir::v1::DATA_TYPE_UNSPECIFIED;
  }
};

// Threads: immutable after MakeLayerProgram.
struct LayerProgram {
  model::DecoderSpec spec;
  int64_t layer = 0;
  bool rotates = false;
  int64_t sliding_window = 0;  // 0: all keys before the query
  std::vector<ProgramPart> key;
  ProgramPart value;
  bool joint = false;  // the values share the latents of the last key part
  // The tokens that a side keeps exact.
  struct ExactTokens {
    int64_t sinks = 0;   // first tokens of a sequence; 0: none
    int64_t window = 0;  // nearest to the query; 0: none
    bool any() const { return sinks > 0 || window > 0; }
  };
  ExactTokens key_exact;
  ExactTokens value_exact;
  std::optional<plan::LayerEviction> eviction;

  // True if q_proj's rows are not those of the base model, because a key part
  // folds.
  bool query_is_folded = false;
  // True if a key part is attended to in the dims of a head.
  bool has_plain_key = true;
  // If q_proj is folded: its rows for the plain dims, [Hq * D], and for each
  // key part that folds, [Hq * widest_latent]. The number of its rows stands
  // for a zero row.
  at::Tensor plain_query_rows;
  std::vector<at::Tensor> folded_query_rows;  // by key part
  // If values fold: the columns of [Hq * widest_latent] that o_proj takes.
  at::Tensor output_columns;

  bool has_o_bias = false;
  // Names after "model.layers.{l}.".
  std::vector<plan::RequiredTensor> attention_tensors;
};

// The program of one layer. If `plan` is null, it is the uncompressed layer,
// without codes. The plan must have been accepted by plan::ValidatePlan.
// Errors: Unimplemented, naming layer and side, for features that the reference
//   decoder does not apply (ANCHORED, selection, ranges per sequence);
//   InvalidArgument for a space that has no tensors (low rank POST_ROPE).
absl::StatusOr<LayerProgram> MakeLayerProgram(const model::DecoderSpec& spec,
                                              const kvasir::v1::LayerPlan* plan,
                                              int64_t layer,
                                              at::Device device = at::kCPU);

// The tensors that the layer needs under this program, by names after
// "model.layers.{l}.".
enum class Ranges {
  kRequired,
  kNotYet
};  // whether ranges of CHANNEL_STATIC
    // codecs must be there
std::vector<model::RequiredTensor> LayerTensors(
    const LayerProgram& program, Ranges ranges = Ranges::kRequired);

// InvalidArgument, naming layer and tensor, with the shape that is needed and
// the one that is there.
absl::Status CheckLayerTensors(const LayerProgram& program,
                               const TensorMap& tensors,
                               Ranges ranges = Ranges::kRequired);

}  // namespace kvasir::compress
