// Rotates heads of any width by RoPE.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// The cos and sin of every RoPE pair's angle at T consecutive positions,
// already multiplied by YaRN's attention factor. The angles are computed in
// float64.
struct Rotation {
  at::Tensor cos;  // [T, rotary_dim / 2]
  at::Tensor sin;

  Rotation Slice(int64_t num_positions) const {
    return {cos.slice(0, 0, num_positions), sin.slice(0, 0, num_positions)};
  }
};
// Returns the rotation at `num_positions` positions from `first_position` on.
// If the last position is beyond LongRoPE's original context, its frequencies
// for long contexts are used.
Rotation MakeRotation(const model::RopeSpec& rope, int64_t num_positions,
                      const at::TensorOptions& options,
                      int64_t first_position = 0);

// The arguments of Rotate. It rotates the first n pairs of heads [B, T, H, W]
// by cos and sin [T, 1 or H, n], and multiplies all numbers by `scale`. The
// dims after these pairs do not rotate.
struct Turn {
  at::Tensor cos;
  at::Tensor sin;
  model::RopePairing pairing = model::RopePairing::kHalfSplit;
  double scale = 1.0;
};

at::Tensor Rotate(const at::Tensor& heads, const Turn& turn);

}  // namespace kvasir::compress
