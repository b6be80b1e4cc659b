// Computes which part of a key bias the cache leaves out of codes. The rules
// are those of docs/artifact.md.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "compress/oracle/layer_program.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Returns the part of the key bias that the cache leaves out of rotated keys
// at positions 0 to num_positions - 1, [T, Hkv, D] in the type of `bias`.
// `bias` is [Hkv * D]. The bias of each RoPE pair of a head is treated in one
// of three ways:
// - The biases of four pairs are left out exactly. These are the pairs that
//   would leave the most in the codes if they were treated as below.
// - If another pair turns by at most 0.1 rad in half a tile (32 positions), its
//   bias is left out as it is at the tile's centre. The small difference
//   remains in the codes.
// - The biases of all other pairs remain in the codes.
// The biases of dims that do not rotate are left out exactly.
// Threads: any.
at::Tensor BiasOutsideOfCodes(const model::RopeSpec& rope,
                              const at::Tensor& bias, int64_t num_kv_heads,
                              int64_t num_positions);

// Returns the part of the bias that the cache leaves out of the latents of a
// part whose leaves_bias_out is set, [T or 1, sum of R'].
at::Tensor BiasOutsideOfPart(const LayerProgram& program,
                             const ProgramPart& part, const at::Tensor& bias,
                             int64_t num_positions);

}  // namespace kvasir::compress
