// Writes a recovered checkpoint: the folder it came from, byte for byte, but
// for the weights that were trained.
#pragma once

#include <filesystem>
#include <vector>

#include "absl/status/status.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

// Rounds each layer's weights to the types they have in `source` (and back to
// float32), so that what is measured is what is written.
// Errors: InvalidArgument for a number that the stored type does not hold;
//   NotFound for a tensor that `source` has not.
absl::Status RoundToStored(const model::Checkpoint& source,
                           std::vector<TensorMap>& layers);

// Copies the files of `source` (config, tokenizer, plan, weights) and replaces
// in them the tensors of `layers`, which were rounded. A tensor that did not
// change keeps its bytes. The folder appears when it is complete and opens as
// a checkpoint.
// Errors: AlreadyExists (NewFolder); InvalidArgument for another shape than the
//   stored one; Unavailable with the path.
absl::Status WriteRecovered(const model::Checkpoint& source,
                            const std::vector<TensorMap>& layers,
                            const std::filesystem::path& out, bool overwrite);

}  // namespace kvasir::compress
