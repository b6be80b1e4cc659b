// Predicts a plan's loss on sample rows that were not used to make it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "compress/planner/auto_plan.h"
#include "compress/planner/layer_spaces.h"
#include "compress/planner/spending.h"

namespace kvasir::compress {

// The moments and sample rows from which a layer is planned, and rows to test
// the plan on.
struct PlannedLayer {
  LayerMoments moments;
  SampleRows fitted;
  SampleRows held_out;  // no rows if the calibration held out no sequence
};

// Returns the sample rows of the calibration for which `wanted` [N_s] is true,
// with positions spread over [0, span).
SampleRows RowsWhere(const LayerCalibration& calibration,
                     const at::Tensor& wanted, int64_t span);

struct JudgeRequest {
  const model::DecoderSpec* spec = nullptr;
  const Calibration* calibration = nullptr;
  const std::vector<PlannedLayer>* layers = nullptr;
  int64_t exact_sinks = 0;
  int64_t span = 0;  // positions are in [0, span)
  double kappa = 1;
  int64_t exact_window = 0;
  int threads = 1;
  // Called after the loss of each part was predicted, by one thread at a time.
  std::function<void()> on_part;
};

// Fills in the fields of the prediction that describe layers, bits, held-out
// rows and domains. The loss of a domain is computed twice: with the plan's
// transforms and ranges, and with transforms and ranges found from the other
// domains only. Throws c10::Error.
void JudgePlan(const JudgeRequest& request, const std::vector<TakenPart>& parts,
               AutoPrediction& prediction);

}  // namespace kvasir::compress
