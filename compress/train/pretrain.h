#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/token_stream.h"
#include "model/shapes/shapes.h"

namespace kvasir::compress {

// From `begin` (a fraction of the run) on, crops have `crop_tokens` tokens.
struct RampStage {
  double begin = 0.0;
  int64_t crop_tokens = 512;
};

struct PretrainOptions {
  model::ModelShape shape;
  uint64_t seed = 1;
  // One of the two: a number of steps, or a time that the schedules stretch
  // over. Time spent before a resume counts.
  int64_t steps = 0;
  absl::Duration time_budget = absl::ZeroDuration();
  int64_t batch_tokens = 8192;
  int64_t micro_batch_tokens = 1024;  // per thread; bounds the memory
  std::vector<RampStage> ramp = {{}};
  double learning_rate = 4e-3;
  double warmup = 0.03;               // fraction of the run
  double final_learning_rate = 0.02;  // fraction of the peak
  double weight_decay = 0.1;
  double clip_norm = 1.0;
  bool muon = true;
  std::string device = "auto";
  int threads = 1;
  absl::Duration validation_interval = absl::Minutes(5);
  int64_t validation_windows = 16;  // during the run; all of them at its end
  absl::Duration checkpoint_interval = absl::Minutes(5);
  std::filesystem::path out;
  bool resume = false;
};

struct PretrainProgress {
  int64_t step = 0;
  double fraction = 0.0;
  double loss = 0.0;  // nats per token of this step's batch
  double learning_rate = 0.0;
  int64_t crop_tokens = 0;
  int64_t tokens_seen = 0;
  double tokens_per_second = 0.0;
  absl::Duration elapsed;
  absl::Duration left;
  // Nats per byte, where this step measured it; else negative.
  double validation = -1.0;
};

struct PretrainResult {
  int64_t steps = 0;
  int64_t tokens_seen = 0;
  absl::Duration elapsed;
  double last_loss = 0.0;
  // Over the whole validation stream, windows of the full context; negative
  // when there is none.
  double validation_nats_per_byte = -1.0;
  double validation_nats_per_token = -1.0;
};

// Trains a Llama decoder from random weights and writes a Hugging Face
// checkpoint (bf16) into `options.out`; `on_step` sees every step and stops the
// run by returning false. A stopped run keeps its state in
// `out`/pretrain.state, from which `resume` goes on exactly.
// Errors: InvalidArgument for options that do not fit the data; Cancelled when
//   stopped; AlreadyExists when a stopped run's state would be overwritten;
//   Internal when the loss leaves the finite numbers; FailedPrecondition when a
//   state of other options is resumed (only the length of the run may differ).
absl::StatusOr<PretrainResult> Pretrain(
    const PretrainOptions& options, const TokenStream& train,
    const TokenStream& validation,
    const std::function<bool(const PretrainProgress&)>& on_step);

}  // namespace kvasir::compress
