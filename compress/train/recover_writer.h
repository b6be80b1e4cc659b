// Writes a recovered checkpoint: a copy of the folder it came from, byte for
// byte, except for the trained weights.
#pragma once

#include <filesystem>
#include <vector>

#include "absl/status/status.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Rounds each layer's weights to their types in `source` (and converts them
// back to float32), so that later measurements use exactly the weights that are
// written.
// Errors: InvalidArgument for a number that the stored type cannot hold;
//   NotFound for a tensor that `source` does not have.
absl::Status RoundToStored(const model::Checkpoint& source,
                           std::vector<TensorMap>& layers);

// Copies the files of `source` (config, tokenizer, plan, weights) and replaces
// the tensors of `layers`, which must have been rounded. A tensor that did not
// change keeps its bytes. The folder appears when it is complete and can be
// opened as a checkpoint.
// Errors: AlreadyExists (NewFolder); InvalidArgument for a shape that differs
//   from the stored one; Unavailable with the path.
absl::Status WriteRecovered(const model::Checkpoint& source,
                            const std::vector<TensorMap>& layers,
                            const std::filesystem::path& out, bool overwrite);

}  // namespace kvasir::compress
