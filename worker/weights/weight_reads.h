// The parts of a tensor that a rank reads.
#pragma once

#include <vector>

#include "kernels/device/dtype.h"
#include "plan/tp_shard.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// The ranges, from front to back and in whole tiles
// (model/checkpoint/fingerprint.h), that cover what the read's sinks take of a
// tensor of this size and type, and this rank's share of all tiles. The shares
// of all ranks cover the tensor, so that every tile is read by somebody. The
// columns are those that all sinks want in common, otherwise all. There is at
// least one range, which may have no rows. A group of one reads the whole
// tensor.
//
//   rows   |--tile--|--tile--|--tile--|--tile--|
//   taken      [ ]                     [    ]
//   read   [--------]        [--share-][-------]
std::vector<ReadRange> RangesOf(const TensorRead& read, const MatrixSize& size,
                                kernels::DType dtype, plan::TpShard shard);

}  // namespace kvasir::worker
