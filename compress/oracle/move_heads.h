// Takes keys and queries that are rotated for some positions, and rotates them
// further, so that they are rotated for other positions.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "compress/oracle/layer_program.h"
#include "compress/oracle/rotation.h"

namespace kvasir::compress {

// Implements EvictionInputs::move. Each row of `heads` holds the numbers that
// enter attention's dot product: the dims of a head, then the latents of parts
// that fold. `rotation` must include all positions in `from` and `to` and begin
// at 0.
at::Tensor MoveHeads(const LayerProgram& program, const Rotation& rotation,
                     const at::Tensor& heads, const std::vector<int64_t>& unit,
                     const at::Tensor& from, const at::Tensor& to);

}  // namespace kvasir::compress
