// The tensors of a GGUF file in the form of a Hugging Face checkpoint: with
// canonical names, outermost dimension first, rows of queries and keys in
// Hugging Face's order, each expert and each part of a fused tensor by itself,
// Gemma's norms without the 1 that the file adds to them, and numbers of a type
// that is served. Numbers of F32, F16 and BF16 keep their type; those of other
// types are unpacked to float32 and rounded to BF16 (to nearest, ties to even)
// while they are read, so nothing of the file stays in memory. A tensor's tiles
// (fingerprint.h) are those of the numbers that are read. So a GGUF file and a
// folder with the same numbers of the same types have the same weights_id.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// The tensors of the file at `path`, or of the files of which it is the first
// (gguf_model.h). They describe the model `spec`. Errors: those of GgufHeader
// and OpenGgufModel; UNIMPLEMENTED for a tensor that no served model has.
absl::StatusOr<TensorStore> OpenGgufTensors(const std::string& path,
                                            const DecoderSpec& spec);

// The name in a GGUF file of a tensor with this canonical name: that of the
// whole, for an expert and for a part of a fused tensor. Returns the name
// unchanged if there is none.
std::string GgufNameOf(const DecoderSpec& spec, std::string_view name);

}  // namespace kvasir::model
