// Loads a model for serving, after its plan has been compared with a
// dense cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/tokenizer.h"
#include "worker/load/loaded_model.h"

namespace kvasir::cli {

// Limits of the KL divergence from a dense cache, in nats per token. Above
// these, a plan gets a warning, is refused, or is not chosen by --kv-plan auto.
inline constexpr double kPlanCheckWarns = 0.05;
inline constexpr double kPlanCheckRefuses = 0.5;
inline constexpr double kPlanCheckAuto = 0.02;

// The check uses at most this many tokens of the built-in text.
inline constexpr int64_t kPlanCheckTokens = 512;

// Loads the model. `mode` is the value of --plan-check: refuse, warn or off.
// Unless it is off, the plan is compared with a dense cache on a built-in text,
// and the result is logged and kept in the user's cache folder for later
// starts. With --kv-plan auto, the named plans (presets) are compared,
// beginning with the one of fewest bytes, until a divergence is small enough.
// `tokenizer` may be null. If `request` already has a plan check, its text is
// used instead, and the result is not kept.
//
// Errors: those of LoadedModel::Load; FAILED_PRECONDITION for a plan that
// changes the model too much.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWithPlanCheck(
    const model::Tokenizer* tokenizer, absl::string_view mode,
    LoadRequest request);

}  // namespace kvasir::cli
