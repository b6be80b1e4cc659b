#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/tensors/attention_weights.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Loads the projections of one layer of an uncompressed checkpoint.
// Errors: InvalidArgument, naming the tensor, for numbers that are not finite;
// errors of reading the file.
absl::StatusOr<AttentionWeights> LoadAttention(
    const model::Checkpoint& checkpoint, int64_t layer);

}  // namespace kvasir::compress
