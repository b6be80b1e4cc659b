// Maps the tensor names of families, and their fused tensors, to canonical
// ones. All code above the files uses one set of names, Llama's
// (plan_tensors.h). A family with other names has its table here; no other code
// of engine or compressor knows them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// The place of a canonical tensor in a file of the family.
struct StoredTensor {
  std::string name;
  RowBlocks rows;
  int64_t num_rows = 0;  // rows of the canonical tensor, if it has not all
};

// The stored tensor for a canonical name. GPT-NeoX's fused query_key_value has
// queries, keys and values of one head after the other. OPT's table of
// positions begins with two rows that no position uses. A name that is not in
// the family's table stands for itself; so do the attention tensors of an
// artifact, which have canonical names in every family.
StoredTensor StoredTensorOf(const DecoderSpec& spec, std::string_view name);

// The canonical names of a stored tensor: several for a fused one, and its own
// name if the family's table does not have it.
std::vector<std::string> OurNamesOf(const DecoderSpec& spec,
                                    std::string_view stored);

// Gives the tensors of a folder their canonical names. INVALID_ARGUMENT, with
// file, tensor, wanted and found value, if a fused tensor has other rows than
// the model's, or if a folder has a tensor twice.
absl::Status UseOurNames(const DecoderSpec& spec, TensorStore* store);

}  // namespace kvasir::model
