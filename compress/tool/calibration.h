// The model and the calibration of the commands plan and apply.
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
  std::string tokenizer;           // empty: the model's own
  std::vector<std::string> texts;  // FILE or NAME=FILE
  int64_t tokens = 0;  // 0: 16384 tokens; 114688 if information is measured
  // 0: 1024, or the model's limit if that is smaller
  int64_t sequence_tokens = 0;
  uint64_t seed = 42;
  std::string cache;  // "none": nothing is kept
  std::string device = "auto";
  int threads = 0;
  int64_t micro_batch = 0;
  int64_t labels_per_position = 1;
  bool quiet = false;
};
void AddCalibrationFlags(CLI::App* command, CalibrationFlags& flags);

// Opens the checkpoint to compress. InvalidArgument if it is compressed
// already; FailedPrecondition if the device does not exist.
absl::StatusOr<model::Checkpoint> OpenBase(const CalibrationFlags& flags);

// The parts of a calibration that a method or a plan needs.
struct CalibrationNeeds {
  // Only tokens, for the ranges of codes.
  bool sample = false;
  // Gram matrices and energies; this includes the sample.
  bool statistics = false;
  // If information is needed, the sample has held-out sequences and skips sink
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

// Reads, samples and measures as much as is needed. Prints the cost on standard
// error before it begins, and then progress.
// Errors: InvalidArgument if a text is needed and none is given; those of
// Calibrate.
absl::StatusOr<CalibrationInputs> PrepareCalibration(
    const CalibrationFlags& flags, const model::Checkpoint& checkpoint,
    const CalibrationNeeds& needs);

// Writes into the plan's provenance which calibration it was made with.
void RecordCalibration(const CalibrationFlags& flags,
                       const CalibrationInputs& inputs,
                       kvasir::v1::KvPlan* plan);
// Makes `flags` and `needs` ask for the calibration that the plan was made
// with, except for flags that `command` was given. Prints that on standard
// error.
void UseCalibrationOf(const kvasir::v1::KvPlan& plan, const CLI::App& command,
                      CalibrationFlags* flags, CalibrationNeeds* needs);

// "45 s", "12 min".
std::string HumanTime(absl::Duration time);

}  // namespace kvasir::cli
