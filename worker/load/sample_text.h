// A short text of several kinds (encyclopedia, dialogue, recipe, code), with
// which a model is measured before it serves requests.
#pragma once

#include <cstdint>
#include <vector>

#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {

// Returns the first tokens of the text, at most `count`. Empty if `tokenizer`
// is null or cannot encode the text.
std::vector<int32_t> SampleTokens(const model::Tokenizer* tokenizer,
                                  int64_t count);

}  // namespace kvasir::cli
