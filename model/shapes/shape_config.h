// Writes a model shape as the text of a config.json. So the same parser checks
// checkpoints on disk and models made in memory.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/shapes.h"

namespace kvasir::model {

// `torch_dtype`: "float32", "float16" or "bfloat16".
std::string ConfigJsonOfShape(const ModelShape& shape,
                              std::string_view torch_dtype);

// Parses the text of ConfigJsonOfShape. Returns an error of ParseConfig if the
// sizes of the shape contradict each other.
absl::StatusOr<DecoderSpec> SpecOfShape(const ModelShape& shape);

}  // namespace kvasir::model
