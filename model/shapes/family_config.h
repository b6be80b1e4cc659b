// Reads the fields of config.json whose names, defaults and meaning depend on
// the model's family.
#pragma once

#include "absl/status/status.h"
#include "model/files/json.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/family.h"

namespace kvasir::model {

// Fills in biases, norms, windows, experts, activation and RoPE. `spec` must
// have its sizes. INVALID_ARGUMENT for a field with an impossible value,
// UNIMPLEMENTED for one that describes a model that is not served.
absl::Status ParseFamily(const JsonFields& fields, Family family,
                         DecoderSpec* spec);

}  // namespace kvasir::model
