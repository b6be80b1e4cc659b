// Computes which part of a key bias the cache leaves out of codes. The rules
// are those of docs/artifact.md.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "compress/oracle/layer_program.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Returns what the cache leaves out of rotated keys at positions 0 to
// num_positions - 1, [T, Hkv, D] in the type of `bias`. `bias` is [Hkv * D].
// Each pair of a head is treated in one of three ways:
// - The four pairs that would otherwise remain largest are left out exactly.
// - Other pairs that turn by at most 0.1 rad in half a tile (32 positions) are
//   left out as they are at the tile's centre. The small difference remains.
// - All other pairs remain in the codes.
// Dims that do not rotate are left out exactly.
// Threads: any.
at::Tensor BiasOutsideOfCodes(const model::RopeSpec& rope,
                              const at::Tensor& bias, int64_t num_kv_heads,
                              int64_t num_positions);

// Returns what the cache leaves out of the latents of a part whose
// leaves_bias_out is set, [T or 1, sum of R'].
at::Tensor BiasOutsideOfPart(const LayerProgram& program,
                             const ProgramPart& part, const at::Tensor& bias,
                             int64_t num_positions);

}  // namespace kvasir::compress
