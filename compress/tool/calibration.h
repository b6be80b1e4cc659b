// The flags with which commands choose a model and its calibration, and the
// functions that prepare them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/calibrate.h"
#include "compress/calibrate/calibration_sample.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct CalibrationFlags {
  std::string model;
  std::string tokenizer;           // if empty, the model's own tokenizer
  std::vector<std::string> texts;  // each is FILE or NAME=FILE
  int64_t tokens = 0;  // 0: 16384 tokens; 114688 if information is measured
  // 0: 1024 tokens, or the model's context if that is smaller
  int64_t sequence_tokens = 0;
  uint64_t seed = 42;
  std::string cache;  // a folder, or "none" to save nothing
  std::string device = "auto";
  int threads = 0;
  int64_t micro_batch = 0;
  int64_t labels_per_position = 1;
  bool quiet = false;
};
void AddCalibrationFlags(CLI::App* command, CalibrationFlags& flags);

// Opens the checkpoint that is to be compressed. InvalidArgument if it is
// already compressed; FailedPrecondition if the device does not exist.
absl::StatusOr<model::Checkpoint> OpenBase(const CalibrationFlags& flags);

// The data that a method or a plan needs from a calibration.
struct CalibrationNeeds {
  // The sampled tokens, from which the ranges of quantization codes are found.
  bool sample = false;
  // Gram matrices and energies. They need the sample, too.
  bool statistics = false;
  // With parts.information, the sample has held-out sequences and skips sink
  // tokens, and the built-in domains are used if no text is given.
  compress::CalibrationParts parts = {.fisher = false};
};

struct CalibrationInputs {
  std::optional<compress::CalibrationSample> sample;
  std::optional<compress::CalibrationRun> run;

  const compress::Calibration* calibration() const {
    return run ? &run->calibration : nullptr;
  }
};

// Reads the texts, samples tokens and measures statistics, as far as they are
// needed. Prints the expected cost to standard error before it begins, and then
// progress.
// Errors: InvalidArgument if a text is needed and none is given; those of
// Calibrate.
absl::StatusOr<CalibrationInputs> PrepareCalibration(
    const CalibrationFlags& flags, const model::Checkpoint& checkpoint,
    const CalibrationNeeds& needs);

// Writes into the plan's provenance which calibration it was made with.
void RecordCalibration(const CalibrationFlags& flags,
                       const CalibrationInputs& inputs,
                       kvasir::v1::KvPlan* plan);
// Sets `flags` and `needs` to those of the calibration that the plan was made
// with, except for flags that the user gave to `command`. Prints a note about
// this to standard error.
void UseCalibrationOf(const kvasir::v1::KvPlan& plan, const CLI::App& command,
                      CalibrationFlags* flags, CalibrationNeeds* needs);

// Returns the time as text, such as "45 s" or "12 min".
std::string HumanTime(absl::Duration time);

}  // namespace kvasir::cli
