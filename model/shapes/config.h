// Reads config.json and generation_config.json of a Hugging Face folder into a
// DecoderSpec. Refuses models that this engine cannot run exactly.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// The most layers that a config.json may state.
inline constexpr int64_t kMaxLayers = 1024;

// `where` names the text in errors.
// Errors: INVALID_ARGUMENT if the text is invalid, UNIMPLEMENTED if the model
//   is valid but not supported. Both name the field, the values allowed and the
//   value found.
absl::StatusOr<DecoderSpec> ParseConfig(std::string_view json,
                                        std::string_view where);

// Reads the end-of-sequence ids into `spec`; if the file has any, they replace
// the ids of config.json. The file's sampling parameters are checked, but they
// do not become the defaults of requests.
absl::Status ParseGenerationConfig(std::string_view json,
                                   std::string_view where, DecoderSpec* spec);

// Reads config.json and, if it exists, generation_config.json of a
// folder, or the corresponding metadata of a GGUF file. Also returns the
// errors of GgufHeader.
absl::StatusOr<DecoderSpec> LoadModelConfig(const std::string& path);

// Returns the text of a folder's config.json. For a GGUF file, returns a
// config.json that is made from its metadata (ConfigOfGguf).
absl::StatusOr<std::string> LoadConfigText(const std::string& path);

}  // namespace kvasir::model
