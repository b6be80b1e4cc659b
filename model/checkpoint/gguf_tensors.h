// Makes the tensors of a GGUF file look like those of a Hugging
// Face checkpoint:
// - Names are canonical, and the outermost dimension comes first.
// - Rows of queries and keys are in Hugging Face's order.
// - Each expert and each part of a fused tensor is a tensor by itself.
// - The 1 that the file has added to Gemma's norm weights is subtracted.
// - Numbers in F32, F16 and BF16 keep their type. Numbers of other types are
//   unpacked to float32 and rounded to BF16 (to nearest, ties to even) while
//   they are read, so nothing of the file stays in memory. The hashes of tiles
//   (fingerprint.h) are computed after these conversions. So a GGUF file and a
//   folder with the same numbers of the same types have the same weights_id.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// Opens the tensors of the file at `path`, or of all files of a split
// model, of which `path` is the first (gguf_model.h). `spec` describes the
// model in the file.
// Errors: those of GgufHeader and OpenGgufModel; UNIMPLEMENTED for a tensor
// that no supported model has.
absl::StatusOr<TensorStore> OpenGgufTensors(const std::string& path,
                                            const DecoderSpec& spec);

// Returns the name that a GGUF file has for a canonical name. For an expert or
// a part of a fused tensor, this is the name of the whole tensor. Returns the
// name unchanged if GGUF has none.
std::string GgufNameOf(const DecoderSpec& spec, std::string_view name);

}  // namespace kvasir::model
