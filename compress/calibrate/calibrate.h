// Measures, on a text, the statistics of a model that planners and appliers
// need.
// Without gradients the model is read layer by layer and the hidden states of
// all tokens are kept, so models of any size fit. With Fisher scores or
// information the whole model is in memory in its stored type. Each sequence
// then goes through all layers and back: the forward pass keeps only the
// layers' inputs, and the backward pass computes each layer again, once for all
// backward passes.
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
  // Where layers and sums are kept during the run. The result is on the CPU.
  at::Device device = at::kCPU;
  int threads = 1;
  // Number of sequences that are processed together; 0 means one per thread.
  // The result does not depend on it.
  int64_t micro_batch = 0;
  // Folder of finished calibrations and of the states of stopped ones. If it is
  // empty, nothing is kept.
  std::filesystem::path cache;
  // Time between two saved states.
  absl::Duration save_interval = absl::Minutes(2);

  int64_t sequences_at_a_time() const {
    return micro_batch > 0 ? micro_batch : threads;
  }
};

struct CalibrateProgress {
  // Passes of one sequence through one layer, forward or backward.
  int64_t done = 0;
  int64_t total = 0;
};

struct CalibrateEvents {
  // Called before the work, unless the result is in the cache. An error ends
  // the run. May be empty.
  std::function<absl::Status()> on_start;
  // Called often. If it returns false, the run stops after the micro-batch and
  // keeps its state in the cache.
  std::function<bool(const CalibrateProgress&)> on_progress;
  // Receives messages for the user, such as a damaged cache file or a resumed
  // state.
  std::function<void(const std::string&)> on_message;
};

struct CalibrationRun {
  Calibration calibration;
  bool from_cache = false;
  // Mean loss of the sequences' next tokens in nats. Set only with gradients,
  // and not if the result is from the cache.
  double loss = 0.0;
  absl::Duration elapsed;
  absl::Duration way_back;  // Part of `elapsed`: the head and the backward
                            // pass.
};

// Takes the result from the cache if it is there, also from a calibration with
// more parts. Otherwise it resumes from a state in the cache, or begins. The
// same tokens give the same numbers and id with any number of threads, after
// any number of stops and with any cache content. There are two exceptions: the
// BLAS may round differently if a micro-batch has fewer sequences than there
// are threads, and a GPU rounds differently. Labels for information are drawn
// by counters of sequence, position and draw. If information is asked for and
// there is only one domain, a message says so.
// Errors: Cancelled when stopped; InvalidArgument for a sample without counted
//   tokens, and for weights that give numbers that are not finite, naming the
//   layer; errors of reading the model or an existing file of the cache; an
//   error of saving the state when the run was stopped (during the run that is
//   only a message).
absl::StatusOr<CalibrationRun> Calibrate(const model::Checkpoint& checkpoint,
                                         const CalibrationSample& sample,
                                         const CalibrateOptions& options,
                                         const CalibrateEvents& events);

}  // namespace kvasir::compress
