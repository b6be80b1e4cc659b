// The spaces in which a layer's keys and values may be stored, and the loss
// that codes of each bit width cause there.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compress/planner/allocation.h"
#include "compress/planner/layer_moments.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

enum class SpaceKind {
  // one low_rank latent for keys and values
  kJoint,
  // low_rank, stored before RoPE; rebuilt only in layers with RoPE
  kKey,
  kRopeKey,  // rope_low_rank, stored after RoPE, not rebuilt
  kValue,    // low_rank, not rebuilt
  // Whole heads without a latent, multiplied by a Hadamard matrix and rounded
  // to the best levels for a normal distribution.
  kRotatedKey,
  kRotatedValue,
};

// One way to store a layer's keys, values or both.
struct SpaceOption {
  SpaceKind kind = SpaceKind::kJoint;
  std::vector<std::vector<int64_t>> groups;  // KV heads that share a latent

  bool rotated() const {
    return kind == SpaceKind::kRotatedKey || kind == SpaceKind::kRotatedValue;
  }
  bool values() const {
    return kind == SpaceKind::kJoint || kind == SpaceKind::kValue ||
           kind == SpaceKind::kRotatedValue;
  }
  bool keys() const { return kind == SpaceKind::kJoint || !values(); }
  // Returns the kind and the number of heads in a group, such as "joint all",
  // "rope keys 1" or "values 3".
  std::string Name(int64_t num_kv_heads) const;
};

// Rows of sample tokens: keys before their rotation, then values.
struct SampleRows {
  at::Tensor rows;       // [N, 2n] float32
  at::Tensor positions;  // [N]: the position for which a row's key is rotated
};

// Returns `count` positions spread evenly over [0, span), the same in every
// run.
at::Tensor SpreadPositions(int64_t count, int64_t span);

// The transform of one group's latent.
struct LatentTransform {
  std::vector<int64_t> columns;  // columns of a row that are encoded
  int64_t rank = 0;              // R
  at::Tensor encode;             // [R, n'] float64
  at::Tensor decode;             // [n', R]
  // RoPE pair of each complex channel [R / 2]; empty if nothing rotates.
  std::vector<int64_t> pairs;
};
std::vector<LatentTransform> TransformsOf(const SpaceOption& option,
                                          const LayerMoments& moments,
                                          const model::DecoderSpec& spec);

// Returns the latents [N, R] float32 of the rows.
at::Tensor LatentRows(const LatentTransform& transform,
                      const model::DecoderSpec& spec, const SampleRows& sample);

// Divides the channels of a latent into groups, in order; all channels of a
// group get the same bit width. The real and imaginary parts of a complex
// channel are in the same group.
std::vector<std::vector<int64_t>> WidthGroups(const LatentTransform& transform);

// Returns the groups of channels with their measured losses. The caller must
// set the result's latents, grain_bytes and loss_per_channel. For channels that
// rotate, 0 bits are kImpossible, because no constant could replace them.
PartChannels MeasureChannels(const std::vector<LatentTransform>& transforms,
                             const model::DecoderSpec& spec,
                             const SampleRows& sample);

// How one latent is coded: its channels' bits, and the ranges fitted to sample
// rows.
struct LatentCodes {
  LatentTransform transform;
  std::vector<int> bits;  // [R]
  at::Tensor minimum;     // [R]
  at::Tensor scale;
};
// Fits the ranges of each latent's codes to sample rows. `widths` has the bit
// width of each group of WidthGroups.
std::vector<LatentCodes> CodeLatents(std::vector<LatentTransform> transforms,
                                     const model::DecoderSpec& spec,
                                     const SampleRows& sample,
                                     const std::vector<int>& widths);

// The loss of codes on sample rows.
struct CodeLoss {
  double loss = 0;     // nats per token, over all latents
  double clamped = 0;  // number of codes outside their range, per token
  double codes = 0;    // number of codes per token
};
CodeLoss MeasureLoss(const std::vector<LatentCodes>& latents,
                     const at::Tensor& information,
                     const model::DecoderSpec& spec, const SampleRows& sample);

// Like MeasureChannels, but for kRotatedKey and kRotatedValue. The loss follows
// from the distortion of a normal distribution (Max 1960, table 1), because a
// Hadamard matrix makes any numbers nearly normally distributed.
PartChannels RotatedChannels(const SpaceOption& option,
                             const LayerMoments& moments,
                             const model::DecoderSpec& spec);

// Writes the bit widths of the channels into a part's codec, as runs.
void SetRuns(const LatentTransform& transform, const std::vector<int>& widths,
             kvasir::v1::Codec& codec);

}  // namespace kvasir::compress
