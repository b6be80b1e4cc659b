#pragma once

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "compress/safetensors_writer.h"
#include "model/shapes.h"

namespace kvasir::compress {

// The text of config.json for a model of this shape.
std::string HfConfigJson(const model::ModelShape& shape, StoredDtype dtype);

// Writes config.json and generation_config.json into the folder.
absl::Status WriteHfConfig(const std::filesystem::path& folder,
                           const model::ModelShape& shape, StoredDtype dtype);

// Copies tokenizer.json and, where there are any, the other tokenizer files.
// NotFound when `from` has no tokenizer.json.
absl::Status CopyTokenizer(const std::filesystem::path& from,
                           const std::filesystem::path& to);

}  // namespace kvasir::compress
