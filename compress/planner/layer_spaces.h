// The spaces that a layer's keys and values may be stored in, and what codes
// of each width lose there: measured on sample rows, not taken from a formula.
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
  kJoint,    // low_rank, key and value: keys rebuilt, values lifted at run time
  kKey,      // low_rank before the rotation, rebuilt; absorbed without rotation
  kRopeKey,  // rope_low_rank after the rotation, absorbed
  kValue,    // low_rank, absorbed
  // Whole heads behind a Hadamard matrix, in levels of a normal number: nothing
  // in them is calibrated.
  kRotatedKey,
  kRotatedValue,
};

// One way to store keys, values or both of a layer.
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
  // "joint all", "rope keys 1", "values 3": with the heads of a group.
  std::string Name(int64_t num_kv_heads) const;
};

// Rows of sample tokens: keys before their rotation beside values.
struct SampleRows {
  at::Tensor rows;       // [N, 2n] float32
  at::Tensor positions;  // [N] at which rotated codes are tried
};

// Positions spread evenly over [0, span), the same ones each time.
at::Tensor SpreadPositions(int64_t count, int64_t span);

// The transform of one group's latent.
struct LatentTransform {
  std::vector<int64_t> columns;  // of a row
  int64_t rank = 0;              // R
  at::Tensor encode;             // [R, n'] float64
  at::Tensor decode;             // [n', R]
  // RoPE pair of each complex channel [R / 2]; empty: nothing turns.
  std::vector<int64_t> pairs;
};
std::vector<LatentTransform> TransformsOf(const SpaceOption& option,
                                          const LayerMoments& moments,
                                          const model::DecoderSpec& spec);

// Latents [N, R] float32 of the rows.
at::Tensor LatentRows(const LatentTransform& transform,
                      const model::DecoderSpec& spec, const SampleRows& sample);

// The channels of each group of an option's latents, in order: those of one
// width. Of complex ones, real and imaginary parts have the same.
std::vector<std::vector<int64_t>> WidthGroups(const LatentTransform& transform);

// Groups and measured losses; latents, grain and times are the caller's. What
// turns has some bits: it has no mean to stand for, and exact rows are to hold
// it.
PartChannels MeasureChannels(const std::vector<LatentTransform>& transforms,
                             const model::DecoderSpec& spec,
                             const SampleRows& sample);

// One latent's codes after they are chosen: ranges fitted on some rows.
struct LatentCodes {
  LatentTransform transform;
  std::vector<int> bits;  // [R]
  at::Tensor minimum;     // [R]
  at::Tensor scale;
};
// `widths`: one for each of WidthGroups.
std::vector<LatentCodes> CodeLatents(std::vector<LatentTransform> transforms,
                                     const model::DecoderSpec& spec,
                                     const SampleRows& sample,
                                     const std::vector<int>& widths);

// What the codes do to other rows.
struct CodeLoss {
  double loss = 0;     // tr(F E[e et]) / 2 over all latents, nats a token
  double clamped = 0;  // numbers of codes outside of their range
  double codes = 0;    // numbers of codes, per token
};
CodeLoss MeasureLoss(const std::vector<LatentCodes>& latents,
                     const at::Tensor& information,
                     const model::DecoderSpec& spec, const SampleRows& sample);

// As MeasureChannels, of whole heads in levels: by the levels' distortion of a
// normal number (Max 1960, table 1), which a Hadamard matrix makes of any.
PartChannels RotatedChannels(const SpaceOption& option,
                             const LayerMoments& moments,
                             const model::DecoderSpec& spec);

// Runs of a part's codec.
void SetRuns(const LatentTransform& transform, const std::vector<int>& widths,
             kvasir::v1::Codec& codec);

}  // namespace kvasir::compress
