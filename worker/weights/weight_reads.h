// Which parts of a tensor a rank reads.
#pragma once

#include <vector>

#include "kernels/device/dtype.h"
#include "plan/tp_shard.h"
#include "worker/weights/weight_jobs.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// What the read's sinks take of a tensor of this size and type, from front to
// back, in whole tiles (model/checkpoint/fingerprint.h), and the rank's share
// of all tiles, so that none is left to nobody whatever the ranks take. The
// columns are those that all sinks together want, or all of them. At least one
// range, which may have no rows; of a group of one, the whole tensor.
//
//   rows  |--tile--|--tile--|--tile--|--tile--|
//   taken      [ ]                     [    ]
//   read  [--------]        [--share-][-------]
std::vector<ReadRange> RangesOf(const TensorRead& read, const MatrixSize& size,
                                kernels::DType dtype, plan::TpShard shard);

}  // namespace kvasir::worker
