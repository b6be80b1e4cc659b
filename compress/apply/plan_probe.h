// Measures what a plan really costs: the plan is applied in memory and compared
// with the uncompressed model on the sequences that its calibration held out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/calibration.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/evaluate/evaluate.h"
#include "compress/oracle/reference_decoder.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// Owns: the model in float32, and the attention tensors of the plan that is
//   measured.
// Threads: one caller; the work uses as many threads as the options say.
// Errors: FailedPrecondition for a sample with fewer than two sequences held
//   out; Cancelled if Options::progress returns false; errors of LayerApplier
//   and Evaluator.
class PlanProbe {
 public:
  struct Options {
    int threads = 1;
    // Called during the work. If it returns false, the work ends with
    // Cancelled.
    std::function<bool()> progress;
  };

  // All arguments must outlive the probe.
  static absl::StatusOr<std::unique_ptr<PlanProbe>> Create(
      const model::Checkpoint& base, const Calibration& calibration,
      const CalibrationSample& sample, const Options& options);

  // Returns the mean KL divergence of the plan's predictions from the model's,
  // in nats per token.
  absl::StatusOr<double> Measure(const kvasir::v1::KvPlan& plan) const;

  // Number of sequences on which plans are measured. Create calls
  // Options::progress once per sequence; Measure calls it once per sequence and
  // once per layer.
  static int64_t WindowsOf(const CalibrationSample& sample);

  // An upper bound of the memory that a probe takes: all tensors of the model
  // in float32, plus a second copy of the attention tensors.
  static int64_t BytesOf(const model::Checkpoint& base);

  // Time for `plans` measurements, including Create. `operations_per_second`
  // comes from MeasureOperationsPerSecond.
  static absl::Duration TimeOf(const model::DecoderSpec& spec,
                               const CalibrationSample& sample, int64_t plans,
                               double operations_per_second);

 private:
  PlanProbe(const model::Checkpoint& base, const Calibration& calibration,
            const CalibrationSample& sample, const Options& options)
      : base_(base),
        calibration_(calibration),
        sample_(sample),
        options_(options) {}

  const model::Checkpoint& base_;
  const Calibration& calibration_;
  const CalibrationSample& sample_;
  const Options options_;
  std::unique_ptr<ReferenceDecoder> teacher_;
  std::unique_ptr<Evaluator> evaluator_;
};

}  // namespace kvasir::compress
