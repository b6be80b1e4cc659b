// Writes a GGUF file as a Hugging Face folder.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace kvasir::model {

// Creates `folder` with config.json, model.safetensors, tokenizer.json and
// tokenizer_config.json (the last two if the file has a tokenizer). Numbers are
// those that Checkpoint reads from the file. A tensor in F32 whose numbers are
// all exact in BF16 is written in BF16, as norms usually are in the model that
// the file was made from.
//
// Everything is written to `folder` + ".unfinished", which is renamed to
// `folder` at the end. An error removes it. Errors:
//   ALREADY_EXISTS   there is something at one of these names
//   UNIMPLEMENTED    config.json cannot express the file's RoPE factors
//   UNAVAILABLE      a file cannot be written; the text names it
// Also returns the errors of Checkpoint::Open and TokenizerOfGguf.
absl::Status WriteFolderOfGguf(const std::string& path,
                               const std::string& folder);

}  // namespace kvasir::model
