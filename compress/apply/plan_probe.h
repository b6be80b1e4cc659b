// What a plan costs in truth: applied in memory, and set against the
// uncompressed model on sequences that its calibration has held out.
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

// Owns: the model in float32, and what a plan makes of its attention.
// Threads: one; works in as many as it is told.
// Errors: FailedPrecondition for a sample with fewer than two sequences held
//   out; Cancelled; as LayerApplier and Evaluator.
class PlanProbe {
 public:
  struct Options {
    int threads = 1;
    // Returning false ends with Cancelled.
    std::function<bool()> progress;
  };

  // All outlive the probe.
  static absl::StatusOr<std::unique_ptr<PlanProbe>> Create(
      const model::Checkpoint& base, const Calibration& calibration,
      const CalibrationSample& sample, const Options& options);

  // KL(model || plan), nats a token.
  absl::StatusOr<double> Measure(const kvasir::v1::KvPlan& plan) const;

  // Sequences that plans are measured on. Options::progress is called for each
  // of them by Create, and for each and every layer by Measure.
  static int64_t WindowsOf(const CalibrationSample& sample);

  // Memory, at most: the model's float32 tensors and the attention's again.
  static int64_t BytesOf(const model::Checkpoint& base);

  // Of so many plans, Create included; `operations_per_second` as
  // MeasureOperationsPerSecond finds it.
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
