// Maps the tensor names of each model family, and fused tensors, to canonical
// names, which are Llama's (plan_tensors.h). Only this code knows the names
// that the other families use; engine and compressor use the canonical ones.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// The place of a canonical tensor: a stored tensor, or some rows of one.
struct StoredTensor {
  std::string name;
  RowBlocks rows;
  int64_t num_rows = 0;  // unused if it has all rows
};

// The stored tensor for a canonical name. In GPT-NeoX, it may be some rows of
// the fused query_key_value, which has the rows of queries, keys and values for
// each head in turn. In OPT, it may be the table of positions without its first
// two rows, which no position uses. A name that is not in the family's table is
// returned unchanged, and so are the names of an artifact's attention tensors,
// which are canonical in every family.
StoredTensor StoredTensorOf(const DecoderSpec& spec, std::string_view name);

// The canonical names of a stored tensor: several for a fused one, and its
// stored name if it is not in the family's table.
std::vector<std::string> OurNamesOf(const DecoderSpec& spec,
                                    std::string_view stored);

// Gives the tensors of a folder their canonical names. INVALID_ARGUMENT, with
// file, tensor, wanted and found value, if a fused tensor does not have the
// number of rows that the model needs, or if a folder has a tensor twice.
absl::Status UseOurNames(const DecoderSpec& spec, TensorStore* store);

}  // namespace kvasir::model
