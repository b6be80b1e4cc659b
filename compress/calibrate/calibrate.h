// Measures what planners and appliers need of a model on a text.
//
// Without gradients the model is read layer by layer and the hidden states of
// all tokens are kept: any size of model. With Fisher or information it is in
// memory, as stored, and each sequence goes through all layers and back: the
// forward pass keeps the layers' inputs alone, the backward pass computes each
// layer again, once for all ways back.
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
  // Where layers and sums lie while it runs; the result is on the CPU.
  at::Device device = at::kCPU;
  int threads = 1;
  // Sequences worked on at a time; 0: one per thread. The result does not
  // depend on it.
  int64_t micro_batch = 0;
  // Where finished calibrations and the states of stopped ones are kept;
  // empty: nowhere.
  std::filesystem::path cache;
  // Between two states saved on the way.
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
  // Called before the work if there is any (nothing is in the cache); an error
  // ends it. May be empty.
  std::function<absl::Status()> on_start;
  // Called often; false stops after the micro-batch and keeps the state in the
  // cache.
  std::function<bool(const CalibrateProgress&)> on_progress;
  // Something a person should know: a damaged cache file, a state resumed.
  std::function<void(const std::string&)> on_message;
};

struct CalibrationRun {
  Calibration calibration;
  bool from_cache = false;
  // Mean loss of the sequences' next tokens, nats; with gradients only, and not
  // from the cache.
  double loss = 0.0;
  absl::Duration elapsed;
  absl::Duration way_back;  // of elapsed: the head and the way back
};

// Hash of the model's weights, the sample and the parts. Reads all weights.
absl::StatusOr<std::string> CalibrationId(const model::Checkpoint& checkpoint,
                                          const CalibrationSample& sample,
                                          const CalibrationParts& parts);

// Takes the result from the cache if it is there, or what is asked for of one
// with more parts; else goes on with a state kept there, or begins. The same
// tokens give the same numbers and id whatever the threads (up to the BLAS's
// rounding where a micro-batch has fewer sequences than there are threads, and
// a GPU's own), however often it was stopped, and whatever the cache holds.
// The labels of information are drawn by counters of sequence, position and
// draw. With information of one domain it says so.
// Errors: Cancelled when stopped; InvalidArgument for a sample without counted
//   tokens, and for weights that give numbers that are not finite, naming the
//   layer; what reading the model says, or a file of the cache that is there
//   and cannot be read; a state that cannot be saved when stopped (on the way
//   that is a message).
absl::StatusOr<CalibrationRun> Calibrate(const model::Checkpoint& checkpoint,
                                         const CalibrationSample& sample,
                                         const CalibrateOptions& options,
                                         const CalibrateEvents& events);

}  // namespace kvasir::compress
