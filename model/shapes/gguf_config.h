// Translates the metadata of a GGUF file to a config.json, so that the same
// parser reads both formats.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/gguf/gguf_header.h"
#include "model/gguf/gguf_model.h"

namespace kvasir::model {

// The RoPE factors of a GGUF file: divisors of the RoPE frequencies, one for
// each pair. A list is empty if the file does not have its tensor.
struct GgufRopeFactors {
  std::vector<float> all;        // rope_freqs.weight
  std::vector<float> long_text;  // rope_factors_long.weight (LongRoPE)
  std::vector<float> short_text;
};

struct GgufConfig {
  std::string json;  // the text of a config.json
  // The factors of rope_freqs.weight, if config.json cannot express them.
  std::vector<float> rope_factors;
};

// Describes the model of the file. If the factors of rope_freqs.weight equal
// those of Llama 3.1 or 3.2, the config.json has a rope_scaling of type llama3.
// Errors: those of GgufHeader; UNIMPLEMENTED for an architecture or for a key
// that is not served.
absl::StatusOr<GgufConfig> ConfigOfGguf(const GgufHeader& header,
                                        GgufRopeFactors rope_factors);

// Reads the factors from the files, and calls ConfigOfGguf.
absl::StatusOr<GgufConfig> ReadGgufConfig(const GgufModel& model);

}  // namespace kvasir::model
