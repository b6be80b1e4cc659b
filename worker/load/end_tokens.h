// Chooses the tokens that end an output.
#pragma once

#include <cstdint>
#include <vector>

#include "model/shapes/decoder_spec.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {

// Returns the ids that the model's configuration names, followed by those that
// only the tokenizer names. The configuration of many models lacks the token
// that ends a turn of a chat. `tokenizer` may be null. Logs the ids with
// their sources, and a warning if there are none.
std::vector<int32_t> ChooseEndTokens(const model::DecoderSpec& spec,
                                     const model::Tokenizer* tokenizer);

}  // namespace kvasir::cli
