// Translates the metadata of a GGUF file to the fields of config.json, so that
// one reader serves both kinds of files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/files/file.h"
#include "model/gguf/gguf_header.h"

namespace kvasir::model {

struct GgufConfig {
  std::string json;  // the text of a config.json
  // Divisors of the RoPE frequencies, one for each pair, that config.json
  // cannot express. Empty if there are none.
  std::vector<float> rope_factors;
};

// Describes the model of the file. `rope_factors` has the numbers of the file's
// tensor rope_freqs.weight, or is empty. Factors that are those of Llama 3.1 or
// 3.2 become a rope_scaling of the type llama3. Errors: those of GgufHeader;
// UNIMPLEMENTED for an architecture or for a key that is not served.
absl::StatusOr<GgufConfig> ConfigOfGguf(const GgufHeader& header,
                                        std::vector<float> rope_factors);

// Reads the factors from the file, and calls ConfigOfGguf.
absl::StatusOr<GgufConfig> ReadGgufConfig(const GgufHeader& header,
                                          const RandomAccessFile& file);

}  // namespace kvasir::model
