// A layer's plan, worked out: which tensors there are, and how their rows map
// to heads, RoPE pairs and channels. Follows docs/artifact.md and nothing else.
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

// One latent of a part: what `heads` share.
struct ProgramLatent {
  std::vector<int64_t> heads;  // KV heads, ascending
  int64_t offset = 0;          // in the part's stored channels
  LatentCodec codec;
  // rope_low_rank: the pair of each complex channel [C].
  std::vector<int64_t> channel_pairs;
  at::Tensor pair_selector;  // rope_low_rank: [rotary pairs, C], 1 where equal

  int64_t width() const { return codec.stored_width; }  // R'
};

// One part of a side. Index tensors are int64 on the program's device.
struct ProgramPart {
  plan::Space space = plan::Space::kFull;
  int index = 0;            // in plan::ResolvedSide::parts
  std::string prefix;       // "self_attn.k_proj" or "self_attn.k_proj.part{p}"
  std::string lift_prefix;  // plan::ResolvedPart::lift_prefix
  bool coded = true;        // false: the uncompressed model
  bool post_rope = false;
  // The lift stands in q_proj or o_proj, and latents themselves are attended
  // to. Never set for rope_pairs, whose FOLD only leaves rows out.
  bool folds = false;
  bool has_bias = false;     // of the projection
  bool has_up_bias = false;  // of the lift
  bool basis = false;
  bool mean = false;
  std::vector<ProgramLatent> latents;
  int64_t stored_width = 0;   // sum of R'
  int64_t widest_latent = 0;  // greatest R'
  // Dims of each KV head that the part's lift gives, ascending (RoPE's pairs
  // come first): [Hkv][d]. rope_low_rank gives all rotary dims, and zeros in
  // pairs it does not hold.
  std::vector<std::vector<int64_t>> lifted_dims;
  // Dims that it holds, for the rows of a folded q_proj: [Hkv][...].
  std::vector<std::vector<int64_t>> held_dims;
  at::Tensor lifted_index;  // [Hkv, d]; undefined if all D
  at::Tensor head_order;    // lifted heads to ascending; undefined if they are
  at::Tensor folded_channels;  // folds: [Hkv * widest] (stored_width: a zero)
  at::Tensor kept_pairs;       // rope_pairs: [Hkv * n]
  // rope_low_rank: stored channels of all real parts, then all imaginary ones,
  // the way back, and the pair of each complex channel.
  at::Tensor complex_split;  // [2 sum of C]
  at::Tensor complex_join;   // [2 sum of C]
  at::Tensor channel_pairs;  // [sum of C]
  // rope_low_rank that folds: the pair of each channel of a head, [Hkv * C].
  at::Tensor head_channel_pairs;

  // Complex channels of the widest latent of a rope_low_rank part.
  int64_t widest_complex() const { return widest_latent / 2; }
  // Codes, and not numbers of a type.
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
  bool joint = false;  // the values' latents are those of the last key part
  // What a side keeps exact.
  struct ExactTokens {
    int64_t sinks = 0;   // first tokens of a sequence; 0: none
    int64_t window = 0;  // nearest to the query; 0: none
    bool any() const { return sinks > 0 || window > 0; }
  };
  ExactTokens key_exact;
  ExactTokens value_exact;
  std::optional<plan::LayerEviction> eviction;

  // q_proj's rows are not those of the base model: some key part folds.
  bool query_is_folded = false;
  // Some key part is attended to in the dims of a head.
  bool has_plain_key = true;
  // With a folded q_proj: its rows for the plain dims [Hq * D], and per key
  // part that folds [Hq * widest]. One past its rows stands for a zero.
  at::Tensor plain_query_rows;
  std::vector<at::Tensor> folded_query_rows;  // by key part
  // Values that fold: which of [Hq * widest] o_proj takes.
  at::Tensor output_columns;

  bool has_o_bias = false;
  // Names after "model.layers.{l}.".
  std::vector<plan::RequiredTensor> attention_tensors;
};

// The program of one layer. `plan` null: the uncompressed layer, nothing coded.
// The plan was accepted by plan::ValidatePlan.
// Errors: Unimplemented for what the reference decoder does not apply
//   (ANCHORED, selection, sequence ranges), naming layer and side;
//   InvalidArgument for a space that has no tensors (low rank POST_ROPE).
absl::StatusOr<LayerProgram> MakeLayerProgram(const model::DecoderSpec& spec,
                                              const kvasir::v1::LayerPlan* plan,
                                              int64_t layer,
                                              at::Device device = at::kCPU);

// Tensors that the layer needs under this program, by names after
// "model.layers.{l}.".
enum class Ranges { kRequired, kNotYet };  // of CHANNEL_STATIC codecs
std::vector<model::RequiredTensor> LayerTensors(
    const LayerProgram& program, Ranges ranges = Ranges::kRequired);

// InvalidArgument naming layer and tensor, want and have.
absl::Status CheckLayerTensors(const LayerProgram& program,
                               const TensorMap& tensors,
                               Ranges ranges = Ranges::kRequired);

}  // namespace kvasir::compress
