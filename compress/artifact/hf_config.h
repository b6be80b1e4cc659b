#pragma once

#include <filesystem>

#include "absl/status/status.h"
#include "compress/artifact/safetensors_writer.h"
#include "model/shapes/shapes.h"

namespace kvasir::compress {

// Writes config.json and generation_config.json into the folder.
absl::Status WriteHfConfig(const std::filesystem::path& folder,
                           const model::ModelShape& shape,
                           model::TensorType dtype);

// Copies tokenizer.json and any other tokenizer files that exist. NotFound if
// `from` has no tokenizer.json.
absl::Status CopyTokenizer(const std::filesystem::path& from,
                           const std::filesystem::path& to);

}  // namespace kvasir::compress
