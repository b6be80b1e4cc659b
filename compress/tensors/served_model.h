// Refuses models that the methods of kvasir-compress cannot compress.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Returns UNIMPLEMENTED, with the reason, for a model that the methods
// cannot compress.
inline absl::Status CheckMethodsServe(const model::DecoderSpec& spec) {
  if (!spec.rope.long_frequencies.empty()) {
    return absl::UnimplementedError(absl::StrCat(
        spec.architecture,
        " rotates by LongRoPE, whose frequencies depend on the served length, "
        "and the methods measure keys with one choice of them; serve the model "
        "with a named plan, such as --kv-plan rotated-4bit"));
  }
  if (spec.score_cap != 0 || spec.logit_cap != 0) {
    return absl::UnimplementedError(absl::StrCat(
        spec.architecture,
        " caps its scores or logits, and no method was measured with caps; "
        "serve the model with a named plan, such as --kv-plan rotated-4bit"));
  }
  if (spec.qk_norm == model::QkNorm::kNone) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      spec.architecture,
      " normalizes its keys after their projection (QK-norm), and every method "
      "factors or measures that projection; serve the model with a named plan, "
      "such as --kv-plan rotated-4bit, which needs no compressed checkpoint"));
}

}  // namespace kvasir::compress
