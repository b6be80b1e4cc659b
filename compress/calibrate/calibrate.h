// Runs a model on a text and measures the statistics from which compression
// plans are made and applied. Without gradients only one layer at a time is in
// memory, together with the hidden states of all tokens, so models of any size
// fit. Fisher scores and information need gradients: the whole model is then in
// memory in its stored type, and each sequence goes forward and backward
// through all layers. The forward phase keeps only the layers' inputs. The
// backward phase computes each layer once more and then runs all backward
// passes through it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/calibration.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/calibrate/calibration_sums.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::compress {

struct CalibrateOptions {
  CalibrationParts parts;
  // The device that holds layers and sums during the run. The result is on the
  // CPU.
  at::Device device = at::kCPU;
  int threads = 1;
  // Number of sequences that are processed together; 0 means one per thread.
  // Except for rounding (see Calibrate), the result does not depend on it.
  int64_t micro_batch = 0;
  // Folder for finished calibrations and for the states of stopped runs. If the
  // path is empty, nothing is saved.
  std::filesystem::path cache;
  // Time between two saves of the run's state.
  absl::Duration save_interval = absl::Minutes(2);

  int64_t sequences_at_a_time() const {
    return micro_batch > 0 ? micro_batch : threads;
  }
};

struct CalibrateProgress {
  // A pass takes one sequence through one layer, forward or backward. `done`
  // and `total` count passes.
  int64_t done = 0;
  int64_t total = 0;
};

struct CalibrateEvents {
  // Called before the work begins, unless the result is in the cache. An error
  // that it returns ends the run. May be empty.
  std::function<absl::Status()> on_start;
  // Called often. If it returns false, the run stops after the current
  // micro-batch and saves its state in the cache.
  std::function<bool(const CalibrateProgress&)> on_progress;
  // Receives messages for the user, such as a damaged cache file or a resumed
  // state.
  std::function<void(const std::string&)> on_message;
};

struct CalibrationRun {
  Calibration calibration;
  bool from_cache = false;
  // Mean loss of next-token prediction over the sequences, in nats. 0 if there
  // are no gradients or the result is from the cache.
  double loss = 0.0;
  absl::Duration elapsed;
  // The part of `elapsed` that was spent on the output head and the backward
  // passes.
  absl::Duration way_back;
};

// Measures the statistics. If the cache holds a calibration with at least the
// requested parts, the result is taken from it. Otherwise the run continues
// from a saved state in the cache, or starts from the beginning. The result
// does not depend on the number of threads, on stops or on the cache. It may
// differ by rounding in two cases: on a GPU, and if a micro-batch is one
// sequence and there are several threads. A message warns if information is
// requested for only one domain.
// Errors: Cancelled when stopped; InvalidArgument for a sample without counted
//   tokens, and, naming the layer, for statistics that are not finite; errors
//   of reading the model or a cache file; errors of saving the state of a
//   stopped run. If a save fails while the run goes on, there is only a
//   message.
absl::StatusOr<CalibrationRun> Calibrate(const model::Checkpoint& checkpoint,
                                         const CalibrationSample& sample,
                                         const CalibrateOptions& options,
                                         const CalibrateEvents& events);

}  // namespace kvasir::compress
