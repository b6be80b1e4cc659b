// Translates the metadata of a GGUF file to the fields of config.json, so that
// one reader serves both kinds of files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "model/files/file.h"
#include "model/gguf/gguf_header.h"

namespace kvasir::model {

// The text of a config.json that describes the model of the file. Errors: those
// of GgufHeader; UNIMPLEMENTED for an architecture or for a key that is not
// served.
absl::StatusOr<std::string> ConfigJsonOfGguf(const GgufHeader& header);

// The divisors of the RoPE frequencies, one for each pair; empty if the file
// has none. config.json cannot express them.
absl::StatusOr<std::vector<float>> RopeFactorsOfGguf(
    const GgufHeader& header, const RandomAccessFile& file);

}  // namespace kvasir::model
