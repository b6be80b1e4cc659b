// Writes a GGUF file as a Hugging Face folder.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace kvasir::model {

// Creates `folder` with config.json, model.safetensors, tokenizer.json and
// tokenizer_config.json (the last two if the file has a tokenizer). Tensors
// have the numbers that Checkpoint reads from the file. An F32 tensor whose
// numbers are all exact in BF16 is written as BF16, because the original model
// usually stores norms as BF16 and GGUF stores them as F32.
//
// Everything is written to `folder` + ".unfinished", which is renamed to
// `folder` at the end. If an error occurs, it is removed. Errors:
//   ALREADY_EXISTS a file or folder with one of these two names exists
//   UNIMPLEMENTED    config.json cannot express the file's RoPE factors
//   UNAVAILABLE      a file cannot be written; the text names it
// Also returns the errors of Checkpoint::Open and TokenizerOfGguf.
absl::Status WriteFolderOfGguf(const std::string& path,
                               const std::string& folder);

}  // namespace kvasir::model
