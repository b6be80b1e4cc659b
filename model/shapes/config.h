// config.json and generation_config.json of a Hugging Face folder, brought down
// to a DecoderSpec. What this engine cannot run exactly is refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// What the model's authors suggest: judged, so that a broken file is heard of.
// Not applied: a request that says nothing is sampled neutrally.
struct GenerationDefaults {
  std::optional<bool> do_sample;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int64_t> max_new_tokens;
};

struct ModelConfig {
  DecoderSpec spec;
  GenerationDefaults generation;
};

// `where` names the text in errors. Errors: INVALID_ARGUMENT for text that is
// wrong, UNIMPLEMENTED for a model that is sound but not served; both name the
// field, what is wanted and what is there.
absl::StatusOr<DecoderSpec> ParseConfig(std::string_view json,
                                        std::string_view where);

// Reads the sampling defaults, and end-of-sequence ids, which replace those of
// config.json.
absl::Status ParseGenerationConfig(std::string_view json,
                                   std::string_view where, ModelConfig* config);

// Both files of a folder; generation_config.json may be missing.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& folder);

}  // namespace kvasir::model
