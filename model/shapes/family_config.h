// Reads the fields of config.json whose names, defaults and meaning depend on
// the model's family.
#pragma once

#include "absl/status/status.h"
#include "model/files/json.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/family.h"

namespace kvasir::model {

// Fills in biases, norms, windows, experts, activation and RoPE. `spec` must
// have its sizes. INVALID_ARGUMENT if a field has an impossible value,
// UNIMPLEMENTED if its value is valid but not supported.
absl::Status ParseFamily(const JsonFields& fields, Family family,
                         DecoderSpec* spec);

}  // namespace kvasir::model
