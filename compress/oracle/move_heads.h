// Moves keys and queries to other positions than those they were rotated for.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "compress/oracle/layer_program.h"
#include "compress/oracle/rotation.h"

namespace kvasir::compress {

// Implements EvictionInputs::move. The heads are what queries and keys of the
// layer are multiplied by: the dims of a head, then the latents of parts that
// fold. `rotation` has all of the positions from 0 on.
at::Tensor MoveHeads(const LayerProgram& program, const Rotation& rotation,
                     const at::Tensor& heads, const std::vector<int64_t>& unit,
                     const at::Tensor& from, const at::Tensor& to);

}  // namespace kvasir::compress
