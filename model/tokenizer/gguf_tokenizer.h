// Translates the tokenizer of a GGUF file to the files of a Hugging Face
// folder, so that the same code reads both.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/gguf/gguf_header.h"

namespace kvasir::model {

// The texts of the files that AutoTokenizer would write for this tokenizer.
struct GgufTokenizer {
  std::string tokenizer_json;
  std::string config_json;  // tokenizer_config.json
};

// Serves `gpt2` (byte-level BPE) with the pre-tokenizers that
// docs/guide.md lists, and `llama` (SentencePiece's BPE, whose merges
// follow from the scores as in transformers' generate_merges).
//   NOT_FOUND         the file has no tokenizer
//   UNIMPLEMENTED     another model or pre-tokenizer; the text names it
//   INVALID_ARGUMENT  broken lists of tokens, types, scores or merges; the text
//                     names the key, the place and the value
absl::StatusOr<GgufTokenizer> TokenizerOfGguf(const GgufHeader& header);

}  // namespace kvasir::model
