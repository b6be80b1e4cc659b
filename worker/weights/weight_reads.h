// Decides which parts of a tensor a rank reads.
#pragma once

#include <vector>

#include "kernels/device/dtype.h"
#include "plan/tp_shard.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// Returns the ranges of a tensor of this size and type that the rank reads,
// from front to back. They consist of whole tiles
// (model/checkpoint/fingerprint.h). They cover what the sinks of `read` take,
// and this rank's share of all tiles. So the ranks together read every tile,
// and a group of one rank reads the whole tensor. If all sinks are packed
// matrices and take only part of the columns, the ranges have only these
// columns; otherwise they have all columns. There is at least one range, which
// may have no rows.
//
//   rows   |--tile--|--tile--|--tile--|--tile--|
//   taken      [ ]                     [    ]
//   read   [--------]        [--share-][-------]
std::vector<ReadRange> RangesOf(const TensorRead& read, const MatrixSize& size,
                                kernels::DType dtype, plan::TpShard shard);

}  // namespace kvasir::worker
