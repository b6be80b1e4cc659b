// Special tokens that tokenizer_config.json does not name: those of
// special_tokens_map.json, which older checkpoints have, and the defaults of
// the tokenizer's class.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

// Returns the text of tokenizer_config.json with the fields of
// special_tokens_map.json instead of its own, as Hugging Face reads them. If
// the configuration has `added_tokens_decoder`, the map is ignored. An empty
// text stands for a missing configuration. `folder` names the files in errors.
absl::StatusOr<std::string> MergeSpecialTokensMap(std::string_view config_json,
                                                  std::string_view map_json,
                                                  const std::string& folder);

// The eos_token of a configuration without this field: the default of its class
// in transformers. An empty text if the class has none, or if the field is
// null.
absl::StatusOr<std::string_view> DefaultEosToken(const JsonRef& config);

}  // namespace kvasir::model
