// config.json and generation_config.json of a Hugging Face folder, brought down
// to a DecoderSpec. What this engine cannot run exactly is refused by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// `where` names the text in errors. Errors: INVALID_ARGUMENT for text that is
// wrong, UNIMPLEMENTED for a model that is sound but not served; both name the
// field, what is wanted and what is there.
absl::StatusOr<DecoderSpec> ParseConfig(std::string_view json,
                                        std::string_view where);

// Takes the end-of-sequence ids, which replace those of config.json. The
// authors' sampling values are judged, so that a broken file is heard of, and
// not applied: a request that says nothing is sampled neutrally.
absl::Status ParseGenerationConfig(std::string_view json,
                                   std::string_view where, DecoderSpec* spec);

// Both files of a folder; generation_config.json may be missing.
absl::StatusOr<DecoderSpec> LoadModelConfig(const std::string& folder);

}  // namespace kvasir::model
