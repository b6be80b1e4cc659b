// Maps the tensor names of each model family to canonical names, those of Llama
// (plan_tensors.h). Splits fused tensors. Only this code knows the names that
// families use; all other code uses canonical names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// Where a tensor with a canonical name is stored: as a whole tensor of the
// file, or as some rows of one.
struct StoredTensor {
  std::string name;
  RowBlocks rows;
  int64_t num_rows = 0;  // unused if `rows` selects all rows
};

// Returns where the tensor with a canonical name is stored. It may be only a
// part of a stored tensor: in GPT-NeoX and Phi-3 some rows of a fused
// projection, in OPT the table of positions without its first two rows, which
// are unused.
//
// Returns a name unchanged if it is not in the family's table, or if it names
// an attention tensor of an artifact.
StoredTensor StoredTensorOf(const DecoderSpec& spec, std::string_view name);

// The canonical names of a stored tensor; a fused tensor has several. Returns
// only the stored name if it is not in the family's table.
std::vector<std::string> OurNamesOf(const DecoderSpec& spec,
                                    std::string_view stored);

// Gives the tensors of a folder their canonical names. INVALID_ARGUMENT if a
// fused tensor does not have the number of rows that the model needs, or if two
// tensors would get the same name.
absl::Status UseOurNames(const DecoderSpec& spec, TensorStore* store);

}  // namespace kvasir::model
