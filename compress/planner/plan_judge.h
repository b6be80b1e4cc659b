// Judges a plan on sample rows that it was not made with.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "compress/planner/auto_plan.h"
#include "compress/planner/layer_spaces.h"
#include "compress/planner/spending.h"

namespace kvasir::compress {

// The measurements of one layer.
struct PlannedLayer {
  LayerMoments moments;
  SampleRows fitted;
  SampleRows held_out;  // no rows if the calibration held none out
};

// The sample rows of the calibration for which `wanted` [N_s] is true, with
// positions over [0, span).
SampleRows RowsWhere(const LayerCalibration& calibration,
                     const at::Tensor& wanted, int64_t span);

struct JudgeRequest {
  const model::DecoderSpec* spec = nullptr;
  const Calibration* calibration = nullptr;
  const std::vector<PlannedLayer>* layers = nullptr;
  int64_t exact_sinks = 0;
  int64_t span = 0;  // of positions
  double kappa = 1;
  int64_t exact_window = 0;
  int threads = 1;
  // Called after each part, by one thread at a time.
  std::function<void()> on_part;
};

// Fills in what the prediction says of layers, bits, held-out rows and domains.
// Domains are coded as planned, and by transforms and ranges of the other
// domains. Throws c10::Error.
void JudgePlan(const JudgeRequest& request, const std::vector<TakenPart>& parts,
               AutoPrediction& prediction);

}  // namespace kvasir::compress
