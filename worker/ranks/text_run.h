// Runs a text through an executor of its own before a rank serves requests. The
// rank's weights are lent to that executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "model/shapes/decoder_spec.h"
#include "worker/collective/collective.h"
#include "worker/executor/launcher.h"
#include "worker/offline/direct_runner.h"
#include "worker/program/served_plan.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// The parts of a rank that a text run uses. They belong to the caller.
struct TextRank {
  const model::DecoderSpec* spec = nullptr;
  kernels::Device* device = nullptr;
  kernels::Stream* stream = nullptr;
  Collective* collective = nullptr;
  int64_t max_model_len = 0;
};

// The most tokens of a step in a text run.
inline constexpr int64_t kTextStepTokens = 128;

// See logits_tap and key_tap of ModelExecutorOptions.
struct TextTaps {
  std::function<void(const LogitsRow&)> logits;
  KeyTap keys;
};

// Returns a plan without quantization: float32 on a CPU, which adds no rounding
// error, and bf16 on other devices, which do not support float32.
absl::StatusOr<std::shared_ptr<const ServedPlan>> ServeDensePlan(
    const TextRank& rank);

// Whether both plans compute attention with the same tensors.
bool HaveEqualWeights(const ServedPlan& a, const ServedPlan& b);

// Makes executors with these weights run the attention programs of `plan`.
void UsePrograms(const std::shared_ptr<const ServedPlan>& plan,
                 ModelWeights* weights);

// Makes an executor for one sequence of `tokens` tokens with the plan's cache,
// and calls `run` once. `weights` must have been loaded for a plan with the
// same tensors. They use the programs of `plan` afterwards.
// Errors: those of ModelExecutor::Create and of `run`; the weights are lost
// then.
absl::Status RunText(const TextRank& rank,
                     const std::shared_ptr<const ServedPlan>& plan,
                     int64_t tokens, TextTaps taps,
                     absl::FunctionRef<absl::Status(DirectRunner& runner)> run,
                     ModelWeights* weights);

}  // namespace kvasir::worker
