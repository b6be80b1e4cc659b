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
// Pairs that turn by at most 0.1 rad from the centre of a tile of 64 positions
// to its ends are left out as they are at the centre. The four pairs of each
// head that would remain largest are left out exactly, and numbers that do not
// rotate as they are. The other pairs remain.
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
