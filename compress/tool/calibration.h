// The model and the calibration text of kvasir-compress plan and apply.
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

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct CalibrationFlags {
  std::string model;
  std::string tokenizer;           // empty: the model's
  std::vector<std::string> texts;  // FILE or NAME=FILE
  int64_t tokens = 0;              // 0: 16384, with information 114688
  int64_t sequence_tokens = 0;     // 0: 1024, or what the model takes
  uint64_t seed = 42;
  std::string cache;  // "none": none
  std::string device = "auto";
  int threads = 0;
  int64_t micro_batch = 0;
  int64_t labels_per_position = 1;
  bool quiet = false;
};
void AddCalibrationFlags(CLI::App* command, CalibrationFlags& flags);

// The checkpoint to compress. InvalidArgument for one that is compressed;
// FailedPrecondition for a device that is not there.
absl::StatusOr<model::Checkpoint> OpenBase(const CalibrationFlags& flags);

// What a method or a plan asks for.
struct CalibrationNeeds {
  // Tokens alone: ranges of codes.
  bool sample = false;
  // Grams and energies; includes the sample.
  bool statistics = false;
  // With information the sample, alone or not, has held out sequences and
  // counts no sinks, and the built-in domains do where no text is given.
  compress::CalibrationParts parts = {.fisher = false};
};

struct CalibrationInputs {
  std::optional<compress::CalibrationSample> sample;
  std::optional<compress::CalibrationRun> run;

  const compress::Calibration* calibration() const {
    return run ? &run->calibration : nullptr;
  }
};

// Reads, samples and measures, as far as needed. Says on standard error what it
// will take before it begins, and how it goes on.
// Errors: InvalidArgument without a text where one is needed; as Calibrate.
absl::StatusOr<CalibrationInputs> PrepareCalibration(
    const CalibrationFlags& flags, const model::Checkpoint& checkpoint,
    const CalibrationNeeds& needs);

// "45 s", "12 min".
std::string HumanTime(absl::Duration time);

}  // namespace kvasir::cli
