// How families name and fuse their tensors. Everything above the files knows
// one set of names, Llama's (plan_tensors.h); a family of other names has its
// rows here, and nothing else in the engine or the compressor knows them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// What one of our tensors is in a file of the family's own.
struct StoredTensor {
  std::string name;
  RowBlocks rows;
  int64_t num_rows = 0;  // of ours, where they are not all
};

// GPT-NeoX's fused query_key_value has the rows of head after head, queries,
// keys and values of each; OPT's table of positions begins with two rows that
// no position uses. Names of no row of the family are their own: so are the
// attention tensors of an artifact, which have our names in every family.
StoredTensor StoredTensorOf(const DecoderSpec& spec, std::string_view name);

// Our names of a stored tensor: several of a fused one, its own where the
// family has no other.
std::vector<std::string> OurNamesOf(const DecoderSpec& spec,
                                    std::string_view stored);

// Gives the tensors of a folder our names. INVALID_ARGUMENT, with file, tensor,
// want and have, for a fused one of other rows than the model's, and where a
// folder has one tensor twice.
absl::Status UseOurNames(const DecoderSpec& spec, TensorStore* store);

}  // namespace kvasir::model
