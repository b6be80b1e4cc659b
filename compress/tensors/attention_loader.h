#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/tensors/attention_weights.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// The projections of one layer of an uncompressed checkpoint. What reading it
// says; InvalidArgument, naming the tensor, for numbers that are not finite.
absl::StatusOr<AttentionWeights> LoadAttention(
    const model::Checkpoint& checkpoint, int64_t layer);

}  // namespace kvasir::compress
