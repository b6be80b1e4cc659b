// Loads a model for serving, after its plan has been compared with a dense
// cache.
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

// Limits of the divergence from a dense cache, in nats per token: for a
// warning, for a refusal, and for plans that --kv-plan auto may take.
inline constexpr double kPlanCheckWarns = 0.05;
inline constexpr double kPlanCheckRefuses = 0.5;
inline constexpr double kPlanCheckAuto = 0.02;

// The most tokens of the built-in text.
inline constexpr int64_t kPlanCheckTokens = 512;

// Loads the model. `mode` is the value of --plan-check: refuse, warn or off.
// Unless it is off, the plan is compared with a dense cache on a built-in text,
// and the result is logged and kept in the user's cache folder for later
// starts. With --kv-plan auto, the named plans are compared, beginning with the
// one of fewest bytes, until the divergence is small enough. `tokenizer` may be
// null.
//
// Errors: those of LoadedModel::Load; FAILED_PRECONDITION for a plan that
// changes the model too much.
absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWithPlanCheck(
    const model::Tokenizer* tokenizer, absl::string_view mode,
    LoadRequest request);

}  // namespace kvasir::cli
