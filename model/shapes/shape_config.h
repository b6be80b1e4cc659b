// The config.json of a shape. So one description serves checkpoints on disk and
// models made in memory.
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

// The result of ParseConfig for that text, with its errors for sizes that do
// not fit each other.
absl::StatusOr<DecoderSpec> SpecOfShape(const ModelShape& shape);

}  // namespace kvasir::model
