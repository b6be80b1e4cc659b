// Makes the tensors that a plan needs, layer by layer, including the ranges of
// codes. The caller writes the tensors into an artifact, or uses them in memory
// to measure the plan.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "compress/apply/range_collector.h"
#include "compress/calibrate/calibration.h"
#include "compress/calibrate/calibration_sample.h"
#include "compress/methods/method.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// Returns how the plan's low-rank factors are to be found, which the plan's
// provenance records.
absl::StatusOr<Decomposition> DecompositionOf(const kvasir::v1::KvPlan& plan);

// Returns the type in which the model stores k_proj.
absl::StatusOr<at::ScalarType> StoredTypeOf(const model::Checkpoint& base);

// Applies a plan to one layer after the other. Threads: one caller; the work
// uses as many threads as the options say. Errors: those of ApplyLayerPlan and
// RangeCollector.
class LayerApplier {
 public:
  struct Options {
    // `ranges.threads` is also the number of threads that find factors.
    RangeCollector::Options ranges;
    FactorProfile* profile = nullptr;  // may be null
  };

  // All arguments must outlive the applier. The calibration may be null if the
  // plan needs none. The sample may be null if the plan has no CHANNEL_STATIC
  // codes.
  static absl::StatusOr<LayerApplier> Create(const model::Checkpoint& base,
                                             const kvasir::v1::KvPlan& plan,
                                             const Calibration* calibration,
                                             const CalibrationSample* sample,
                                             const Options& options);

  // Returns the self_attn tensors of the layer, in the form that
  // WriteArtifact's LayerTensorSource requires. Must be called once for each
  // layer, in order.
  absl::StatusOr<TensorMap> Apply(int64_t layer);

 private:
  LayerApplier(const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
               const Calibration* calibration, const Options& options)
      : base_(base),
        plan_(plan),
        calibration_(calibration),
        options_(options) {}

  const model::Checkpoint& base_;
  const kvasir::v1::KvPlan& plan_;
  const Calibration* calibration_;
  const Options options_;
  Decomposition decomposition_ = Decomposition::kWhitened;
  std::optional<RangeCollector> ranges_;
};

}  // namespace kvasir::compress
